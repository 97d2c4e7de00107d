"""TextWorld's own games: the generator's solution wins, chance does not, and the agent plays them."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from empo2.agents.textworld.agent import TextWorldAgent
from empo2.agents.textworld.environment import Environment, game_file
from empo2.agents.textworld.tasks import Episode, load
from empo2.recipe.config import load_settings
from empo2.recipe.files.tasks import load_tasks
from empo2.recipe.preflight.agent import check_agent

ROOT = Path(__file__).parents[2]
SIZE = {"rooms": 5, "objects": 6, "quest": 6}
pytest.importorskip("textworld", reason="needs the package textworld: uv pip install textworld==1.7.0")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # Inform 7 compiles each game


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return game_file(**SIZE, seed=1)


def solution_of(game: Path) -> list[str]:
    return json.loads(game.with_suffix(".json").read_text())["metadata"]["walkthrough"]


def test_the_generators_solution_wins_and_chance_does_not(game: Path):
    walk = solution_of(game)
    assert len(walk) == 6
    world = Environment(game, max_steps=6)
    first = world.state
    states = [world.step(action) for action in walk]
    assert all(action in before.valid_actions for action, before in zip(walk, [first, *states], strict=False))
    assert [state.score for state in states] == [0] * 5 + [100] and states[-1].done
    assert walk[-1].split()[-1] in world.task_description and walk[2] not in world.task_description
    assert all(state.observation == state.observation.strip() and "\n>" not in state.observation for state in states)
    assert "RESTART" not in states[-1].observation
    again = Environment(game, max_steps=6)
    assert [first, *states] == [again.state, *(again.step(action) for action in walk)]
    for seed in range(5):
        player, state = random.Random(seed), (chance := Environment(game, max_steps=24)).state
        while not state.done:
            state = chance.step(player.choice(state.valid_actions))
        assert state.score == 0


def test_an_action_is_one_and_no_command_to_the_engine(game: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    walk = solution_of(game)
    for joint in (". ", ".", " then ", " THEN "):
        assert Environment(game, 9).step(joint.join(walk)) == Environment(game, 9).step(walk[0])
    world = Environment(game, max_steps=30)
    first = world.state
    refused = ["save", "RESTORE", "script", "transcripts", "restart", "quit", "q", "me, save", "oops q", "print_state"]
    for action in (*refused, "tw-print max_score", "save\0", "\tquit"):
        assert world.step(action) == replace(first, observation="That does nothing."), action
    for action in ("take type q box", "\\x", "\0", "\ud800", "."):
        assert world.step(action).observation != "That does nothing."
    assert [world.step(f"{action}\0").score for action in walk] == [0] * 5 + [100] and not list(tmp_path.iterdir())
    assert Environment(game, max_steps=1).step("quit").done


def test_the_agent_plays_and_returns_to_a_state(play_agent, server, game: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(game.parents[2]))
    episode = Episode(**SIZE, seed=1, max_steps=9, actions="free-text", choices=1)
    walk = ["dance", *solution_of(game)]
    whole = play_agent(TextWorldAgent, episode, walk)
    shown = [chat["messages"][-1]["content"] for chat in server.chats]
    server.chats.clear()
    rest = play_agent(TextWorldAgent, episode, walk[3:], EPISODE_PREFIX=json.dumps(walk[:3]))
    assert server.chats[0]["messages"][-1]["content"].endswith(shown[3])
    assert (whole["value"], rest["value"], rest["actions"], rest["success"]) == (100, 100, walk, True)


def test_the_settings_beside_the_agent_are_its_own(game: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(game.parents[2]))
    settings = load_settings(
        "cpu", ["tasks.args.train_games=1", "tasks.args.test_games=1"], file=ROOT / "agents/textworld/train.yaml"
    )
    assert str(check_agent(settings)) == "TextWorld's own games"
    assert settings.agent.env == {**Episode.env_map(), "QUEST_MAX_TOKENS": "8"}
    row, *_ = load_tasks(settings).train
    assert Episode(**row).title == "quest of 6 in 5 rooms, seed 1"
    with pytest.raises(ValueError, match="quest 0 must be at least 1"):
        load(quest=0)
    with pytest.raises(ValueError, match="train_games 1001 must be at most 1000"):
        load(train_games=1001)
