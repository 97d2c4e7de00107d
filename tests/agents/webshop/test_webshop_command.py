"""`python -m empo2.agents.webshop`: what it says, builds and plays."""

import json
import shlex
from pathlib import Path

import pytest

from empo2.agents.webshop import generated
from empo2.agents.webshop.__main__ import main


@pytest.fixture
def command(monkeypatch, run_main):
    def run(*arguments: object, typed: tuple[str, ...] = ()) -> tuple[object, str, str]:
        lines = iter(typed)

        def read(prompt: str) -> str:
            for line in lines:
                return line
            raise EOFError

        monkeypatch.setattr("builtins.input", read)
        return run_main(main, *arguments)

    return run


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    return generated.write(tmp_path_factory.mktemp("files"), 20)


def test_build_then_play(command, files, tmp_path):
    items, attributes, human = files
    shop = tmp_path / "shop"
    right = ("--items", items, "--attributes", attributes, "--human", human)
    code, output, errors = command("build", *right, "--output", shop)
    assert (code, output, errors) == (0, f"{shop}: 20 products, 60 goals\n", "")
    code, output, _ = command("play", "--catalogue", shop, "--max-steps", 2, typed=("search[a", "click[buy now]"))
    assert code == 0
    assert "WebShop\nInstruction:\n" in output
    assert output.endswith("score 0 of 100\n")
    code, output, _ = command("play", "--catalogue", shop, typed=("search[made]",))  # the end of input ends the play
    assert (code, "\nPage 1 (Total results: " in output) == (0, True)
    code, _, errors = command("play", "--catalogue", shop, "--goal", 60)
    assert (code, "--goal 60 must be one of 0 ... 59" in errors.splitlines()[-1]) == (2, True)
    code, _, errors = command("build", *right[:4], "--output", shop)
    assert (code, "shop exists already: remove it" in errors.splitlines()[-1]) == (2, True)
    assert command("build", *right[:4], "--output", tmp_path / "synthetic")[0] == 0


def test_instructions_for_another_shop_are_warned_of_with_the_command_that_is_right(command, files, tmp_path):
    items, attributes, human = files
    instructions = json.loads(human.read_text())
    few = dict([*instructions.items()][:2])
    elsewhere = {f"ELSE{number}": entries for number, entries in enumerate(instructions.values())}
    (tmp_path / "all.json").write_text(json.dumps({**few, **elsewhere}))
    shop = tmp_path / "the shop"
    right = ["build", "--items", items, "--attributes", attributes, "--output", shop]
    code, output, errors = command(*right, "--human", tmp_path / "all.json")
    assert (code, output) == (0, f"{shop}: 20 products, 6 goals\n")
    warning, advice = errors.splitlines()[-2:]
    assert f"only 6 of the 66 instructions of {tmp_path}/all.json are for products of {items}" in warning
    removal, command_line = advice.strip().split(" && ")
    assert shlex.split(removal) == ["rm", "-r", str(shop)]
    assert shlex.split(command_line) == ["python", "-m", "empo2.agents.webshop", *map(str, right)]
