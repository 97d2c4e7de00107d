"""The file of the last steps' rollouts, and `empo2 show`, which reads it."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agentlightning.schemas import RolloutState

from empo2.memory import MemoryStore, Step
from empo2.recipe.cli.verbs import run
from empo2.recipe.errors import Empo2Error
from empo2.recipe.gateway.tips.text import render_tips
from empo2.recipe.protocol import ERROR_EVENT, Mode
from empo2.recipe.rollout_log import LoggedRollout, read_dropped, read_played, read_rollouts, write_rollouts
from empo2.recipe.trainer.shown_rollouts import logged_rollouts
from empo2.recipe.trainer.step_results import StepResults

from .rollout_events import recorded, refused, request, rollout_of

OFF_POLICY = Mode.of(memory=True, off_policy=True)
ERROR = {"type": "KeyError", "message": "'x'", "where": "quiz.py:3 in run", "output": "Traceback ...\nKeyError: 'x'"}


def logged(name: str, step: int, **changes: Any) -> LoggedRollout:
    values: dict[str, Any] = {"phase": "training", "mode": "memory, off-policy", "return_": 7.0, "turns": 2}
    return LoggedRollout(id=name, step=step, **values | changes)


def failed(name: str, step: int, message: str) -> LoggedRollout:
    cause, example = "KeyError at quiz.py:3 in run", f"KeyError: {message} (quiz.py:3 in run)"
    return logged(name, step, return_=None, dropped="failed_by_agent", cause=cause, example=example)


def test_the_last_ten_steps_are_kept_and_all_causes_counted(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.sqlite"
    write_rollouts(file, [])
    assert not file.exists() and read_dropped(file) == []
    for step in range(13):
        write_rollouts(file, [logged(f"v{step}", step, phase="validation"), logged(f"a{step}", step, advantage=0.5)])
        write_rollouts(file, [failed(f"b{step}", step, f"'door {step}'"), failed(f"c{step}", step, "'x'")])
        write_rollouts(file, [logged(f"d{step}", step, dropped="no_reward")] if step > 10 else [])
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
    for step in range(30):
        write_rollouts(file, [logged(f"{step}-{n}", step, played={"x": random.bytes(3000).hex()}) for n in range(8)])
        sizes.append(file.stat().st_size)
    assert sizes[29] <= 1.1 * sizes[12]


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hush-hush-hush")
    file = tmp_path / "rollouts.sqlite"
    text = "the door says hush-hush-hush"
    write_rollouts(file, [logged("a", 1, dropped="no_reward", example=text, cause=text, played={"said": [text]})])
    assert read_played(file, "a") == {"said": ["the door says (secret, left out)"]}
    assert "hush" not in str(read_dropped(file))


def test_a_file_that_is_not_there_or_is_no_database(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.sqlite"
    with pytest.raises(Empo2Error, match=r"rollouts.sqlite: there is no such file; training writes it"):
        read_rollouts(file)
    file.write_text("not a database, but long enough to have a header of its own" * 10)
    with pytest.raises(Empo2Error, match=r"rollouts.sqlite: cannot be read"):
        read_rollouts(file)


# What is logged


def test_why_rollouts_were_dropped() -> None:
    failed: dict[str, Any] = {"rollout_state": RolloutState.FAILED, "final_reward": None}
    message = "subprocess exited with code 1"
    played = [
        rollout_of("agent", [{"event_type": ERROR_EVENT, "data": ERROR}], error_message=message, **failed),
        rollout_of("late", [], error_message="local subprocess timed out", **failed),
        rollout_of("alone", []),
        rollout_of("trained", []),
    ]
    results = StepResults()
    for each, reason in zip(played, ("failed_by_agent", "failed_by_system", "alone_in_group"), strict=False):
        results.drop(each, reason)
    assert "for example: KeyError: 'x' (quiz.py:3 in run)" in results.why_none()
    logged = {each.id: each for each in logged_rollouts(played, results, 3, "training", {"trained": 1.0})}
    assert {name: (each.dropped, each.cause, each.example) for name, each in logged.items()} == {
        "agent": ("failed_by_agent", "KeyError at quiz.py:3 in run", "KeyError: 'x' (quiz.py:3 in run)"),
        "late": ("failed_by_system", "local subprocess timed out", "local subprocess timed out"),
        "alone": ("alone_in_group", "", ""),
        "trained": (None, "", ""),
    }
    assert logged["agent"].played["error"] == ERROR


def test_what_is_kept_of_a_rollout_is_bounded() -> None:
    """An image of 5 MB; and a chat that is written anew at every turn."""
    image = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:" + "x" * 5_000_000}}]}

    def shown(events: list[Any]) -> LoggedRollout:
        (logged,) = logged_rollouts([rollout_of("r", events)], StepResults(), 1, "validation", {})
        return logged

    assert len(json.dumps(shown([request([1], [7], messages=[image])]).played)) < 25_000
    anew = [request([n], [7], messages=[{"role": "user", "content": f"{n} " + "y" * 15_000}]) for n in range(200)]
    logged = shown(anew)
    assert logged.turns == 200 and len(json.dumps(logged.played)) < 500_000
    assert logged.played["calls"][-1]["messages"] == [{"role": "", "content": "(15037 characters are not kept)"}]


# empo2 show


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two rollouts: one was trained off-policy, the agent of the other failed."""
    tips = render_tips(["Take the lamp first."])
    system = {"role": "system", "content": "You play."}
    chat = [system, {"role": "user", "content": f"{tips}\n\nA dark room.\x1b[31m"}]
    later = [*chat, {"role": "assistant", "content": "look"}, {"role": "user", "content": "A lamp."}]
    events = [
        request(range(40), [7, 8, 9], messages=chat, text="look"),
        recorded(range(40), tip_ids=[4], visits=3, intrinsic_reward=1.0),
        request(range(50), [7, 8], messages=later, text="take lamp", seconds=1.0),
        recorded(range(50), intrinsic_reward=0.25),
        refused(400, "too long", messages=[system]),
    ]
    good = rollout_of("abc111", events, OFF_POLICY, input={"room": 9}, final_reward=7.0)
    failed: dict[str, Any] = {"rollout_state": RolloutState.FAILED, "final_reward": None}
    error = {"event_type": ERROR_EVENT, "data": ERROR}
    bad = rollout_of("abd222", [request([1], [2]), error], OFF_POLICY, error_message="exited", **failed)
    results = StepResults()
    results.drop(bad, "failed_by_agent")
    made = list(logged_rollouts([good, bad], results, 3, "training", {"abc111": 0.812}))
    write_rollouts(tmp_path / "rollouts.sqlite", made)
    spans = [["read", "A dark room.", 4], ["trained", "lo", 1], ["masked", "ok", 1]]
    (tmp_path / "episodes.jsonl").write_text(json.dumps({"step": 3, "rollout": "abc111", "spans": spans}) + "\n")
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
        ["3", "abc111", "memory,", "off-policy", "7", "+0.81", "3", "1"],
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
        "played    3 turns in 2.5 s, 1 tips shown",
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
        "turn 2  50 + 2 tokens  1.0 s",
        "  user",
        "    A lamp.",
        "  assistant",
        "    take lamp",
        "",
        "turn 3  0 + 0 tokens  0.5 s  a chat written anew",
        "  system",
        "    You play.",
        "  no reply: HTTP 400: {'error': 'too long'}",
        "",
        "as it was trained, tokens: 4 read, 1 trained, 1 masked; masked ones are in [[ ]]",
        "A dark room.lo[[ok]]",
    ]


def test_an_episode_whose_agent_failed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, folder, "abd")
    assert lines[2:4] == ["return    none reported", "dropped   failed by agent: KeyError: 'x' (quiz.py:3 in run)"]
    assert lines[-3:] == ["the agent ended with", "    Traceback ...", "    KeyError: 'x'"]
    for asked, said in (
        ("zzz", f"no rollout 'zzz' of the last steps; `empo2 show {folder}` lists them"),
        ("ab", "2 rollouts begin with 'ab', such as abc111, abd222; give more of the id"),
    ):
        assert run(["show", str(folder), asked]) == (1, f"empo2: error: {folder}: {said}")
