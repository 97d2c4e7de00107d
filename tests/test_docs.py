"""README, docs/ and CONTRIBUTING: their commands, settings, links and code exist as they are written."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from functools import cache
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest
import yaml

from empo2.recipe.cli import main
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.evaluation.panels import load_panel
from empo2.recipe.protocol import scope_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
NOTEBOOK = ROOT / "examples" / "first_run.ipynb"


PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    NOTEBOOK,
]
FOLDERS = (
    *("recipe", "memory", "agents", "bench", "experiments", "gpu_proof", "docs", "examples", "tests", "requirements"),
    *(".ci", ".github"),
)
# Folders in which a reader runs a command that names files.
PLACES = (ROOT, ROOT / "examples" / "quiz")
# These look like settings, but are files and a method of pydantic-ai.
NO_SETTINGS = re.compile(r".*\.(yaml|sqlite|log|py|json)|agent\.run")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    """What a page says; of a notebook, the commands of its cells as blocks."""
    if page.suffix != ".ipynb":
        return page.read_text()
    texts = []
    for cell in json.loads(page.read_text())["cells"]:
        text = "".join(cell["source"])
        lines = text if text.startswith("%%bash") else "\n".join(re.findall(r"^!(.*)", text, re.MULTILINE))
        texts.append(f"```bash\n{lines}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(texts)


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages, without the indentation of a list that they stand in."""
    found = re.findall(r"^( *)```(\w*)\n(.*?)^ *```$", text_of(page), re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", text, flags=re.MULTILINE) for indent, name, text in found if name in languages]


def code_spans(page: Path) -> list[str]:
    prose = re.sub(r"^ *```.*?^ *```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`]+)`", prose)


def commands(page: Path, *programs: str) -> list[list[str]]:
    """The words after the program's name of each command, in shell blocks and in code spans of the prose."""
    lines = [line for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    found = []
    for line in [*lines, *code_spans(page)]:
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue
        while words and re.fullmatch(r"[A-Z_][A-Z_0-9]*=.*", words[0]):
            del words[0]
        for program in programs:
            first = program.split()
            if [word.removeprefix(".venv/bin/") for word in words[: len(first)]] == first:
                found.append(words[len(first) :])
    return found


@cache
def help_of(*command: str) -> str:
    """What ``--help`` prints after these words; empty where they are refused."""
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}
    if command[0] == "empo2":
        with mock.patch.dict(os.environ, environment), redirect_stdout(io.StringIO()) as printed:
            return printed.getvalue() if main([*command[1:], "--help"]) == 0 else ""
    done = subprocess.run([*command, "--help"], capture_output=True, text=True, env=environment, cwd=ROOT, timeout=600)
    return done.stdout if done.returncode == 0 else ""


def unknown_words(program: tuple[str, ...], words: list[str]) -> list[str]:
    """What a command's help does not list: a word in the place of a verb, else options."""
    assert help_of(*program), f"{shlex.join(program)} --help fails"
    verbs: list[str] = []
    while re.match(r".*\b(COMMAND|VERB)\b", help_of(*program, *verbs)) and len(verbs) < len(words):
        verbs.append(words[len(verbs)])
        if not re.match(rf".*{re.escape(' '.join(verbs))}", help_of(*program, *verbs)):
            return verbs[-1:]
    given = {word.partition("=")[0] for word in words if re.match(r"--\w", word)}
    return sorted(given - set(re.findall(r"--[\w-]+", help_of(*program, *verbs))))


@each_page
def test_commands_of_empo2_have_the_verbs_and_options_that_are_used(page: Path) -> None:
    for words in commands(page, "empo2"):
        assert unknown_words(("empo2",), words) == [], f"empo2 {shlex.join(words)}"


@each_page
def test_modules_and_scripts_that_are_run_exist_and_take_the_options_that_are_used(page: Path) -> None:
    for module, *words in commands(page, "python -m"):
        if module.startswith("empo2"):
            program = (sys.executable, "-m", module)
            assert unknown_words(program, words) == [], f"python -m {module} {shlex.join(words)}"
    for script, *words in commands(page, "python"):
        if "/" in script:
            listed = help_of(sys.executable, script)
            assert listed, script
            assert [word for word in words if word.startswith("--") and word not in listed] == [], script


@each_page
def test_targets_of_make_exist(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    variables = set(re.findall(r"^([a-z]+) \?=", makefile, re.MULTILINE))
    for words in commands(page, "make"):
        assert {word.partition("=")[0] for word in words if "=" in word} <= variables, words
        assert {word for word in words if "=" not in word} <= targets, words


@each_page
def test_settings_and_panels_of_commands_are_accepted(page: Path) -> None:
    """As far as they can be checked without a model."""
    panels_of: dict[str, list[str]] = {"train": [], "gateway": []}
    panels_of |= {"eval": ["scienceworld-paper"], "adapt": ["scienceworld-paper-seen"]}
    for verb, *words in filter(None, commands(page, "empo2")):
        if verb not in panels_of:
            continue
        options: dict[str, list[str]] = {}
        for name, word in pairwise(words):
            if name.startswith("--"):
                options.setdefault(name, []).append(word)
        names = options.get("--panel", panels_of[verb]) + options.get("--unseen", [])
        limit = int(options["--limit"][0]) if "--limit" in options else None
        panels = [load_panel(name, options.get("--row", []), limit, options.get("--only", [])) for name in names]
        files = {place / options["--config"][0] for place in PLACES} if "--config" in options else set[Path]()
        file = next(filter(Path.is_file, files), None)
        assert file or not files, f"{options['--config']}: no such file"
        settings = load_settings(
            options.get("--profile", [None])[0],
            [word for word in words if re.match(r"[a-z_]+\.[\w.]+=", word)],
            world=panels[0].config if panels else None,
            file=file,
            layer={"model": {"server": options["--server"][0]}} if "--server" in options else None,
        )
        for panel in panels:
            scope_of(panel.rows[0], settings.memory.scope)


@each_page
def test_settings_that_the_text_names_exist(page: Path) -> None:
    values = load_settings("cpu").to_dict()
    for word in (word for span in code_spans(page) for word in span.split()):
        key, equals, _ = word.partition("=")
        section, _, name = key.partition(".")
        if section not in values or not re.fullmatch(r"[\w.]+", name) or NO_SETTINGS.fullmatch(key):
            continue
        if equals:
            load_settings("cpu", [word])
        elif section != "verl":
            assert name.partition(".")[0] in values[section], f"`{word}`"
    for file in filter(re.compile(r"agents/[\w/-]+\.yaml").fullmatch, code_spans(page)):
        load_settings("cpu", file=ROOT / file)
    for content in map(yaml.safe_load, blocks(page, "yaml")):
        if isinstance(content, dict) and content.keys() <= {*Settings.model_fields, "class"}:
            load_settings(layer=content)


def test_the_table_of_tiers_says_what_make_runs() -> None:
    table = re.findall(r"^\| `make (test[\w-]*)` \| `([^`]+)`", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    recipes = re.findall(r"^(test[\w-]*):.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert dict(table) == {target: re.findall(r'-m "([^"]+)"', recipe)[-1] for target, recipe in recipes}
    named = {word for _, markers in table for word in markers.split()} - {"not", "and"}
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert named == {line.partition(":")[0] for line in options["markers"]}


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@each_page
def test_links_and_paths_lead_to_something(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), f"[...]({link})"
            assert not anchor or anchor in anchors(target), f"[...]({link})"
    for span in code_spans(page):
        path = span.partition("::")[0]
        if re.fullmatch(rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./-]*", path):
            assert (ROOT / path).exists(), f"`{span}`"


def test_the_front_door_leads_to_each_page_and_the_examples_are_those_of_the_pages() -> None:
    readme, guide = ROOT / "README.md", ROOT / "docs" / "retrofit.md"
    linked = re.findall(r"\(docs/([\w.-]+)\)", readme.read_text())
    assert {page.name for page in (ROOT / "docs").glob("*.md")} <= {*linked}
    for verb in ("empo2 init", "empo2 train"):
        assert commands(readme, verb)[0] in commands(guide, verb)
    examples = "\n".join(file.read_text() for file in (ROOT / "examples").rglob("*.py"))
    for block in (block for page in PAGES for block in blocks(page, "python")):
        assert block in examples, block


def test_the_notebook_has_the_outputs_of_one_run() -> None:
    """From the top to its end, and what `empo2 init` says is what the guide says."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    for cell in cells:
        assert cell["outputs"] and not [each for each in cell["outputs"] if each["output_type"] == "error"]
        said = "".join("".join(output.get("text", "")) for output in cell["outputs"])
        assert "empo2 init" not in "".join(cell["source"]) or said in blocks(ROOT / "docs" / "retrofit.md", "")
    assert not re.search(r"(?<![\w.])/(home|root|tmp)/", NOTEBOOK.read_text())  # a path of someone's machine


def test_the_guide_says_what_init_writes_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    """Each ``empo2 init`` of the guide, in a copy of the script's folder."""
    guide, quiz = ROOT / "docs" / "retrofit.md", ROOT / "examples" / "quiz"
    for name in ("quiz.py", "quiz_agent.py", "questions.jsonl"):
        (tmp_path / name).write_bytes((quiz / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # as the script's own start does
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    shell = [block.replace("\\\n", "") for block in blocks(guide, "bash") if block.startswith("empo2 init")]
    assert len(shell) == 3
    outputs = []
    for line in shell:
        assert main(shlex.split(line)[1:]) == 0
        outputs.append(capfd.readouterr().out)
    assert outputs[0] in blocks(guide, "")
    for name in ("empo2.yaml", "class.yaml"):
        assert (tmp_path / name).read_text() == (quiz / name).read_text(), f"write examples/quiz/{name} anew"
