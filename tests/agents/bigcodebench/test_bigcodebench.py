"""BigCodeBench: whole episodes on the project's own tasks; the official ones, where they are there."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.bigcodebench import __main__ as command_line
from empo2.agents.bigcodebench.agent import BigCodeBenchAgent, code_of
from empo2.agents.bigcodebench.tasks import SPLITS, Episode, load, third_party
from empo2.agents.task_file import read
from empo2.recipe.evaluation.panels import load_panel
from tests.agents.shared_worlds import need_world

OWN = read("bigcodebench", "own")


def an_episode(task: str) -> Episode:
    return Episode(tasks="own", task=task)


@pytest.mark.parametrize("task", OWN)
def test_each_task_is_solved_by_its_solution_and_by_no_empty_one(task: str, play_agent: Callable[..., dict], server):
    code = OWN[task]["solution"]
    reward = play_agent(BigCodeBenchAgent, an_episode(task), [f"Here it is:\n```python\n{code}```"])
    assert (reward["value"], reward["success"], reward["message"]) == (1, True, f"{task}: passed")
    (chat,) = (chat["messages"] for chat in server.chats)
    assert chat[1]["content"] == OWN[task]["instruction"] and OWN[task]["test"] not in str(chat)
    without_imports = code[code.index("def task_func") :]  # those that the task gives
    assert play_agent(BigCodeBenchAgent, an_episode(task), [f"```\n{without_imports}```"])["value"] == 1
    for wrong in ("", "I cannot.", f"```python\n{OWN[task]['start']}    return None\n```"):
        reward = play_agent(BigCodeBenchAgent, an_episode(task), [wrong])
        assert reward["value"] == 0 and reward["message"].startswith(f"{task}: ")


def test_the_code_is_the_last_block_with_a_function():
    assert code_of("a\n```python\ndef f(): 1\n```\nb\n```\nf()\n```") == "def f(): 1\n"
    solved = "```python\ndef task_func(): 1\n```\nExample:\n"
    assert code_of(solved + "```python\ndef main(): task_func()\n```") == "def task_func(): 1\n"
    assert code_of("Here:\n```python\ndef task_func(): 1\n") == "def task_func(): 1\n"  # the reply was cut
    assert code_of("```\nx = 1\n```\n```py\ny = 1\n```") == "y = 1\n" and code_of("def f(): 1") == "def f(): 1"


def test_modules_outside_of_the_standard_library_are_known():
    source = "import os, numpy as np\nimport matplotlib.pyplot\ndef f():\n  from scipy.stats import norm\n"
    assert third_party(source) == {"numpy", "matplotlib.pyplot", "scipy.stats"}


def test_rows_are_memrls_splits():
    assert [[row["task"] for row in part] for part in load()] == [["own-1", "own-2"], ["own-3", "own-4"]]
    assert [[row["task"] for row in part] for part in load("hard")] == [["own-2"], ["own-4"]]
    splits = json.loads(SPLITS.read_text())
    assert [len(splits[name]) for name in ("hard", "full_held_out", "hard_held_out")] == [150, 344, 46]
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"split": "all"}, "split 'all' is unknown; nearest: full"),
        ({"tasks": "no.json"}, "there is no file no.json of tasks: make it with `python -m empo2.agents.bigcodebench"),
        ({"train_tasks": 0}, "train_tasks 0 must be at least 1"),
    ]
    for wrong, says in wrongs:
        with pytest.raises(ValueError) as raised:
            load(**wrong)
        assert str(raised.value).startswith(says)


@pytest.mark.parametrize("name", ["bigcodebench", "bigcodebench-hard"])
def test_panels_are_memrls_splits_of_what_passes(name: str):
    splits = json.loads(SPLITS.read_text())
    hard, held_out = {*splits["hard"]}, {*splits["hard_held_out" if name.endswith("hard") else "full_held_out"]}
    seen, unseen = ({row["task"] for row in load_panel(panel).rows} for panel in (f"{name}-seen", name))
    assert unseen <= held_out and not seen & held_out and len(unseen) > 0.9 * len(held_out)
    assert not name.endswith("hard") or seen | unseen <= hard


def test_an_import_keeps_what_its_own_solutions_solve(tmp_path: Path, run_main: Callable[..., tuple]):
    official = need_world("bigcodebench") / "BigCodeBench-v0.1.0.jsonl.gz"
    with gzip.open(official, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    some = [rows[number] for number in (1, 4)]  # of the standard library
    broken = {**rows[2], "task_id": "BigCodeBench/2", "canonical_solution": "    raise OSError('no')"}
    (tmp_path / "few.jsonl").write_text("\n".join(map(json.dumps, [*some, broken])))
    code, out, err = run_main(command_line.main, "import", tmp_path / "few.jsonl", "--output", tmp_path / "b.json")
    assert (code, err) == (0, "") and "b.json: 2 of 3 tasks\nleft out, since" in out and "1 OSError: no" in out
    assert [row["task"] for row in load(tasks=str(tmp_path / "b.json"))[0]] == ["1", "4"]
    for file, says in ((tmp_path / "b.json", "b.json is no file of BigCodeBench's tasks"), (tmp_path / "x", "No such")):
        code, _, err = run_main(command_line.main, "import", file, "--output", tmp_path / "c.json")
        assert code == 2 and says in err
    code, _, err = run_main(command_line.main, "import", tmp_path / "few.jsonl", "--output", tmp_path / "b.json")
    assert code == 2 and "exists already" in err
