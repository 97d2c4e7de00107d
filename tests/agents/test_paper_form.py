"""The action form `paper`: its examples, its prompts, and the correction of actions, in the real ScienceWorld."""

import dataclasses
import json
from contextlib import nullcontext
from functools import partial

import pytest

from empo2.agents.scienceworld import tasks
from empo2.agents.scienceworld.agent import ScienceWorldAgent
from empo2.agents.scienceworld.examples import FILE, examples, make
from empo2.agents.scienceworld.game import Game, named
from empo2.agents.scienceworld.tasks import PAPER_TASKS, TASKS

from ..recipe.model_server import tokenizer

pytestmark = pytest.mark.stack


@pytest.fixture
def run(play_agent, shared_simulator):
    return partial(play_agent, ScienceWorldAgent)


@pytest.mark.parametrize("task", ["find-animal", "use-thermometer", "chemistry-mix-paint-secondary-color"])
def test_an_examples_own_variation_is_solved_by_its_actions_and_none_is_corrected(run, episode, task):
    example = examples(task, variation=0)[0]
    replies = [action for action, _ in example.steps]
    reward = run(episode(task=task, variation=example.variation, actions="paper", max_steps=30), replies)
    assert (reward["value"], reward["metrics"]) == (100, {"corrected_actions": 0})


def test_the_nearest_action_is_executed_the_chat_keeps_the_reply_and_corrections_are_counted(
    run, server, episode, environment, monkeypatch
):
    done = []
    step = environment.step
    monkeypatch.setattr(environment, "step", lambda action: done.append(action) or step(action))
    replies = ["I teleport to the kitchen now", "Focus on glass jar", "move glass jar into the red box\nto be done"]
    reward = run(episode(actions="paper"), replies)
    assert done == ["teleport to kitchen", "focus on glass jar", "move glass jar to red box"]
    assert (reward["value"], reward["metrics"]) == (100, {"corrected_actions": 2 / 3})
    assert [message["content"] for message in server.chats[-1]["messages"][2::2]] == replies[:2]


def test_an_ambiguous_action_is_answered_by_a_number(run, episode, environment, monkeypatch):
    done = []
    step = environment.step
    monkeypatch.setattr(environment, "step", lambda action: done.append(action) or step(action))
    run(episode(task="find-plant", actions="paper", max_steps=2), ["teleport to greenhouse", "pick up flower pot"])
    valid = environment.reset("find-plant", 0, "easy", 3) and step("teleport to greenhouse").valid_actions
    assert done[1] in valid and done[1].startswith("pick up flower pot")


def test_what_is_carried_is_shown_when_it_changes(environment, episode):
    game = Game(environment, episode(task="use-thermometer", actions="paper"))
    game.replay([])  # as each agent does
    assert game.turn.endswith("\nYou carry: orange.")
    assert "Things to focus on may be thermometer, unknown substance B," in game.turn
    game.act("teleport to kitchen")
    assert game.turn == "You teleport to the kitchen."
    game.act("pick up thermometer")
    assert game.turn.endswith("\nYou carry: orange, thermometer.")  # not its reading, which changes by itself


def test_after_a_prefix_the_first_turn_names_what_to_focus_on_and_what_is_carried(environment, episode):
    game = Game(environment, episode(task="use-thermometer", actions="paper"))
    game.replay(["teleport to kitchen", "pick up thermometer"])
    assert "Things to focus on may be thermometer, unknown substance B," in game.turn
    assert game.turn.startswith("Your task is") and game.turn.endswith("\nYou carry: orange, thermometer.")


def test_a_task_names_its_objects(environment):
    def names(task: str) -> list[str]:
        environment.reset(task, 0, "easy", 1)
        return named(environment.task_description)

    assert names("boil") == ["water"]
    assert names("test-conductivity") == ["aluminum foil", "red box", "green box"]
    assert names("find-animal") == ["red box"]
    assert names("lifespan-longest-lived") == []
    assert names("chemistry-mix-paint-secondary-color") == ["green paint"]


def test_every_prompt_leaves_room_for_tips(environment, episode):
    """4,500 tokens are allowed, of which ten tips of 100 words take some 1,500."""
    for task in PAPER_TASKS:
        for variation in (0, environment.split(task)[2][0]):
            game = Game(environment, episode(task=task, variation=variation, actions="paper"))
            chat = [{"role": "system", "content": game.system}, {"role": "user", "content": game.turn}]
            assert len(tokenizer().apply_chat_template(chat, add_generation_prompt=True)["input_ids"]) < 3000, task
            assert game.system.count("\nExample ") == 2


def test_no_example_is_of_the_variation_that_is_played_or_of_a_test_variation(environment, monkeypatch):
    monkeypatch.setattr(tasks, "Environment", lambda: nullcontext(environment))
    train, test = tasks.load("all", train_variations=1000, test_variations=1000)
    training = {(row["task"], row["variation"]) for row in train}
    for row in train + test:
        shown = examples(row["task"], row["variation"])
        assert len({example.variation for example in shown}) == 2
        assert row["variation"] not in {example.variation for example in shown}
        assert all((row["task"], example.variation) in training for example in shown)


def test_the_examples_are_those_that_scienceworld_gives():
    committed = json.loads(FILE.read_text())
    assert list(committed) == list(TASKS)
    for task in ("power-component", "identify-life-stages-2"):
        made = [dataclasses.asdict(example) for example in make(task)]
        assert json.loads(json.dumps(made)) == committed[task]
