"""The files of a run's rollouts, and `empo2 show`, which reads them."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from agentlightning.schemas import RolloutState

from empo2.memory import MemoryStore, Step
from empo2.recipe.cli.verbs import run
from empo2.recipe.errors import Empo2Error
from empo2.recipe.protocol import ERROR_EVENT, Mode
from empo2.recipe.rollout_log import (
    SCHEMA,
    CallRow,
    LoggedRollout,
    read_calls,
    read_dropped,
    read_rollouts,
    rollout_files,
    write_rollouts,
)
from empo2.recipe.tip_block import render_tips
from empo2.recipe.trainer.rollout_calls import calls_of
from empo2.recipe.trainer.shown_rollouts import call_rows
from empo2.recipe.trainer.step_results import StepResults

from .rollout_events import recorded, refused, request, rollout_of

OFF_POLICY = Mode.of(memory=True, off_policy=True)
ERROR = {"type": "KeyError", "message": "'x'", "where": "quiz.py:3 in run", "output": "Traceback ...\nKeyError: 'x'"}


def logged(name: str, step: int, **changes: Any) -> CallRow:
    values: dict[str, Any] = {"phase": "training", "mode": "memory, off-policy", "return": 7.0, "call": 0}
    return {"rollout": name, "step": step} | values | changes


def test_what_is_kept_and_why_rollouts_were_dropped(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    assert read_dropped(folder) == []
    for step in range(13):
        second = logged(f"a{step}", step, call=1, tip_ids=[4, 5])
        write_rollouts(folder, [logged(f"v{step}", step, phase="validation")], 3)
        write_rollouts(folder, [logged(f"a{step}", step, advantage=0.5, tip_ids=[4]), second], 3)
        why = {"dropped": "failed_by_agent", "cause": "KeyError at quiz.py:3", "example": f"KeyError: 'door {step}'"}
        write_rollouts(folder, [logged(f"{name}{step}", step, **why, call=None) for name in "bc"], 3)
    write_rollouts(folder, [logged("d12", 12, dropped="no_reward", phase="validation")], 3)
    assert [file.name.partition("-")[2] for file in rollout_files(folder, 12)] == [
        *("training-01.parquet", "training-02.parquet"),  # another attempt at the step
        *("validation-01.parquet", "validation-02.parquet"),
    ]
    assert [each.id for each in read_rollouts(folder)][:8] == ["a10", "b10", "c10", "v10", "a11", "b11", "c11", "v11"]
    assert [each.id for each in read_rollouts(folder, "a1")] == ["a10", "a11", "a12"]
    assert [each.id for each in read_rollouts(folder, "a1", last=2)] == ["a11", "a12"]
    assert [each.id for each in read_rollouts(folder, step=11)] == ["a11", "b11", "c11", "v11"]
    assert read_rollouts(folder, "a11") == [
        LoggedRollout("a11", 11, "training", "memory, off-policy", 7.0, 0.5, None, turns=2, tips=2)
    ]
    assert read_rollouts(folder, "b11")[0].turns == 0
    errors, silent = read_dropped(folder)
    assert (errors.count, errors.first, errors.last, errors.rollout) == (6, 10, 12, "c12")
    assert (silent.reason, silent.count, silent.first, silent.last) == ("no_reward", 1, 12, 12)
    assert [each.count for each in read_dropped(folder, 11)] == [2]
    assert errors.told(Path("runs/a")) == (
        "6 of steps 10 to 12, failed by agent: KeyError: 'door 10'; empo2 show runs/a c12"
    )
    assert silent.told(Path("runs/a")) == "1 of step 12, no reward; empo2 show runs/a d12"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "rollouts"
    write_rollouts(folder, [logged("a", 1)], 1)

    def full(table: Any, file: Path, **_: Any) -> None:
        file.write_bytes(b"PAR1 the beginning")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OSError, match="No space"):
        write_rollouts(folder, [logged("b", 2)], 1)
    assert rollout_files(folder) == [*folder.iterdir()]  # no older step is given up for it
    (folder / ".000002-training-01.parquet.tmp").write_bytes(b"PAR1 of a process that was killed")
    assert [each.id for each in read_rollouts(folder)] == ["a"] == pq.read_table(folder)["rollout"].to_pylist()


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    with pytest.raises(Empo2Error, match=r"rollouts: there is no such folder; training writes it"):
        read_rollouts(folder)
    folder.mkdir()
    assert read_rollouts(folder) == []
    (folder / "000001-training-01.parquet").write_text("not Parquet")
    for read in (read_rollouts, read_dropped, lambda folder: read_calls(folder, "a")):
        with pytest.raises(Empo2Error, match=r"cannot be read: .*000001-training-01.parquet"):
            read(folder)


def rows_of(rollouts: list[Any], memory: Path = Path("none"), /, **dropped: str) -> list[CallRow]:
    """Of rollouts as they are logged, with the reasons of those that were dropped."""
    results = StepResults(calls={each.rollout_id: calls_of(each.events) for each in rollouts})
    for each in rollouts:
        if reason := dropped.get(each.rollout_id):
            results.drop(each, reason)
    return call_rows(rollouts, results, 3, "training", {"trained": 1.0, "abc111": 0.812}, memory)


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush-hush-hush")
    text = 'the door says "hush-hush-hush"'
    events = [request([1], [2], messages=[{"role": "user", "content": text}], text=text), refused(400, text)]
    error = {"event_type": ERROR_EVENT, "data": ERROR | {"message": text, "output": text}}
    bad = rollout_of("a", [*events, error], input={"api_key": "sk-1234", "said": text}, error_message=text)
    write_rollouts(tmp_path / "rollouts", rows_of([bad], a="no_reward"), "all")
    (file,) = rollout_files(tmp_path / "rollouts")
    said = str(pq.read_table(file).to_pylist())
    assert said.count("the door says") == 2 * 4 + 3 and "hush" not in said and "sk-1234" not in said


def test_tokens_messages_and_tips_as_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chat that goes on, one whose reply was tokenized differently, and a prompt written anew."""
    with closing(MemoryStore(tmp_path / "memory.sqlite", embedder="all-MiniLM-L6-v2", dimension=384)) as store:
        step = Step("A dark room.", np.eye(384, dtype=np.float32)[0], "look")
        store.add_episode("s", "before", tip="Take the lamp.", score=7, success=True, steps=[step])
    prompts = [[1, 2], [1, 2, 10, 11, 3], [1, 2, 10, 11, 3, 13, 4], [9]]
    replies = [[10, 11], [12], [14], []]
    events = []
    for prompt, reply in zip(prompts, replies, strict=True):
        tip_ids = [1, 99] if len(prompt) == 2 else []  # 99 has been dropped since
        events += [request(prompt, reply, version=4), recorded(prompt, tip_ids=tip_ids, visits=2, intrinsic_reward=0.5)]
    quiet = rollout_of("quiet", [], OFF_POLICY, final_reward=None, running_at=None)
    rows = rows_of([rollout_of("trained", events, OFF_POLICY), quiet], tmp_path / "memory.sqlite")
    (folder := tmp_path / "runs/first/rollouts").parent.mkdir(parents=True)
    write_rollouts(folder, rows, "all")
    (file,) = rollout_files(folder)
    rows = pq.read_table(file).to_pylist()
    assert [*rows[0]] == SCHEMA.names
    assert [row["call"] for row in rows] == [0, 1, 2, 3, None]
    assert [row["prompt_ids"] for row in rows] == [[1, 2], [3], [13, 4], [9], None]
    before: list[int] = []
    for row, prompt in zip(rows, prompts, strict=False):  # as docs/runs.md says
        before = before[: row["prompt_tokens"] - len(row["prompt_ids"])] + row["prompt_ids"]
        assert before == prompt
        before += row["response_ids"]
    assert (rows[0]["tip_ids"], rows[0]["tips"], rows[1]["tips"]) == ([1, 99], ["Take the lamp.", None], [])
    assert [row["log_probs"] for row in rows[:2]] == [[-0.5, -0.5], [-0.5]]
    assert [rows[0][name] for name in ("intrinsic", "visits", "version", "begun", "seconds")] == [0.5, 2, 4, 0.5, 0.5]
    page = (Path(__file__).parents[2] / "docs/runs.md").read_text()
    monkeypatch.chdir(tmp_path)
    with pytest.importorskip("duckdb").connect() as database:
        found = database.sql(page.partition("```sql\n")[2].partition("```")[0]).fetchall()
    assert found == [(3, "memory, off-policy", 50.0, 1)]


def test_why_rollouts_were_dropped() -> None:
    failed: dict[str, Any] = {"rollout_state": RolloutState.FAILED, "final_reward": None}
    message = "subprocess exited with code 1"
    played = [
        rollout_of("agent", [{"event_type": ERROR_EVENT, "data": ERROR}], error_message=message, **failed),
        rollout_of("late", [], error_message="local subprocess timed out", **failed),
        rollout_of("alone", []),
        rollout_of("trained", []),
    ]
    dropped = {"agent": "failed_by_agent", "late": "failed_by_system", "alone": "alone_in_group"}
    rows = {row["rollout"]: row for row in rows_of(played, **dropped)}
    assert {name: (row["dropped"], row["cause"], row["example"], row["advantage"]) for name, row in rows.items()} == {
        "agent": ("failed_by_agent", "KeyError at quiz.py:3 in run", "KeyError: 'x' (quiz.py:3 in run)", None),
        "late": ("failed_by_system", "local subprocess timed out", "local subprocess timed out", None),
        "alone": ("alone_in_group", "", "", None),
        "trained": (None, None, None, 1.0),
    }
    assert (rows["agent"]["error"], rows["agent"]["output"]) == ("KeyError: 'x' (quiz.py:3 in run)", ERROR["output"])


def test_what_is_kept_of_a_rollout_is_bounded() -> None:
    """An image of 5 MB; and a chat that is written anew at every turn."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 5_000_000}}]}

    def shown(events: list[Any]) -> list[Any]:
        return [row["messages"] for row in rows_of([rollout_of("r", events)])]

    assert len(json.dumps(shown([request([1], [7], messages=[image])]))) < 25_000
    anew = [request([n], [7], messages=[{"role": "user", "content": f"{n} " + "y" * 15_000}]) for n in range(200)]
    messages = shown(anew)
    assert len(messages) == 200 and len(json.dumps(messages)) < 500_000
    assert messages[-1] == [{"role": "", "content": "(15037 characters are not kept)"}]


def test_the_list_and_two_episodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One was trained off-policy, the agent of the other failed. A control character does not reach the terminal."""
    chat = [{"role": "user", "content": f"{render_tips(['Take the lamp first.'])}\n\nA dark room.\x1b[31m"}]
    later = [*chat, {"role": "assistant", "content": "look"}, {"role": "user", "content": "A lamp."}]
    events = [
        request(range(40), [7, 8, 9], messages=chat, text="look"),
        recorded(range(40), tip_ids=[4], visits=3, intrinsic_reward=1.0),
        request(range(50), [7, 8], messages=later, text="take lamp", seconds=1.0),
        recorded(range(50), intrinsic_reward=0.25),
        refused(400, "too long", messages=[{"role": "system", "content": "You play."}]),
    ]
    good = rollout_of("abc111", events, OFF_POLICY, input={"room": 9}, final_reward=7.0)
    ended: dict[str, Any] = {"rollout_state": RolloutState.FAILED, "final_reward": None}
    error = {"event_type": ERROR_EVENT, "data": ERROR}
    bad = rollout_of("abd222", [request([1], [2]), error], OFF_POLICY, error_message="exited", **ended)
    rows = rows_of([good, bad], abd222="failed_by_agent")
    rows[0]["masked"] = [False, True, True]
    write_rollouts(tmp_path / "rollouts", rows, "all")
    spans = [["read", "A dark room.", 4], ["trained", "lo", 1], ["masked", "ok", 1]]
    (tmp_path / "episodes.jsonl").write_text(json.dumps({"step": 3, "rollout": "abc111", "spans": spans}) + "\n")

    def shown(*arguments: object) -> list[str]:
        assert run(["show", str(tmp_path), *map(str, arguments)]) == (0, "")
        return [line.rstrip() for line in capsys.readouterr().out.splitlines()]

    _, _, *listed, last = shown()
    assert [row.split() for row in listed] == [
        ["3", "abc111", "memory,", "off-policy", "7", "+0.81", "3", "1"],
        ["3", "abd222", "memory,", "off-policy", "1", "0", "failed", "by", "agent"],
    ]
    why = "failed by agent: KeyError: 'x' (quiz.py:3 in run)"
    assert last == f"dropped  1 of step 3, {why}; empo2 show {tmp_path} abd222"
    for choice in (["--dropped"], ["--step", 2]):
        assert "abc111" not in "".join(shown(*choice))
    lines = shown("abc")
    for line in (
        "rollout   abc111, step 3, training, memory, off-policy",
        'task      {"room": 9}',
        "return    7, intrinsic 1.25",
        "advantage +0.812",
        "turn 1  40 + 3 tokens  0.5 s  tips 4  2 masked  visits 3",
        "    - Take the lamp first.",
        "    A dark room.\N{REPLACEMENT CHARACTER}[31m",
        "    look",
        "    A lamp.",
        "turn 2  50 + 2 tokens  1.0 s",
        "turn 3  0 + 0 tokens  0.5 s  a chat written anew",
        "  no reply: HTTP 400: {'error': 'too long'}",
        "A dark room.lo[[ok]]",
    ):
        assert lines.count(line) == 1, line  # each message stands once
    lines = shown("abd")
    assert lines[2:4] == ["return    none reported", f"dropped   {why}"]
    assert lines[-3:] == ["the agent ended with", "    Traceback ...", "    KeyError: 'x'"]
    for asked, said in (
        ("zzz", f"no rollout 'zzz' is kept; `empo2 show {tmp_path}` lists the last ones"),
        ("ab", "2 rollouts begin with 'ab', such as abc111, abd222; give more of the id"),
    ):
        assert run(["show", str(tmp_path), asked]) == (1, f"empo2: error: {tmp_path}: {said}")
