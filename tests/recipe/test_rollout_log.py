"""The file of the last steps' rollouts, and `empo2 show`, which reads it."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from empo2.memory import MemoryStore, Step
from empo2.recipe.cli.verbs import run
from empo2.recipe.errors import Empo2Error
from empo2.recipe.gateway.tips.text import render_tips
from empo2.recipe.rollout_log import LoggedRollout, RolloutLog, read_dropped, read_played, read_rollouts


def logged(name: str, step: int, **changes: Any) -> LoggedRollout:
    values: dict[str, Any] = {"phase": "training", "mode": "memory, off-policy", "return_": 7.0, "turns": 2}
    return LoggedRollout(id=name, step=step, **values | changes)


def failed(name: str, step: int, message: str) -> LoggedRollout:
    cause, example = "KeyError at quiz.py:3 in run", f"KeyError: {message} (quiz.py:3 in run)"
    return logged(name, step, return_=None, dropped="failed_by_agent", cause=cause, example=example)


def test_the_last_ten_steps_are_kept_and_all_causes_counted(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.sqlite"
    log = RolloutLog(file)
    log.write([])
    assert not file.exists() and read_dropped(file) == []
    for step in range(13):
        log.write([logged(f"v{step}", step, phase="validation"), logged(f"a{step}", step, advantage=0.5)])
        log.write([failed(f"b{step}", step, f"'door {step}'"), failed(f"c{step}", step, "'x'")])
        log.write([logged(f"d{step}", step, dropped="no_reward")] if step > 10 else [])
    kept = read_rollouts(file)
    assert sorted({each.step for each in kept}) == [3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert [each.id for each in kept if each.step == 11] == ["v11", "a11", "b11", "c11", "d11"]
    assert [each.id for each in read_rollouts(file, "a1")] == ["a10", "a11", "a12"]
    assert [each.id for each in read_rollouts(file, step=5)] == ["v5", "a5", "b5", "c5"]
    a = read_rollouts(file, "a5")[0]
    assert (a.phase, a.mode, a.return_, a.advantage, a.turns, a.dropped) == (
        "training",
        "memory, off-policy",
        7.0,
        0.5,
        2,
        None,
    )
    errors, silent = read_dropped(file)
    assert (errors.count, errors.first, errors.last, errors.rollout) == (26, 0, 12, "c12")
    assert errors.example == "KeyError: 'door 0' (quiz.py:3 in run)"
    assert (silent.reason, silent.count, silent.first, silent.last) == ("no_reward", 2, 11, 12)
    assert [each.count for each in read_dropped(file, 4)] == [2]
    assert errors.told(Path("runs/a")) == (
        "26 of steps 0 to 12, failed by agent: KeyError: 'door 0' (quiz.py:3 in run); empo2 show runs/a c12"
    )
    assert silent.told(Path("runs/a")) == "2 of steps 11 to 12, no reward; empo2 show runs/a d12"


def test_the_file_does_not_grow_without_end(tmp_path: Path) -> None:
    file, random = tmp_path / "rollouts.sqlite", np.random.default_rng(0)
    sizes = []
    for step in range(40):
        RolloutLog(file).write([logged(f"{step}-{n}", step, played={"x": random.bytes(3000).hex()}) for n in range(8)])
        sizes.append(file.stat().st_size)
    assert sizes[39] <= 1.1 * sizes[12]


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush-hush-hush")
    file = tmp_path / "rollouts.sqlite"
    text = "the door says hush-hush-hush"
    RolloutLog(file).write([logged("a", 1, dropped="no_reward", example=text, cause=text, played={"said": [text]})])
    assert read_played(file, "a") == {"said": ["the door says (secret, left out)"]}
    assert "hush" not in str(read_dropped(file))


def test_a_file_that_is_not_there_or_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.sqlite"
    with pytest.raises(Empo2Error, match=r"rollouts.sqlite: there is no such file; training writes it"):
        read_rollouts(file)
    file.write_text("not a database, but long enough to have a header of its own" * 10)
    with pytest.raises(Empo2Error, match=r"rollouts.sqlite: cannot be read"):
        read_rollouts(file)


# empo2 show


def call(messages: list[dict[str, Any]], reply: str | None, **changes: Any) -> dict[str, Any]:
    return {
        "messages": messages,
        "anew": False,
        "reply": None if reply is None else {"role": "assistant", "content": reply},
        "problem": None,
        "finish_reason": "stop",
        "prompt_length": 40,
        "reply_length": 3,
        "seconds": 0.5,
        "tips": [],
        "visits": None,
        "intrinsic": 0.0,
    } | changes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two rollouts: one was trained off-policy, the agent of the other failed."""
    tips = render_tips(["Take the lamp first."])
    first = call(
        [{"role": "system", "content": "You play."}, {"role": "user", "content": f"{tips}\n\nA dark room.\x1b[31m"}],
        "look",
        tips=[4],
        visits=3,
    )
    second = call(
        [{"role": "assistant", "content": "look"}, {"role": "user", "content": "A lamp."}], "take lamp", seconds=1.0
    )
    good = {"task": {"room": 9}, "seconds": 2.5, "error": None, "calls": [first, second]}
    refused = call([{"role": "user", "content": "Hello"}], None, problem="HTTP 400: too long", reply_length=0)
    error = {
        "type": "KeyError",
        "message": "'x'",
        "where": "quiz.py:3 in run",
        "output": "Traceback ...\nKeyError: 'x'",
    }
    bad = {"task": {"room": 8}, "seconds": 0.1, "error": error, "calls": [refused]}
    RolloutLog(tmp_path / "rollouts.sqlite").write(
        [
            logged("abc111", 3, advantage=0.812, intrinsic=1.25, tips=1, played=good),
            LoggedRollout(**{**vars(failed("abd222", 3, "'x'")), "played": bad, "turns": 1}),
        ]
    )
    record = {
        "step": 3,
        "rollout": "abc111",
        "spans": [["read", "A dark room.", 4], ["trained", "lo", 1], ["masked", "ok", 1]],
    }
    (tmp_path / "episodes.jsonl").write_text(json.dumps(record) + "\n")
    key = np.eye(384, dtype=np.float32)[0]
    with closing(MemoryStore(tmp_path / "memory.sqlite", embedder="all-MiniLM-L6-v2", dimension=384)) as store:
        step = Step("A dark room.", key, "look")
        store.add_episode("s", "abc111", tip="Look before you go.", score=7, success=True, steps=[step])
    return tmp_path


def shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert run(["show", *map(str, arguments)]) == (0, "")
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_the_list(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heading, _, *rows, last = shown(capsys, folder)
    assert heading.split() == ["step", "rollout", "mode", "return", "advantage", "turns", "tips", "dropped"]
    assert [row.split() for row in rows] == [
        ["3", "abc111", "memory,", "off-policy", "7", "+0.81", "2", "1"],
        ["3", "abd222", "memory,", "off-policy", "1", "0", "failed", "by", "agent"],
    ]
    assert (
        last == f"dropped  1 of step 3, failed by agent: KeyError: 'x' (quiz.py:3 in run); empo2 show {folder} abd222"
    )
    assert "abc111" not in "".join(shown(capsys, folder, "--dropped"))
    assert "abc111" not in "".join(shown(capsys, folder, "--step", 2))


def test_an_episode(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each message stands once; a control character of the policy's does not reach the terminal."""
    assert shown(capsys, folder, "abc") == [
        "rollout   abc111, step 3, training, memory, off-policy",
        'task      {"room": 9}',
        "return    7, intrinsic 1.25",
        "advantage +0.812",
        "played    2 turns in 2.5 s, 1 tips shown",
        "tip       written from it: Look before you go.",
        "",
        "turn 1  40 + 3 tokens  0.5 s  tips 4  visits 3",
        "  system",
        "    You play.",
        "  user",
        "    Notes from earlier episodes of this task (each may be wrong):",
        "    - Take the lamp first.",
        "",
        "    A dark room.\N{REPLACEMENT CHARACTER}[31m",
        "  assistant",
        "    look",
        "",
        "turn 2  40 + 3 tokens  1.0 s",
        "  user",
        "    A lamp.",
        "  assistant",
        "    take lamp",
        "",
        "as it was trained, tokens: 4 read, 1 trained, 1 masked; masked ones are in [[ ]]",
        "A dark room.lo[[ok]]",
    ]


def test_an_episode_whose_agent_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, folder, "abd")
    assert lines[2:4] == ["return    none reported", "dropped   failed by agent: KeyError: 'x' (quiz.py:3 in run)"]
    assert "  no reply: HTTP 400: too long" in lines
    assert lines[-3:] == ["the agent ended with", "    Traceback ...", "    KeyError: 'x'"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["zzz"], "no rollout 'zzz' of the last steps; `empo2 show FOLDER` lists them"),
        (["ab"], "2 rollouts begin with 'ab', such as abc111, abd222; give more of the id"),
    ],
)
def test_a_rollout_that_is_not_found(folder: Path, arguments: list[str], said: str) -> None:
    assert run(["show", str(folder), *arguments]) == (
        1,
        f"empo2: error: {folder}: {said.replace('FOLDER', str(folder))}",
    )
