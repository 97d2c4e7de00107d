"""Colossal Cave: a known way to the first treasure, what may not be done, and the agent that plays it."""

import json
from pathlib import Path

import pytest

from empo2.agents.colossal_cave.agent import ColossalCaveAgent
from empo2.agents.colossal_cave.environment import Environment
from empo2.agents.colossal_cave.tasks import Episode, load
from empo2.recipe.config import load_settings
from empo2.recipe.evaluation.panels import load_panel
from empo2.recipe.preflight.agent import check_agent

ROOT = Path(__file__).parents[2]
pytest.importorskip("adventure", reason="needs the package adventure: uv pip install adventure==1.7")

# By the magic word into the cave, and down into the Hall of Mists (25 points) to the first treasure (2).
WAY = ["enter building", "take lamp", "xyzzy", "light lamp", "west", "west", "west", "down", "south", "take gold"]


def test_a_known_way_scores_and_equal_seeds_give_equal_games():
    played = []
    for _ in range(2):
        cave = Environment(seed=3, max_steps=20)
        assert cave.state.observation.startswith("YOU ARE STANDING AT THE END OF A ROAD") and not cave.state.done
        states = [cave.state, *(cave.step(action) for action in WAY)]
        assert "SHINY BRASS LAMP" in states[1].observation and states[3].observation.startswith("IT IS NOW PITCH DARK")
        assert [state.score for state in states] == [32] * 8 + [57, 59, 59] and states[-1].observation == "OK"
        played.append(states)
    assert played[0] == played[1]


def test_no_file_is_written_and_the_steps_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cave = Environment(seed=0, max_steps=4)
    assert {cave.step(action).observation for action in ("save game", "SUSPEND x", " ")} == {"That does nothing."}
    assert not [*tmp_path.iterdir()]
    assert cave.step("look").done
    with pytest.raises(RuntimeError, match="no steps left"):
        cave.step("north")


def test_the_agent_plays_and_returns_to_a_state(play_agent, server):
    episode = Episode(**load(max_steps=len(WAY))[1][0])
    whole = play_agent(ColossalCaveAgent, episode, WAY)
    chats = [chat["messages"][-1]["content"] for chat in server.chats]
    server.chats.clear()
    rest = play_agent(ColossalCaveAgent, episode, WAY[4:], EPISODE_PREFIX=json.dumps(WAY[:4]))
    assert server.chats[0]["messages"][-1]["content"].endswith(chats[4])
    assert (rest["value"], rest["actions"]) == (whole["value"], WAY) and not whole["success"]


def test_the_settings_and_the_panel_are_its_own():
    settings = load_settings("cpu", file=ROOT / "agents/colossal_cave/train.yaml")
    assert str(check_agent(settings)) == "Colossal Cave" and settings.agent.env == Episode.env_map()
    panel = load_panel("colossal-cave")
    assert [dict(row) for row in panel.rows] == load()[1]
