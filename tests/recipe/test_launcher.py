"""The launcher's processes, with stand-ins: what is said of one that ends, and that none outlives the launcher."""

import contextlib
import io
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest
import yaml
from rich.console import Console

from empo2.recipe.config import load_settings
from empo2.recipe.errors import ConfigError, Preempted, ProcessError
from empo2.recipe.files import run_directory
from empo2.recipe.files.models import resolve_model
from empo2.recipe.gateway_client import GatewayClient
from empo2.recipe.launcher.commands import controller_command, empo2_command, environment_without, settings_descriptor
from empo2.recipe.launcher.launch import launch
from empo2.recipe.launcher.processes import Processes, running
from empo2.recipe.launcher.progress import NewLines, RunProgress
from empo2.recipe.launcher.watch import Watch, Workers
from empo2.recipe.printed import one_line, printable, printable_json
from empo2.recipe.protocol import StepProgress

from ..processes import DAEMON, mark, marked, until

__all__ = ["mark"]

QUESTIONS = Path(__file__).parents[2] / "examples/quiz/questions.jsonl"
SLEEP = [sys.executable, "-c", "import time; time.sleep(1000)"]


@pytest.fixture
def processes(tmp_path: Path, mark: str) -> Iterator[Processes]:
    processes = Processes(tmp_path, {**os.environ, "EMPO2_TEST_MARK": mark})
    yield processes
    processes.stop()


def failure(processes: Processes) -> str:
    with pytest.raises(ProcessError) as caught:
        until(processes.check)
    return str(caught.value)


# Python prints a second traceback, with its own lines between: cannot schedule new futures after interpreter shutdown.
AT_THE_END = """import atexit
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor()
atexit.register(lambda: (print("\\n" * 60, flush=True), pool.submit(print)))
"""
NONE_ADDED = "TypeError: unsupported operand type(s) for +: 'int' and 'NoneType'"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('out of luck'); raise SystemExit(7)", "gateway ended with exit code 7: the end of LOG:\nout of luck"),
        ("", "gateway ended with exit code 0: the end of LOG:\n"),
        ("import os; print('x'); os.abort()", "gateway was ended by SIGABRT: the end of LOG:\nx"),
        (
            "print('noise'); print('empo2: error: the disk is full'); print('more'); raise SystemExit(1)",
            "gateway ended with exit code 1: the disk is full",
        ),
        (
            "print('(a worker) says', end=''); print('empo2: error: the disk is full\\n'); raise SystemExit(1)",
            "gateway ended with exit code 1: the disk is full",
        ),
        (AT_THE_END + "1 + None", f"gateway ended with exit code 1: {NONE_ADDED} (LOG)"),
        (AT_THE_END + "import os; os.kill(os.getpid(), 9)", "gateway was ended by SIGKILL: the end of LOG:\n"),
    ],
)
def test_a_process_that_ends_is_named_with_its_reason(processes: Processes, code: str, says: str) -> None:
    """Its log goes on behind that of an earlier start, whose error it does not have."""
    (processes.directory / "gateway.log").write_text("empo2: error: an old one\n")
    processes.start("controller", SLEEP)
    processes.check()
    processes.start("gateway", [sys.executable, "-c", code])
    assert failure(processes) == says.replace("LOG", str(processes.directory / "gateway.log"))


def test_settings_reach_a_process_whatever_characters_they_have() -> None:
    settings = load_settings("cpu", ["reflection.prompt='Note 😀\u2028 {score}'", "agent.env={A: '\\x07'}"])
    with settings_descriptor(settings) as file:
        assert load_settings(None, file=Path(f"/dev/fd/{file}")) == settings


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_outlives_the_launcher(tmp_path: Path, mark: str, number: int) -> None:
    """One process ends when asked, one leaves a daemon and ignores the question; SIGKILL ends its guard."""
    killed, environment = number == signal.SIGKILL, {**os.environ, "EMPO2_TEST_MARK": mark}
    with pytest.raises(ProcessError if killed else KeyboardInterrupt), running(tmp_path, environment) as processes:
        processes.start("gateway", SLEEP)
        processes.start("trainer", [sys.executable, "-c", DAEMON + "time.sleep(1000)", str(tmp_path / "pid")])
        until((tmp_path / "pid").exists)
        os.kill(processes.pid("trainer") if killed else os.getpid(), number)
        until(processes.check)
    assert not marked(mark)


def test_a_run_under_nohup_survives_its_terminal(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with running(tmp_path, {}) as processes:
            os.kill(os.getpid(), signal.SIGHUP)
            assert processes.check() == []
    finally:
        signal.signal(signal.SIGHUP, before)


SAVES = """
import os, signal
from pathlib import Path
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for _ in range(TIMES):
    os.kill(LAUNCHER, NUMBER)
    signal.sigwait({signal.SIGUSR1})
if CODE < 0:
    os.kill(os.getpid(), -CODE)
checkpoint = Path(RUN) / "checkpoints" / "global_step_1"
checkpoint.mkdir(parents=True)
(checkpoint / "complete").touch()
(Path(RUN) / "metrics.jsonl").write_text('{"step": 1, "val/return": 1}\\n')
raise SystemExit(CODE)
"""


@pytest.mark.parametrize(
    ("number", "code", "times"),
    [(signal.SIGTERM, 143, 1), (signal.SIGUSR1, 130, 1), (signal.SIGTERM, -9, 1), (signal.SIGUSR1, 0, 2)],
)
def test_a_warned_run_saves_and_ends_and_a_second_warning_ends_it_at_once(
    tmp_path: Path, launched: Callable[..., list[str]], number: signal.Signals, code: int, times: int
) -> None:
    trainer = SAVES.replace("RUN", repr(str(tmp_path / "runs" / "a")))
    for name, value in {"LAUNCHER": os.getpid(), "NUMBER": int(number), "TIMES": times, "CODE": code}.items():
        trainer = trainer.replace(name, str(value))
    if times == 2:
        with pytest.raises(KeyboardInterrupt):
            launched(trainer=trainer)
        return
    saved = f"^{number.name} ended the run; the same command with run.name=a run.resume=auto continues after step 1$"
    said = launched(trainer=trainer, fails="trainer was ended by SIGKILL" if code == -9 else saved)
    # Which comes first depends on how long the launcher's look at the processes takes.
    assert f"{number.name}: the step is finished and a checkpoint saved; a second signal ends at once" in said
    assert code == -9 or "step 1/6  validation 1.00" in said


def test_a_controller_that_ends_is_started_again_unless_at_once(processes: Processes, monkeypatch) -> None:
    once = "import pathlib, time; p = pathlib.Path('began'); n = p.exists(); p.touch(); print('up', flush=True)\n"
    processes.environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", f"import os; os.chdir({str(processes.directory)!r})\n{once}time.sleep(1000 * n)"]
    processes.start("controller", command, restartable=True)
    assert failure(processes).startswith("controller ended with exit code 0: the end of ")
    monkeypatch.setattr("empo2.recipe.launcher.processes._STEADY_SECONDS", 0)
    said: list[str] = []
    until(lambda: said.extend(processes.check()) or said)
    assert said == ["controller ended with exit code 0 and was started again"]
    until(lambda: (processes.directory / "controller.log").read_text() == "up\nup\n")  # the first one's log is kept
    time.sleep(0.1)
    assert processes.check() == []


def test_a_gateway_that_is_killed_within_a_minute_is_started_again_once(processes: Processes) -> None:
    command = [sys.executable, "-c", "import os; print('up', flush=True); os.kill(os.getpid(), 9)"]
    processes.start("gateway", command, restartable=True)
    said: list[str] = []
    until(lambda: said.extend(processes.check()) or said)
    assert said == ["gateway was ended by SIGKILL and was started again"]
    assert failure(processes).startswith("gateway was ended by SIGKILL: the end of ")
    assert (processes.directory / "gateway.log").read_text() == "up\nup\n"


def test_a_model_server_that_ends_while_the_trainer_waits_ends_the_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("empo2.recipe.launcher.watch._LOOK_SECONDS", 0)
    processes: Any = SimpleNamespace(descendants=lambda name: psutil.Process().children(recursive=True))
    workers = Workers(processes)
    titles = ("ray::vLLMHttpServer.generate", "ray::IDLE")
    server, idle = (subprocess.Popen([title, "1000"], executable="/bin/sleep") for title in titles)
    log = tmp_path / "raylet.out"  # of Ray 2.60
    log.write_text("killing\nOOM kill reason: Memory usage 24B exceeded threshold of 23B (95.0% of 25B limit)\n\n")
    code = ["-c", "import time; time.sleep(1000)", "--log_dir=/tmp", f"--stdout_filepath={log}"]
    raylet = subprocess.Popen(["raylet", *code], executable=sys.executable)
    try:
        workers.check()
        for process in (idle, server):
            process.kill()
            process.wait()
        workers.check()  # the trainer ends its workers itself when it is done
        monkeypatch.setattr("empo2.recipe.launcher.watch._GRACE_SECONDS", 0)
        title = rf"ray::vLLMHttpServer \(process {server.pid}\) has ended, and the trainer waits for it"
        with pytest.raises(ProcessError, match=rf"^{title}: Ray killed it for want of memory: .* of 25B limit\); see"):
            workers.check()
        log.unlink()
        with pytest.raises(ProcessError, match=rf"^{title}$"):
            workers.check()
    finally:
        for process in (server, idle, raylet):
            process.kill()
            process.wait()


def test_a_process_has_descendants_of_its_own(processes: Processes) -> None:
    """An agent's Ray, or vLLM, is none of the trainer's."""
    for name in ("trainer", "controller"):
        processes.start(name, ["/bin/sh", "-c", "sleep 1000; true"])

    def sleeping(name: str) -> set[int]:
        return {each.pid for each in processes.descendants(name) if each.name() == "sleep"}

    until(lambda: sleeping("trainer") and sleeping("controller"))
    assert not sleeping("trainer") & sleeping("controller") and processes.descendants("gateway") == []


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str) -> Callable[..., list[str]]:
    """The real `launch`, whose gateway, controller and trainer are stand-ins; what it says."""

    def run(*overrides: str, fails: str | None = None, **programs: str) -> list[str]:
        def command(verb: str, descriptor: int) -> list[str]:
            code = programs.get({"train": "trainer"}.get(verb, verb), SLEEP[-1])
            return [sys.executable, "-c", code, f"/dev/fd/{descriptor}"]

        monkeypatch.setattr("empo2.recipe.launcher.commands.empo2_command", command)
        monkeypatch.setattr("empo2.recipe.launcher.commands.controller_command", lambda *_: SLEEP)
        monkeypatch.setattr("empo2.recipe.launcher.commands.wait_for", lambda *_: None)
        # A trainer that fails is seen at once; what it has written before is told all the same.
        monkeypatch.setattr("empo2.recipe.launcher.watch._POLL_SECONDS", 0.05)
        monkeypatch.setattr("empo2.recipe.preflight.machine_checks._free_memory", lambda: 1e12)  # else a warning
        monkeypatch.setenv("EMPO2_TEST_MARK", mark)
        monkeypatch.setattr(sys, "path", [str(Path(__file__).parents[1]), *sys.path])
        chosen = [f"run.directory={tmp_path / 'runs'}", "run.name=a", f"tasks.source={QUESTIONS}"]
        settings = load_settings("cpu", [*chosen, "agent.class=stack_agent:GuessingAgent", *overrides])
        output = io.StringIO()
        with pytest.raises((ProcessError, Preempted), match=fails) if fails else contextlib.nullcontext():
            launch(settings, "cpu", Console(file=output, width=200))
        return output.getvalue().splitlines()

    return run


def test_the_settings_reach_the_processes_with_their_secrets_and_the_run_folder_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launched: Callable[..., list[str]]
) -> None:
    read = "import sys, time; open({!r}, 'w').write(open(sys.argv[1]).read()); time.sleep({})"
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_environment")
    monkeypatch.setenv("EMPO2_KEY", "key-of-the-gateway")
    env = {"OPENAI_API_KEY": "sk-secret-1", "LINE": "play --key sk-secret-1 --hf hf_of_the_environment"}
    said = launched(
        f"agent.env={json.dumps(env)}",
        "verl.trainer.project_name=http://me:password@proxy",
        gateway=read.format(str(tmp_path / "gateway"), 1000),
        trainer=f"import os, time\nwhile not os.path.exists({str(tmp_path / 'gateway')!r}): time.sleep(0.1)\n"
        + read.format(str(tmp_path / "trainer"), 0),
    )
    for name in ("trainer", "gateway"):
        given = yaml.safe_load((tmp_path / name).read_text())
        assert (given["agent"]["env"], given["verl"]["trainer"]["project_name"]) == (env, "http://me:password@proxy")
    written = "".join(path.read_text() for path in (tmp_path / "runs").rglob("*") if path.is_file())
    for secret in ("key-of-the-gateway", "sk-secret-1", "hf_of_the_environment", "me:password"):
        assert secret not in written + "\n".join(said), secret
    with pytest.raises(ConfigError, match=r"agent.env.OPENAI_API_KEY='\(secret, left out\)'.*give the value"):
        load_settings(file=tmp_path / "runs" / "a" / "config.yaml")


TRAINER = """
import json, os
from pathlib import Path
from empo2.recipe.marked_lines import say_loading, say_note
from empo2.recipe.rollout_log import write_rollouts
run = Path(RUN)
say_loading("Ray")
say_note("Ray was started at the second attempt")
say_loading("")
print("Traceback of some library", flush=True)
of_all = dict(phase="training", mode="no memory", dropped="failed_by_agent", cause="KeyError at quiz.py:3 in run")
for step, message in ((1, "'a'"), (2, "'b'"), (2, "'c'")):
    failed = {"rollout": f"{step}{message[1]}ffffffffff", "step": step, **of_all}
    write_rollouts(run / "rollouts", [{**failed, "example": f"KeyError: {message} (quiz.py:3 in run)"}], "all")
with open(run / "metrics.jsonl", "a") as file:
    for step in (1, 2):
        file.write(json.dumps({"step": step, "val/return": step, "empo2/rollouts_dropped": 1}) + "\\n")
"""


@pytest.mark.slow
def test_a_run_tells_its_causes_when_they_appear_and_counts_them_at_its_end(
    tmp_path: Path, launched: Callable[..., list[str]]
) -> None:
    run = tmp_path / "runs" / "a"
    said = launched("run.steps=2", trainer=TRAINER.replace("RUN", repr(str(run))))
    end = f"dropped  3 of steps 1 to 2, failed by agent: KeyError: 'a' (quiz.py:3 in run); empo2 show {run} 2cffffff"
    begin = next(number for number, line in enumerate(said) if "loading Ray" in line)
    assert [re.sub(r"^ +\d+ s", "N s", line) for line in said[begin:]] == [
        "N s  loading Ray; then verl, gateway, policy, vLLM",
        "note   Ray was started at the second attempt",
        "N s  all is loaded",
        "step 1/2  validation 1.00",
        f"dropped  1 of step 1, failed by agent: KeyError: 'a' (quiz.py:3 in run); empo2 show {run} 1affffff",
        "step 2/2  validation 2.00",
        end,
        f"rollouts  0.0 MB in {run / 'rollouts'}; empo2 show {run}",
    ]


def test_a_gateway_that_ends_ends_the_run(launched: Callable[..., list[str]]) -> None:
    """Within a minute of its start it is started again once."""
    said = launched(gateway="import os; os.kill(os.getpid(), 9)", fails="gateway was ended by SIGKILL: ")
    assert said[-1].endswith("run.name=a run.resume=auto starts over: no checkpoint is complete")


def test_a_resume_with_other_tasks_says_so(
    tmp_path: Path, launched: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight questions, and then three."""
    monkeypatch.setattr(run_directory, "_lock", lambda folder: os.open(folder, os.O_RDONLY))  # this process has it
    lines, folder = QUESTIONS.read_text().splitlines(), str(tmp_path / "runs" / "a" / "checkpoints" / "global_step_1")
    saves = f"from pathlib import Path\nfrom empo2.recipe.run_folder import mark_complete\nfolder = Path({folder!r})\n"
    trainer = saves + "folder.mkdir(parents=True, exist_ok=True)\nmark_complete(folder)"
    told = []
    for count in (8, 8, 3):
        (tmp_path / "tasks.jsonl").write_text("\n".join(lines[:count]))
        options = (f"tasks.source={tmp_path / 'tasks.jsonl'}", "run.resume=auto", "run.steps=2")
        said = launched(*options, trainer=trainer)
        told.append([line for line in said if "the tasks are not those" in line])
    assert told[:2] == [[], []] and "set-aside-2/tasks.json" in told[2][0]


def test_a_gateway_that_answers_with_an_error_ends_no_run(processes: Processes) -> None:
    """Whether it still lives is for `Processes.check` to say."""
    answers = httpx.MockTransport(lambda _: httpx.Response(500, json={"detail": "no"}))
    with RunProgress(Console(file=io.StringIO()), 1, started=0.0) as shown:
        watch = Watch(processes, shown)
        shown.loading("")
        processes.start("trainer", ["true"], trains=True)
        with contextlib.closing(GatewayClient("http://gateway", "key", answers)) as gateway:
            watch.until_done(gateway)


def test_a_continued_run_has_fewer_metrics_before_it_has_new_ones(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')
    new = NewLines(file)
    file.write_text('{"step": 1}\n')
    assert new.rows() == []
    file.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert new.rows() == [{"step": 2}]
    file.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert (new.rows(), new.rows()) == ([{"step": 3}], [])


def test_what_is_told_of_a_run_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, output = [0.0], io.StringIO()
    monkeypatch.setattr("empo2.recipe.launcher.progress.time.monotonic", lambda: clock[0])
    with RunProgress(Console(file=output, width=80), 6, done=2, started=-1.0) as shown:
        for clock[0], stage in {0: "gateway", 1: "gateway", 39: "vLLM", 69: ""}.items():
            shown.loading(stage)
        for clock[0], playing in (
            (69, StepProgress()),  # no rollout yet
            (70, StepProgress(rollouts=8)),
            (140, StepProgress(rollouts=8, ended=3, calls=41, tips=2)),
            (150, StepProgress(rollouts=8, ended=4, calls=50, tips=2)),
            (201, StepProgress()),
            (261, StepProgress(rollouts=3, ended=1, validation=True, calls=4)),
        ):
            shown.playing(playing)
    assert output.getvalue().splitlines() == [
        "   1 s  loading gateway; then policy, vLLM",
        "  40 s  loading vLLM",
        "  70 s  all is loaded",
        "first rollout 71 s after the start",
        "step 3/6  rollouts 3/8  41 model calls  2 tips written",
        "step 3/6  rollouts are done; the policy is updated",
        "validation rollouts 1/3  4 model calls",
    ]


def test_a_terminal_has_one_line_that_changes() -> None:
    output = io.StringIO()
    console = Console(file=output, width=120, force_terminal=True, color_system=None)
    with RunProgress(console, 6, started=time.monotonic()) as shown:
        shown.loading("verl")
        shown._bar.refresh()
        shown.playing(StepProgress(rollouts=8, ended=3, calls=41, tips=2))
        shown._bar.refresh()
        shown.step({"step": 1, "val/return": 8.25})
    frames = output.getvalue()
    assert "loading verl; then gateway, policy, vLLM" in frames
    assert "rollouts 3/8  41 model calls  2 tips written" in frames and "step 1/6  validation 8.25" in frames


def test_a_metric_that_is_not_finite_is_not_told(tmp_path: Path) -> None:
    """The trainer writes null for it."""
    new, output = NewLines(tmp_path / "metrics.jsonl"), io.StringIO()
    line = {"step": 1, "empo2/memory_fraction": 0.0, "training/return": None, "val/return": None, "timing_s/step": None}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line | {"empo2/memory_size": None}) + "\n")
    with RunProgress(Console(file=output, width=120), 6, started=0.0) as shown:
        for row in new.rows():
            shown.step(row)
    assert output.getvalue().split() == ["step", "1/6", "return", "nan", "no", "memory", "0", "tips", "0", "s"]


HOSTILE = "a\x1b[2Jb\x9b31mc\u202ed\u2066e\r\x07"


def test_what_others_wrote_commands_no_terminal() -> None:
    output = io.StringIO()
    with RunProgress(Console(file=output, width=120, force_terminal=True, color_system=None), 6, started=0.0) as shown:
        shown.say(f"note   {HOSTILE}")
    (said,) = [line for line in output.getvalue().splitlines() if "note" in line]
    assert "a\N{REPLACEMENT CHARACTER}[2Jb" in said and not set(said) & set("\x9b\u202e\u2066\x07")
    assert json.loads(printable_json(json.dumps([HOSTILE], ensure_ascii=False))) == [HOSTILE]
    assert printable_json(json.dumps(HOSTILE, ensure_ascii=False)).isascii()
    assert one_line(HOSTILE + "\n" + "x" * 1000).isprintable()
    assert printable("é 漢 👩‍👩‍👧 \t\n") == "é 漢 👩‍👩‍👧 \t\n"  # what is text stays


def test_a_log_of_any_size_is_read_from_its_end(processes: Processes) -> None:
    processes.start(
        "gateway", ["sh", "-c", "yes 'empo2: error: old' | head -c 50000000; echo 'empo2: error: new'; exit 1"]
    )
    assert failure(processes).endswith("empo2: error: new".removeprefix("empo2: error: "))


def test_a_full_disk_is_the_reason(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    full = shutil._ntuple_diskusage(2**30, 2**30, 0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full)
    processes.start("trainer", ["sh", "-c", "printf 'Traceback (most recent call last):\\n  File'; exit 1"])
    assert failure(processes).endswith(f"the disk of {processes.directory} is full (0.0 MiB left); make room there")


ON_A_FULL_DISK = """
mount -t tmpfs -o size=1m tmpfs "$1" && head -c "$2" /dev/zero > "$1/ballast" || exit 99
disk=$1; shift 2; "$@" train $SETTINGS; code=$?; rm "$disk/ballast"; "$@" check $SETTINGS; exit $code
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pages", "said"),
    [
        pytest.param(0, "the run cannot be written: No space left on device", id="settings"),
        pytest.param(1, "make room on that disk", id="tasks"),
        pytest.param(3, " MiB left); make room", id="memory", marks=pytest.mark.rare),  # trainer and gateway start
    ],
)
def test_a_start_that_meets_a_full_disk_says_so_and_leaves_its_name_free(tmp_path: Path, pages: int, said: str) -> None:
    """The disk is a small one of this test's own, with so many pages free."""
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode:
        pytest.skip("needs root and util-linux for a disk of its own")
    resolve_model("smollm2-135m-notes")  # the house's; what is said while it is made is not what is looked at
    coin = Path(__file__).parents[2] / "agents" / "houses" / "coin.yaml"
    settings = f"--profile cpu --config {coin} run.directory={tmp_path}/runs run.name=a run.steps=1"
    free = 2**20 - pages * resource.getpagesize()
    command = ["unshare", "--mount", "sh", "-c", ON_A_FULL_DISK, "sh", str(tmp_path), str(free)]
    command += [sys.executable, "-m", "empo2.recipe.cli"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "SETTINGS": settings}, capture_output=True, text=True
    )
    assert done.returncode in (1, 2), done
    (line,) = [line for line in done.stderr.splitlines() if "warning" not in line]
    assert line.startswith("empo2: error: ") and said in line
    again = "has a start that failed, and is used again" if pages else "is new"
    assert f"{tmp_path}/runs/a {again}" in " ".join(done.stdout.split())


def test_what_processes_leave_in_the_folder_of_temporary_files_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outer := tmp_path / "outer").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(outer))
    with running(tmp_path, dict(os.environ)) as processes:
        processes.start("gateway", ["sh", "-c", "mktemp; mktemp -d; echo $RAY_TMPDIR; sleep 1000"])
        until(lambda: (tmp_path / "gateway.log").read_text().count("\n") == 3)
        (folder,) = outer.iterdir()
        made, made_too, ray = (tmp_path / "gateway.log").read_text().split()
        assert Path(made).parent == Path(made_too).parent == folder and folder.stat().st_mode & 0o777 == 0o700
        assert ray == os.environ.get("RAY_TMPDIR", str(outer / "ray"))
    assert [*outer.iterdir()] == []


def test_a_module_in_the_current_folder_runs_in_the_place_of_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("httpx", "vllm", "uvicorn"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    settings = load_settings("cpu", ["agent.class=my_agent:Agent"])
    for command in (empo2_command("gateway", 0), controller_command(settings, "http://127.0.0.1:1")):
        code = "import importlib.util as u; print([u.find_spec(n).origin for n in ('httpx', 'uvicorn')])"
        command[command.index("-m") :] = ["-c", code]
        done = subprocess.run(command, env=environment_without(), capture_output=True, text=True, check=True)
        assert "site-packages" in done.stdout and str(tmp_path) not in done.stdout
