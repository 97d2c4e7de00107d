"""What the games in houses share: levels and panels, rows, settings, and the table of docs/houses.md."""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from empo2.agents.houses.tasks import HouseEpisode
from empo2.agents.textworld_express.environment import Environment
from empo2.recipe.config import load_settings
from empo2.recipe.launcher.tasks import check_agent, load_tasks
from empo2.recipe.protocol import scope_of
from empo2.small_model.levels import EARLIER, WORLDS, chance, learned, of_panel

ROOT = Path(__file__).parents[2]
LEVELS = [(name, level) for name, world in WORLDS.items() for level in world.levels]

pytestmark = pytest.mark.stack

each_world = pytest.mark.parametrize("name", WORLDS)
each_level = pytest.mark.parametrize(("name", "level"), LEVELS)


@pytest.fixture(scope="module")
def world() -> Iterator[Environment]:
    with Environment() as shared:
        yield shared


def episode_of(name: str) -> type[HouseEpisode]:
    return import_module(f"empo2.agents.{name}.tasks").Episode


def load(name: str, **arguments: object) -> tuple[list[dict], list[dict]]:
    return import_module(f"empo2.agents.{name}.tasks").load(**arguments)


def panel(name: str, level: str) -> dict[str, list[int]]:
    return import_module(f"empo2.agents.{name}.levels").panel(level)


@each_world
def test_no_house_is_in_two_panels(name: str):
    seeds = [seed for level in WORLDS[name].levels for part in panel(name, level).values() for seed in part]
    assert len(set(seeds)) == len(seeds) == 32 * len(WORLDS[name].levels)


@each_level
def test_a_panels_houses_are_of_their_level_and_all_different(world: Environment, name: str, level: str):
    game, limits = WORLDS[name], WORLDS[name].levels[level]
    seeds = [seed for part in panel(name, level).values() for seed in part]
    walked = [game.walk(world, limits, seed) for seed in seeds]
    assert len({repr(house) for house in walked}) == len(seeds)
    low, high = limits.chance
    for house in walked:
        assert house is not None
        assert len(house.doors) == limits.rooms
        assert house.distance in limits.distances
        assert low <= chance(game, house, limits.max_steps) <= high


@each_level
def test_the_table_of_the_page_is_what_the_script_measures(name: str, level: str):
    """| CoinCollector | hard | ... | 2.3 % | 6.4 % | 10.2 % | 18.1 % |"""
    titles = {"coin_collector": "CoinCollector", "map_reader": "MapReader"}
    (line,) = re.findall(rf"^\| {titles[name]} \| {level} \|.*$", (ROOT / "docs/houses.md").read_text(), re.MULTILINE)
    written = [float(share) for share in re.findall(r"([\d.]+) %", line)]
    game = WORLDS[name]
    measured = learned(game, of_panel(game, level), game.levels[level].max_steps)
    assert len(measured) == len(EARLIER)
    assert written == [round(100 * share, 1) for share in measured]


@each_level
def test_rows_are_the_first_houses_of_a_panel(name: str, level: str):
    train, unseen = load(name, level=level, train_houses=2, unseen_houses=3)
    seeds = panel(name, level)
    assert [row["seed"] for row in train + unseen] == seeds["train"][:2] + seeds["unseen"][:3]
    steps = WORLDS[name].levels[level].max_steps
    assert train[0] == {
        "level": level,
        "seed": train[0]["seed"],
        "max_steps": steps,
        "actions": "free-text",
        "choices": 6,
    }
    assert {row["max_steps"] for row in load(name, level=level, max_steps=20)[0]} == {20}


@each_world
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"level": "hrad"}, "level 'hrad' is unknown; nearest: hard"),
        ({"level": "hard", "train_houses": 0}, "train_houses 0 must be at least 1"),
        ({"level": "hard", "unseen_houses": 10_000}, "unseen_houses 10000: level 'hard' has "),
        ({"level": "hard", "max_steps": 0}, "max_steps 0 must be at least 1"),
    ],
)
def test_a_wrong_argument_gets_one_line(name: str, wrong: dict, says: str):
    with pytest.raises(ValueError, match=says):
        load(name, **wrong)


@each_world
def test_the_settings_beside_the_agent_are_its_own(name: str):
    settings = load_settings("cpu", file=ROOT / "agents" / name / "train.yaml")
    assert check_agent(settings) is not None
    rows = load_tasks(settings)
    assert {variable: path for variable, path in settings.agent.env.items() if path.startswith("input.")} == (
        episode_of(name).env_map()
    )
    assert len({scope_of(row, settings.memory.scope) for row in rows.train}) == len(rows.train)
