"""The rooms of coding agents, and the task folders that are played in them."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from empo2.agents.coding import known, room
from empo2.agents.coding.__main__ import Failed, play
from empo2.agents.coding.task_folders import NeedsContainer, read_folder, read_task
from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.tasks import load_tasks

EXAMPLES = Path(__file__).parents[2] / "examples/coding/tasks"
TESTS = "if grep -q right /app/answer.txt; then echo 1; else echo 0.25; fi > /logs/verifier/reward.txt\n"


def harbor(folder: Path, tests: str = TESTS, toml: str = "", dockerfile: str = "COPY files/ .\n") -> Path:
    for path, text in {
        "task.toml": toml,
        "instruction.md": "Write the right word into /app/answer.txt.\n",
        "environment/Dockerfile": f"FROM python:3.12-slim\nWORKDIR /app\n{dockerfile}",
        "environment/files/answer.txt": "wrong\n",
        "environment/files/deeper/more.txt": "more\n",
        "tests/test.sh": tests,
        "solution/solve.sh": "echo right > /app/answer.txt\n",
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


@pytest.fixture
def outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is not below /tmp, which rooms have for themselves."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", f"{folder}/cache")
        yield Path(folder)


@pytest.fixture(params=["bubblewrap", "plain"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "plain":
        monkeypatch.setattr(room.shutil, "which", lambda name, **options: None if name == "bwrap" else f"/bin/{name}")
    elif shutil.which("bwrap") is None or not room_is_isolated():
        pytest.skip("bubblewrap does not run here")
    return request.param


def room_is_isolated() -> bool:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        return room.Room(Path(folder), "/app", Path(folder)).isolated


def say(task: Path, line: str) -> float:
    """Play a task with a shell line as the agent."""
    return play(read_task(task), "command", ["sh", "-c", line])


def test_the_examples_are_failed_by_doing_nothing_and_passed_by_their_solutions() -> None:
    rows, left_out = read_folder(EXAMPLES)
    assert len(rows) == 9 and not left_out
    for row in rows[:2]:
        folder = Path(row["folder"])
        assert say(folder, "true") == 0
        assert say(folder, (folder / "solution/solve.sh").read_text()) == 1


def test_a_reward_in_either_form(outside: Path, form: str) -> None:
    task = harbor(outside / "task")
    assert say(task, "echo right > /app/answer.txt") == 1
    assert say(task, "true") == 0.25
    assert (task / "environment/files/answer.txt").read_text() == "wrong\n"


def test_variables_of_a_dockerfile_are_filled_in_and_name_the_rooms_folders(outside: Path, form: str) -> None:
    """The room's HOME stays, and the host's programs are found."""
    files = "ENV AT=/app\nWORKDIR ${AT}/${BELOW:-.}\nENV PYTHONPATH=$AT/deeper HOME=/root\n"
    files += 'ENV PATH="/app/bin:$PATH" WORD=${NAME}right${NO_SUCH}\n'
    toml = "[environment.env]\nPLACE = '/app/answer.txt'\n[verifier.env]\nMORE = '$PLACE'\n"
    tests = "cd / && python3 -c 'import more' && cp \"$MORE\" /logs/verifier/reward.txt\n"
    task = harbor(outside / "task", tests, toml, f"COPY files/ .\n{files}")
    (task / "environment/files/deeper/more.py").write_text("")
    line = 'test "$WORD" = right && test "$HOME" != /root && touch "$HOME/mine" && echo 0.5 > "$PLACE"'
    assert say(task, line) == 0.5


def test_an_instruction_is_no_option(outside: Path) -> None:
    task = harbor(outside / "task")
    (task / "instruction.md").write_text("- Write the right word.\n")
    agent = known.CodingAgent("", "sh -c 'echo \"$0\" > answer.txt' {INSTRUCTION}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(known.KNOWN, "mine", agent)
        assert play(read_task(task), "mine", []) == 1
        assert play(read_task(task), "mine", []) == 1


def test_all_that_an_agent_started_ends_at_its_time_limit(outside: Path, form: str) -> None:
    task = harbor(outside / "task", toml="[agent]\ntimeout_sec = 5\n")
    assert say(task, "echo right > answer.txt; setsid sleep 77123.5 & setsid nohup sleep 77123.5 & sleep 77123.5") == 1
    assert not [each for each in psutil.process_iter(["cmdline"]) if "77123.5" in (each.info["cmdline"] or ())]


def test_episodes_begin_alike_and_apart(outside: Path, capfd: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch):
    """Same paths, times and commit; no files of an earlier episode, no solution, no address for rewards."""
    if not room_is_isolated():
        pytest.skip("bubblewrap does not run here")
    task = harbor(outside / "task")
    for name in ("AGL_EVENT_URL", "EMPO2_REWARD_FILE", "TASK_FOLDER", "XDG_CONFIG_HOME", "CODEX_HOME"):
        monkeypatch.setenv(name, "secret")
    look = (
        "pwd; echo $HOME; git log --format='%H %ad'; git status --short; stat -c '%n %y' . * deeper/*; ls /tmp $HOME; "
        f"ls {task}; env | grep secret; touch $HOME/left /tmp/left new; touch /usr/left"
    )
    said = []
    for _ in range(2):
        say(task, look)
        said.append(capfd.readouterr().err)
    assert said[0] == said[1]
    assert said[0].startswith("/app\n/agent\n")
    assert "2026" in said[0] and "Read-only file system" in said[0]
    assert "=secret" not in said[0]
    assert not {"left", "solution", "new"} & {*said[0].split()}


def test_a_home_is_a_copy_and_a_warm_one_is_kept(outside: Path, capfd: pytest.CaptureFixture) -> None:
    """OpenCode's first start fills these folders; a program of its name stands for it here."""
    task, programs, mine = harbor(outside / "task"), outside / "bin", outside / "home"
    programs.mkdir()
    mine.mkdir()
    (mine / "settings").write_text("mine")
    (programs / "opencode").write_text(
        '#!/bin/sh\ncat "$HOME/settings" "$HOME/.config/opencode/opencode.json" >&2\nd="$HOME/.cache/opencode"\n'
        '[ -e "$d" ] && echo warm >&2\nmkdir -p "$d"; touch "$d/package" "$HOME/session"; ls "$HOME" >&2\n'
        'echo changed > "$HOME/settings"\n'
    )
    (programs / "opencode").chmod(0o755)
    said = []
    for _ in range(2):
        os.environ.update(OPENAI_BASE_URL="http://gateway/v1", OPENAI_API_KEY="key-of-the-rollout")
        try:
            play(read_task(task), "opencode", [], [str(programs)], mine)
        finally:
            del os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
        said.append(capfd.readouterr().err)
    assert "warm" not in said[0] and "warm" in said[1]
    for each in said:
        assert each.startswith("mine") and '"baseURL": "http://gateway/v1"' in each and "key-of-the-rollout" in each
    assert (mine / "settings").read_text() == "mine"
    assert not [*outside.glob("cache/**/session")]


@pytest.mark.parametrize(
    ("tests", "reward"),
    [
        ('echo \'{"reward": 0.5, "files": 2}\' > /logs/verifier/reward.json; echo 1 > /logs/verifier/reward.txt', 0.5),
        ("echo '{\"share\": 0.75}' > /logs/verifier/reward.json; exit 3", 0.75),
        ("echo oh", "the tests wrote no reward to /logs/verifier/reward.txt; their output: oh"),
        ("echo .50 > /logs/verifier/reward.txt", 0.5),
        ("echo nan > /logs/verifier/reward.txt", "must be one finite number"),
        ("ln -s /etc/hostname /logs/verifier/reward.txt", "the tests wrote no reward"),
        ("sleep 60", "the tests met their time limit of 1 s"),
    ],
)
def test_rewards_of_harbor(outside: Path, tests: str, reward: float | str) -> None:
    task = harbor(outside / "task", tests, "[verifier]\ntimeout_sec = 1\n" if "sleep" in tests else "")
    if not isinstance(reward, str):
        assert say(task, "echo 1 > /logs/verifier/reward.txt; true") == reward
    else:
        with pytest.raises(Failed, match=reward):
            say(task, "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt")


def test_what_an_agent_leaves_in_the_place_of_the_tests_logs_is_not_followed(outside: Path, form: str) -> None:
    task, mine = harbor(outside / "task"), outside / "mine"
    mine.mkdir()
    (mine / "reward.txt").write_text("of the operator\n")
    (task / "tests/link").symlink_to("/nowhere/in/the/image")
    logs = "rm -rf /logs/verifier; mkdir /logs/verifier; "
    for line in (f"{logs} ln -s {mine}/reward.txt /logs/verifier/test-stdout.txt", f"ln -s {mine} /logs/verifier"):
        assert say(task, line) == 0.25
        assert [(each.name, each.read_text()) for each in mine.iterdir()] == [("reward.txt", "of the operator\n")]


def test_an_installation_that_was_cut_is_not_kept(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task, programs = harbor(outside / "task", toml="[agent]\ntimeout_sec = 1\n"), outside / "bin"
    programs.mkdir()
    (programs / "opencode").write_text('#!/bin/sh\nmkdir -p "$HOME/.cache/opencode/half"; sleep ${SECONDS_OF_IT:-0}\n')
    (programs / "opencode").chmod(0o755)
    for name in ("OPENAI_BASE_URL", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "http://gateway/v1")
    kept = []
    for seconds in ("60", "0"):
        monkeypatch.setenv("SECONDS_OF_IT", seconds)
        assert play(read_task(task), "opencode", [], [str(programs)]) == 0.25
        kept.append(len([*outside.glob("cache/**/half")]))
    assert kept == [0, 1]
    shutil.rmtree(outside / "cache")
    (outside / "cache").write_text("no folder")  # as one that cannot be written
    assert play(read_task(task), "opencode", [], [str(programs)]) == 0.25


def test_an_agent_that_ends_with_an_error(outside: Path) -> None:
    task = harbor(outside / "task", TESTS.replace("0.25", "0"))
    assert say(task, "echo right > answer.txt; exit 1") == 1
    for line, code in (("exit 7", 7), ("kill -9 $$", 137)):
        with pytest.raises(Failed, match=f"exit code {code}") as caught:
            say(task, line)
        assert caught.value.code == code  # the command's, by which a signal is told from the agent's own failure
    for name, words, said in (("command", ["no-such"], "no program ['no-such']"), ("codex", [], "npm i @openai/codex")):
        with pytest.raises(Failed, match=re.escape(said)):
            play(read_task(task), name, words)


def test_a_task_of_terminal_bench(outside: Path) -> None:
    task = outside / "hello"
    (task / "tests").mkdir(parents=True)
    (task / "task.yaml").write_text("instruction: |-\n  Say hello in hello.txt.\nmax_agent_timeout_sec: 20\n")
    (task / "Dockerfile").write_text("FROM ubuntu\nWORKDIR /app\nENV NAME=hello\n")
    (task / "docker-compose.yaml").write_text("services:\n  client:\n    build: .\n")
    (task / "tests/expected").write_text("hello\n")
    (task / "run-tests.sh").write_text('cmp "$TEST_DIR/expected" /app/hello.txt\n')
    assert (read_task(task).instruction, read_task(task).agent_seconds) == ("Say hello in hello.txt.", 20)
    assert say(task, "echo $NAME > hello.txt") == 1
    assert say(task, "true") == 0
    (task / "docker-compose.yaml").write_text("services:\n  client:\n    build: .\n  database:\n    image: x\n")
    with pytest.raises(NeedsContainer, match="services: database"):
        read_task(task)


NEED_CONTAINERS = [
    ("", "RUN pip install numpy", "RUN pip install numpy"),
    ("", "COPY files/ /etc/app", "copies to /etc/app, outside of WORKDIR /app"),
    ("", "COPY --from=builder / .", "COPY --from=builder"),
    ("", "COPY nothing .", "nothing, which is not in the folder"),
    ("", "WORKDIR /usr/src", "WORKDIR /usr/src lies in a folder of the host"),
    ("[[steps]]\nname = 'one'\n", "", "several steps"),
    ("[environment]\nworkdir = '/usr/src'\n", "COPY files/ .", "workdir is /usr/src, its Dockerfile's /app"),
    ("", "COPY files/ ../x", "copies to /x, outside of WORKDIR /app"),
    ("", "ENV WORD=it's", "ENV WORD=it's: No closing quotation"),
    ("[verifier.env]\nOPENAI_API_KEY = '${OPENAI_API_KEY}'\n", "", "its tests ask a model, by OPENAI_API_KEY"),
]


@pytest.mark.parametrize(("toml", "dockerfile", "reason"), NEED_CONTAINERS)
def test_what_needs_a_container_is_named(tmp_path: Path, toml: str, dockerfile: str, reason: str) -> None:
    with pytest.raises(NeedsContainer, match=reason):
        read_task(harbor(tmp_path, toml=toml, dockerfile=f"{dockerfile}\n"))


def test_where_copies_go(tmp_path: Path) -> None:
    read_task(harbor(tmp_path / "said", dockerfile="COPY files/ .\nCMD echo it's\n"))  # what is not read may be odd
    lines = "COPY files/answer.txt .\nCOPY files/answer.txt renamed.txt\nCOPY files/ \\\n  below/\n"
    lines += "COPY files/answer.txt in/\n"
    read_task(harbor(tmp_path / "task", dockerfile=lines)).copy_into(tmp_path / "copy")
    found = {str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()}
    assert found == {"answer.txt", "renamed.txt", "below/answer.txt", "below/deeper/more.txt", "in/answer.txt"}


def test_a_folder_as_the_source_of_tasks(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    for name in ("one", "two", "three"):
        harbor(tmp_path / name)
    harbor(tmp_path / "built", dockerfile="RUN make\n")
    tasks = load_tasks(load_settings("cpu", layer={"tasks": {"source": str(tmp_path)}}))
    assert [row["folder"] for row in tasks.val] == [str(tmp_path / "one")]
    assert {row["folder"] for row in tasks.train} == {str(tmp_path / "two"), str(tmp_path / "three")}
    assert tasks.val[0]["instruction"] == "Write the right word into /app/answer.txt."
    assert "1 of 4 tasks need a container: built: its Dockerfile has RUN make" in capsys.readouterr().out
    (tmp_path / "two/task.toml").write_text("[agent")
    with pytest.raises(ConfigError, match=r"two: TOMLDecodeError"):
        load_tasks(load_settings("cpu", layer={"tasks": {"source": str(tmp_path)}}))
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_tasks(load_settings("cpu", layer={"tasks": {"source": f"{tmp_path}/none"}}))


def test_the_command_line(outside: Path) -> None:
    task, reward = harbor(outside / "task"), outside / "reward"
    words = [sys.executable, "-m", "empo2.agents.coding", "command", "sh", "-c", "echo right > answer.txt"]
    environment = {**os.environ, "EMPO2_REWARD_FILE": str(reward), "TASK_FOLDER": str(task)}
    assert subprocess.run(words, env=environment, capture_output=True, check=True).stdout == b"1.0\n"
    assert reward.read_text() == "1.0\n"
    assert {path.name for path in outside.iterdir()} == {"task", "reward"}
    nowhere = [*words[:3], "--home", str(outside / "none"), *words[3:]]
    done = subprocess.run(nowhere, env=environment, capture_output=True, text=True)
    assert done.returncode == 1 and "none: there is no such folder" in done.stderr
    done = subprocess.run(words, env=os.environ | {"TASK_FOLDER": ""}, capture_output=True, text=True)
    assert done.returncode == 1 and "TASK_FOLDER" in done.stderr
