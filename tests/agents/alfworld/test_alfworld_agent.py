"""ALFWorld's rows, and its agent against a scripted model server: replies, the chat, the reward, the state; panels."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from empo2.agents.alfworld.agent import ALFWorldAgent
from empo2.agents.alfworld.archive import ArchiveError, write
from empo2.agents.alfworld.environment import Environment
from empo2.agents.alfworld.games import TASKS, Game, read_game
from empo2.agents.alfworld.tasks import Episode, game_of, load
from empo2.agents.text_game.actions import tagged
from empo2.recipe.config import load_settings
from empo2.recipe.evaluation.panels import FOLDER, load_panel
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.messages import newest_observation

from .official import need_worlds, official_games

sys.path.insert(0, str(Path(__file__).parents[3] / "bench"))

import alfworld_search as search
import panels as make

AGENTS = Path(__file__).parents[3] / "agents" / "alfworld"
CLEAN = "pick_clean_then_place_in_recep"


def an_episode(task: str = CLEAN, **changes: Any) -> Episode:
    (row, *_), _ = load(tasks=[task])
    return Episode(**{**row, **changes})


def started(episode: Episode) -> tuple[Environment, Game]:
    game = game_of(episode)
    return Environment(game, episode.wording, episode.reward), game


# Rows


def test_rows_are_the_games_of_a_split_by_type_and_name():
    train, test = load(
        tasks=["pick_two_obj_and_place", "pick_and_place_simple"], train_games=3, test_split="valid_seen"
    )
    assert [row["task"] for row in train] == ["pick_and_place_simple"] * 3 + ["pick_two_obj_and_place"] * 3
    assert {row["split"] for row in train} == {"train"} and {row["split"] for row in test} == {"valid_seen"}
    assert [row["game"] for row in train[:3]] == sorted(row["game"] for row in train[:3])
    assert len(test) == 4 and {row["max_steps"] for row in test} == {50} and {row["reward"] for row in test} == {10}
    everything = load()
    assert [len(part) for part in everything] == [24, 12] and {row["task"] for row in everything[0]} == set(TASKS)
    for row in (*train, *test):
        assert game_of(Episode(**row)).task == row["task"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"tasks": ["pick_heat"]}, "task 'pick_heat' is unknown; nearest: pick_heat_then_place_in_recep"),
        ({"tasks": "pick_and_place_simple"}, "tasks 'pick_and_place_simple': list some of pick_and_place_simple, look"),
        ({"test_split": "train"}, "test_split 'train' is unknown; nearest: "),
        (
            {"games": "nowhere.zip"},
            "there is no file nowhere.zip of ALFWorld's games: make it with `python -m ",
        ),
        ({"actions": "paper"}, "actions 'paper' is unknown; nearest: "),
        ({"admissible": "yes"}, "admissible 'yes' is unknown; nearest: shown, hidden"),
        ({"history": -1}, "history -1 must be at least 0"),
        ({"wording": -1}, "wording -1 must be at least 0"),
        ({"reward": 0}, "reward 0 must be at least 1"),
        ({"train_games": 0}, "train_games 0 must be at least 1"),
    ],
)
def test_a_wrong_argument_is_named_with_what_is_right(wrong: dict[str, Any], message: str):
    with pytest.raises(ValueError) as raised:
        load(**wrong)
    assert str(raised.value).startswith(message)


def test_a_game_that_is_not_there_and_a_wording_too_many_are_refused():
    with pytest.raises(ValueError, match=r"own.zip has no game 'look_at_obj_in_light-X' in train"):
        game_of(an_episode("look_at_obj_in_light", game="X"))
    with pytest.raises(ValueError, match="wording 2: the game has 0 to 1"):
        started(an_episode(wording=2))


# Turns


def test_the_whole_chat_with_the_admissible_actions(play_agent: Callable[..., dict], server):
    episode = an_episode(actions="free-text")
    environment, game = started(episode)
    reward = play_agent(ALFWorldAgent, episode, game.walkthrough)
    assert (reward["value"], reward["success"], reward["metrics"]) == (10, True, {})
    assert reward["message"].endswith(f"score 10 after {len(game.walkthrough)} of 50 steps")
    last = server.chats[-1]["messages"]
    assert len(server.chats) == len(game.walkthrough) and len(last) == 2 * len(game.walkthrough)
    assert last[1]["content"].startswith(f"{game.instruction}\n\nYou are in the middle of a room. ")
    for place, command in enumerate(game.walkthrough[:-1]):
        state = environment.step(command)
        assert last[2 * place + 2] == {"role": "assistant", "content": command}
        assert last[2 * place + 3]["content"] == (
            f"{state.observation}\n\nPossible commands: {', '.join(state.valid_actions)}"
        )
        assert "help" not in state.valid_actions
    hidden = an_episode(actions="free-text", admissible="hidden", max_steps=2, reward=1)
    assert play_agent(ALFWorldAgent, hidden, ["help", "dance"])["value"] == 0
    assert server.chats[-1]["messages"][-1]["content"] == game.help.strip()


def test_the_last_turns_alone_as_in_verl_agent(play_agent: Callable[..., dict], server):
    """The system message holds task, history and admissible actions; the newest one is the observation, the anchor."""
    episode = an_episode(actions="tags", history=2, wording=1, reward=1)
    environment, game = started(episode)
    replies = [f"<think>Hm.</think><action>{command.upper()}</action>" for command in game.walkthrough]
    reward = play_agent(ALFWorldAgent, episode, replies)
    assert (reward["value"], reward["success"], reward["metrics"]) == (1, True, {"invalid_actions": 0})
    task, states = f"Your task is to: {game.wordings[0]}", [environment.state]
    states += [environment.step(command) for command in game.walkthrough[:-1]]
    for turn, (chat, state) in enumerate(zip(server.chats, states, strict=True)):
        system, user = (message["content"] for message in chat["messages"])
        assert newest_observation(chat["messages"]) == user
        assert user == (state.observation if turn else f"{task}\n\n{state.observation}")
        rules, *told, listed = system.split("\n\n")
        assert listed == f"Possible commands: {', '.join(state.valid_actions)}"
        first = max(0, turn - 2)
        pairs = zip(states[first:turn], game.walkthrough[first:turn], strict=True)
        past = [line for before, command in pairs for line in (before.observation, f"> {command}")]
        last = "\n".join([f"Steps taken: {turn}. The last of them:", *past])
        assert told == ([task, last] if turn else [])
        assert "<think>" in rules and "go to R" in rules


def test_a_reply_without_tags_is_a_step_in_which_nothing_happens(play_agent: Callable[..., dict], server):
    """verl-agent plays its last 30 characters, and an action whose reply has no thoughts."""
    episode = an_episode(actions="tags", history=1, max_steps=3)
    place = game_of(episode).receptacles[0].name
    reward = play_agent(ALFWorldAgent, episode, ["I shall go.", f"<action>go to {place}</action>", "look"])
    assert reward["value"] == 0 and reward["metrics"] == {"invalid_actions": 1}
    users = [chat["messages"][1]["content"] for chat in server.chats]
    assert users[1] == "Nothing happens." and users[2].startswith(f"You arrive at {place}. ")
    assert tagged("x <THINK>a</THINK> <Action> Look </action> y") == ("look", False)
    assert tagged("<think>a</think> <Action> Look </action> y") == ("look", True)
    assert tagged("<think>\u770b</think><action>look</action>") == ("look", False)
    assert tagged("A" * 40) == ("a" * 30, False)


def test_a_listed_choice_and_one_that_is_not_listed(play_agent: Callable[..., dict], server):
    episode = an_episode(actions="choice", choices=3, max_steps=2, history=1)
    reward = play_agent(ALFWorldAgent, episode, ["2", "9"])
    assert reward["metrics"] == {"invalid_actions": 0.5}
    first, second = (chat["messages"] for chat in server.chats)
    action = first[1]["content"].splitlines()[-2].removeprefix("2 ")
    assert [line[:2] for line in first[1]["content"].splitlines()[-3:]] == ["1 ", "2 ", "3 "]
    assert second[0]["content"].endswith(f"\n> {action}") and "Possible commands" not in second[0]["content"]


@pytest.mark.parametrize("history", [0, 2])
def test_an_episode_starts_after_its_prefix(play_agent: Callable[..., dict], server, history: int):
    """Both episodes win by the same actions; the second is first shown the task and where its prefix has led."""
    episode = an_episode(actions="free-text", history=history)
    walk = ["look", "dance", *started(episode)[1].walkthrough]
    whole = play_agent(ALFWorldAgent, episode, walk)
    shown = [chat["messages"][-1]["content"] for chat in server.chats]
    server.chats.clear()
    rest = play_agent(ALFWorldAgent, episode, walk[4:], EPISODE_PREFIX=json.dumps(walk[:4]))
    again = [chat["messages"][-1]["content"] for chat in server.chats]
    assert again == [f"{started(episode)[1].instruction}\n\n{shown[4]}", *shown[5:]]
    assert rest == whole and (whole["value"], whole["actions"]) == (10, walk)


def test_the_state_is_the_observation_in_every_form(play_agent: Callable[..., dict], server):
    for name, profile in (("train", "cpu"), ("verl-agent", "gpu")):
        state = StateReader(load_settings(profile, file=AGENTS / f"{name}.yaml").memory)
        for changes in ({"actions": "choice"}, {"actions": "free-text"}, {"actions": "tags", "history": 2}):
            server.chats.clear()
            episode = an_episode(max_steps=2, **changes)
            play_agent(ALFWorldAgent, episode, ["look", "look"])
            seen = [state.of_chat(chat["messages"]) for chat in server.chats]
            assert seen[0] == started(episode)[0].state.observation
            assert "\n" not in seen[1] and seen[1].endswith(".")


# Panels


def test_panels_are_made_of_the_official_games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Six groups, as many games of each type as in ALFWorld's paper."""
    for name, split, counts in (
        ("alfworld-seen", "valid_seen", (35, 13, 27, 16, 25, 24)),
        ("alfworld-unseen", "valid_unseen", (24, 18, 31, 23, 21, 17)),
    ):
        panel = load_panel(name)
        assert {task: len(rows) for task, rows in panel.groups().items()} == dict(zip(TASKS, counts, strict=True))
        assert {row["split"] for row in panel.rows} == {split}
        assert {*panel.rows[0]} == {*asdict(an_episode())}
        assert {*panel.config["agent"]["env"]} == {*Episode.env_map(), "ALFWORLD_MAX_TOKENS"}
        with pytest.raises(ArchiveError, match=r"there is no file alfworld\.zip"):
            Episode(**panel.rows[0])
    need_worlds()
    splits = ("valid_seen", "valid_unseen")
    games = {split: {name: read_game(file, []) for name, file in official_games(split).items()} for split in splits}
    write(tmp_path / "alfworld.zip", {"train": {}, **games})
    monkeypatch.chdir(tmp_path)
    for name in ("alfworld-seen", "alfworld-unseen"):
        assert make.text_of(name) == (FOLDER / f"{name}.json").read_text()
        assert json.loads((FOLDER / f"{name}.json").read_text())["common"]["games"] == "alfworld.zip"


# The searcher of experiments/alfworld_search.py


def test_the_searcher_wins_all_of_the_projects_own_games_and_is_no_slower_with_true_notes():
    for row in load()[0]:
        game = game_of(Episode(**row))
        steps = {notes: [search.steps_to_win(game, notes, seed) or 99 for seed in range(20)] for notes in (False, True)}
        assert len(game.walkthrough) <= min(steps[True]) and max(steps[True]) <= max(steps[False]) < 99
        assert sum(steps[True]) <= sum(steps[False])
    assert [search.success([10, 20, 21, None], limit) for limit in (20, 30)] == [0.5, 0.75]
