"""Official game files: how they are read, kept in one file and read again; all of ALFWorld's, where they are there."""

import json
import random
import time
from pathlib import Path

import pytest

from empo2.agents.alfworld import __main__ as command_line
from empo2.agents.alfworld.archive import Archive, ArchiveError, read_official, write
from empo2.agents.alfworld.engine import NOTHING_HAPPENS, Engine
from empo2.agents.alfworld.games import NOWHERE, TASKS, Receptacle, Thing, read_game
from empo2.agents.alfworld.tasks import OWN_FILE

from .made_up import own_files, own_games
from .official import need_worlds, official_games, official_wordings, write_official

PROBLEM = """
(define (problem plan_trial) (:domain alfred)
(:objects agent1 - agent  Mug - object  Mug_bar_plus_01 - object)
(:init
    (= (total-cost) 0) (= (distance loc_bar_1 loc_bar_2) 4)
    (atLocation agent1 loc_bar_9)
    (receptacleType Sink_bar_plus_00_bar_SinkBasin SinkBasinType)
    (receptacleType Drawer_bar_minus_01 DrawerType) (receptacleType Drawer_bar_plus_01 DrawerType)
    (receptacleAtLocation Sink_bar_plus_00_bar_SinkBasin loc_bar_1)
    (receptacleAtLocation Drawer_bar_minus_01 loc_bar_2) (receptacleAtLocation Drawer_bar_plus_01 loc_bar_2)
    (openable Drawer_bar_plus_01) (openable Drawer_bar_minus_01) (opened Drawer_bar_minus_01)
    (canContain SinkBasinType MugType) (canContain DrawerType MugType) (canContain DrawerType PenType)
    (canContain BedType MugType)
    (objectType Mug_bar_minus_02 MugType) (objectType Mug_bar_plus_01 MugType)
    (objectType Mirror_bar_plus_03 MirrorType)
    (objectAtLocation Mug_bar_plus_01 loc_bar_1) (objectAtLocation Mug_bar_plus_01 loc_bar_1)
    (objectAtLocation Mug_bar_minus_02 loc_bar_2) (objectAtLocation Mirror_bar_plus_03 loc_bar_9)
    (inReceptacle Mug_bar_plus_01 Sink_bar_plus_00_bar_SinkBasin) (inReceptacle Mug_bar_minus_02 Drawer_bar_plus_01)
    (pickupable Mug_bar_plus_01) (pickupable Mug_bar_minus_02) (pickupable Egg_bar_plus_00_bar_EggCracked_0)
    (cleanable Mug_bar_plus_01) (isReceptacleObject Mug_bar_plus_01)
    (inReceptacleObject Egg_bar_plus_00_bar_EggCracked_0 Mug_bar_plus_01)
)
(:goal (and (exists (?r - receptacle) (exists (?o - object) (and (cleanable ?o) (objectType ?o MugType)
    (receptacleType ?r DrawerType) (isClean ?o) (inReceptacle ?o ?r)))))))
"""
GRAMMAR = r'''
grammar :: """ { "intro": [ { "rhs": "#task#" } ],
  "task": [
     { "rhs": "Your task is to: put a \"clean\" mug in drawer." }
  ] }
""";
action help {
    template :: "help";
    feedback :: "
Say:
  look
";
}
'''
FILE = {"pddl_problem": PROBLEM, "grammar": GRAMMAR, "solvable": True, "walkthrough": ["look"]}


def test_a_problem_is_read_as_the_official_engine_names_and_lists_it():
    """Names are numbered from the last id down; a basin is called by both its words."""
    game = read_game(FILE, ["Clean a mug."])
    assert game.receptacles == (
        Receptacle("drawer 2", "drawer", 1, "open"),
        Receptacle("drawer 1", "drawer", 1, "closed"),
        Receptacle("sinkbasin 1", "sinkbasin", 0, ""),
    )
    assert game.things == (
        Thing("egg 1", "", NOWHERE, ("pickupable",), ()),
        Thing("mirror 1", "mirror", 2, (), ()),
        Thing("mug 2", "mug", 1, ("pickupable",), (1,)),
        Thing("mug 1", "mug", 0, ("pickupable", "cleanable", "isReceptacleObject"), (2,)),
    )
    assert (game.start, game.inside, game.fits) == (2, ((0, 3),), {"drawer": ("mug",), "sinkbasin": ("mug",)})
    assert (game.task, game.target) == ("pick_clean_then_place_in_recep", ("mug", "drawer"))
    assert game.instruction == 'Your task is to: put a "clean" mug in drawer.'
    assert (game.help, game.wordings, game.walkthrough) == ("Say:\n  look\n", ("Clean a mug.",), ("look",))


def test_the_text_of_help_may_be_in_the_grammar():
    """As in games that the wheel alfworld 0.4.2 generates."""
    rule = r'grammar :: """{ "help.feedback": [{ "rhs": "\nSay:\n  look\n" }] }""";'
    grammar = GRAMMAR.replace("\nSay:\n  look\n", "#help.feedback#") + rule
    assert read_game({**FILE, "grammar": grammar}, []).help == "Say:\n  look\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("(openable Drawer_bar_plus_01)", "(locked Drawer_bar_plus_01)", "facts that no official game has: locked"),
        ("(isClean ?o)", "(isSliced ?o)", "its goal is of no type of task"),
        (
            "loc_bar_1) (objectAtLocation",
            "loc_bar_7) (objectAtLocation",
            "mug_bar_plus_01 is both loc_bar_7 and loc_bar_1",
        ),
        ('"task": [', '"tusk": [', "its grammar has no rule 'task'"),
    ],
)
def test_a_file_of_another_form_is_refused(old: str, new: str, message: str):
    with pytest.raises(ValueError, match=message):
        read_game({**FILE, "pddl_problem": PROBLEM.replace(old, new), "grammar": GRAMMAR.replace(old, new)}, [])


def official_folder(folder: Path, *left_out: str) -> Path:
    for split in ("train", "valid_seen", "valid_unseen"):
        games = dict(own_files(split)) if split not in left_out else {}
        write_official(folder, split, games, {name: [" Do it. ", "Please."] for name in games})
    return folder


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int | str | None:
    monkeypatch.setattr("sys.argv", ["alfworld", *map(str, arguments)])
    try:
        command_line.main()
    except SystemExit as exit:
        return exit.code
    return 0


def test_import_reads_an_official_folder_into_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    folder, file = official_folder(tmp_path / "json_2.1.1"), tmp_path / "games.zip"
    name = "pick_and_place_simple-Mug-None-Desk-1/trial_0"
    odd = {name.replace("None", "movable"): FILE, name.replace("Mug", "MugSliced"): FILE, f"fold-{name}": FILE}
    write_official(folder, "train", {**odd, name: {**FILE, "solvable": False}}, {})  # none of which is played
    assert run(monkeypatch, "import", folder, "--output", file) == 0
    said = capsys.readouterr().out
    assert said == f"{file}: 24 of train, 12 of valid_seen, 12 of valid_unseen; the walkthrough of each wins\n"
    archive, own = Archive(file), own_games()
    assert {split: sorted(names) for split, names in archive.names.items()} == {
        split: sorted(games) for split, games in own.items()
    }
    for split, names in archive.names.items():
        assert [name.partition("-")[0] for name in names] == sorted(
            (name.partition("-")[0] for name in names), key=[*TASKS].index
        )
        for name in names:
            found = archive.game(split, name)
            assert found.wordings == ["Do it.", "Please."]
            assert {**found.as_row(), "wordings": []} == {**own[split][name].as_row(), "wordings": []}

    assert run(monkeypatch, "import", folder, "--output", file) == 2
    assert f"{file} exists already: remove it, or name another file" in capsys.readouterr().err
    assert run(monkeypatch, "import", folder / "train", "--output", tmp_path / "x.zip") == 2
    assert (
        "has no game.tw-pddl in train, valid_seen, valid_unseen: give the folder json_2.1.1" in capsys.readouterr().err
    )
    assert [path.name for path in tmp_path.iterdir()].count("x.zip") == 0


def test_a_game_whose_walkthrough_does_not_win_is_refused(tmp_path: Path):
    """Such as one of ALFWorld before 0.4, whose commands are `put A in/on B`."""
    name, game = next(own_files("train"))
    older = [command.replace("move", "put").replace(" to ", " in/on ") for command in game["walkthrough"]]
    write_official(tmp_path, "train", {name: {**game, "walkthrough": older}}, {})
    with pytest.raises(ValueError, match=r"game.tw-pddl: its walkthrough does not win; get the games of ALFWorld 0.4"):
        list(read_official(tmp_path, "train"))


def test_a_file_that_is_none_says_how_to_make_one(tmp_path: Path):
    file = tmp_path / "games.zip"
    with pytest.raises(ArchiveError, match=r"there is no file .*games.zip .*: make it with `python -m"):
        Archive(file)
    file.write_bytes(OWN_FILE.read_bytes()[:-100])
    with pytest.raises(ArchiveError, match=r"games.zip is no file of ALFWorld's games, or damaged .*: make it with"):
        Archive(file)
    whole = bytearray(OWN_FILE.read_bytes())
    whole[100:-3000] = bytes(len(whole) - 3100)  # the list of members is whole
    file.write_bytes(whole)
    with pytest.raises(ArchiveError, match=r"games.zip is no file of ALFWorld's games, or damaged "):
        Archive(file)
    with pytest.raises(ValueError, match=r"own.zip has no game 'pick_and_place_simple-X' in train"):
        Archive(OWN_FILE).game("train", "pick_and_place_simple-X")


def test_the_projects_own_games_are_those_that_made_up_makes(tmp_path: Path):
    own, made = Archive(OWN_FILE), own_games()
    write(tmp_path / "made.zip", made)
    assert Archive(tmp_path / "made.zip").names == own.names
    for split, games in made.items():
        assert {name: own.game(split, name).as_row() for name in games} == {
            name: g.as_row() for name, g in games.items()
        }


@pytest.mark.slow
@pytest.mark.parametrize(("split", "count"), [("train", 3553), ("valid_seen", 140), ("valid_unseen", 134)])
def test_every_official_game_is_won_by_its_walkthrough_and_no_step_of_it_fails(split: str, count: int):
    need_worlds()
    games, said = official_games(split), official_wordings()
    assert len(games) == count
    tasks = set()
    for name, file in games.items():
        game = read_game(file, said[f"{split}/{name}"])
        assert name.startswith(game.task) and len(game.wordings) >= 3
        engine = Engine(game)
        assert not engine.won
        feedback = [engine.step(command) for command in game.walkthrough]
        assert engine.won and NOTHING_HAPPENS not in feedback, name
        tasks.add(game.task)
    assert tasks == set(TASKS)


def test_official_games_are_played_fast(tmp_path: Path):
    """Ten times what the page says, to be sure on a busy machine: a step in 1 ms, a game read in 40."""
    need_worlds()
    games = {name: read_game(file, []) for name, file in official_games("valid_unseen").items()}
    write(tmp_path / "games.zip", {"valid_unseen": games})
    archive, generator = Archive(tmp_path / "games.zip"), random.Random(0)
    began, steps = time.process_time(), 0
    read = [archive.game("valid_unseen", name) for name in list(games)[:30]]
    took = time.process_time() - began
    began = time.process_time()
    for game in read:
        engine = Engine(game)
        for _ in range(50):
            engine.step(generator.choice(engine.commands))
            steps += 1
    assert took / len(read) < 0.04 and (time.process_time() - began) / steps < 0.001


def test_json_is_the_games_form() -> None:
    game = read_game(FILE, [])
    assert type(game).of(json.loads(json.dumps(game.as_row()))).as_row() == game.as_row()
