"""The page of `empo2 report`: what it says of runs made by hand, that it runs nothing, and how a browser sees it."""

import json
import re
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import yaml

from empo2.memory import MemoryStore
from empo2.recipe.config import load_settings
from empo2.recipe.evaluation.charts import charts_of, drawing
from empo2.recipe.evaluation.page import write_page
from empo2.recipe.evaluation.run_lines import differences, lines_of

from ..memory.stores import add, play
from ..needs import need

EVIL = "<script>window.hacked = 1</script><img src=http://127.0.0.1:9/x onerror='hacked = 1'>&amp;"


def make_run(folder: Path, end: float, *overrides: str) -> Path:
    """A run whose success without tips goes from 0 over 0.25 to `end`, and with tips is 0.5."""
    folder.mkdir(parents=True)
    rows = [{"step": step, "training/return": 10.0 * step, "empo2/memory_fraction": 0} for step in (1, 2, 3, 4)]
    rows += [
        {"step": step, "val/train/success_rate": alone, "val/train/memory_success_rate": 0.5}
        for step, alone in ((0, 0.0), (2, 0.25), (4, end))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = load_settings("cpu", [f"run.name={folder.name}", *overrides]).to_dict()
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    return folder


def add_memory(run: Path) -> None:
    """Tip 1 is shown in episodes that return 90 and 70, tip 2 in 70 and 20, tip 3 in one; two more return 10 and 30."""
    with closing(MemoryStore(run / "memory.sqlite", embedder="none", dimension=1, capacity=9)) as store:
        for number, text in enumerate(("Go east.", EVIL, "Seen once."), 1):
            add(store, f"writer {number}", np.ones(1), scope="den", tip=text, success=False)
        for score, shown in ((90, [1]), (70, [1, 2]), (20, [2, 3]), (10, []), (30, [])):
            play(store, f"play {score}", shown, scope="den", score=score)


def add_episodes(run: Path) -> None:
    spans = [["read", f"You see {EVIL}\n", 5], ["trained", "open ", 1], ["masked", "box\x1b[2J", 2]]
    record = {"mode": "memory, off-policy", "task": {"room": EVIL}, "return": 100.0, "advantage": 0.5, "cut": False}
    lines = [record | {"step": step, "tips": [2, 77], "mask_known": True, "spans": spans} for step in range(1, 30)]
    (run / "episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, two of which differ in their seed alone, and the first of which has tips and episodes."""
    tmp_path = tmp_path_factory.mktemp("runs")
    first = make_run(tmp_path / "empo2-1", 0.5, "algorithm.seed=1")
    second = make_run(tmp_path / "empo2-2", 1.0, "algorithm.seed=2", "run.steps=9")
    other = make_run(tmp_path / "grpo", 0.25, "algorithm.name=grpo")
    add_memory(first)
    add_episodes(first)
    return write_page(lines_of([first, other, second]), tmp_path / "report.html")


class Reader(HTMLParser):
    """The elements and attributes of a page, and its text by element."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(" ".join(data.split()))

    @property
    def text(self) -> str:
        return " ".join(filter(None, self.texts))


def test_runs_that_differ_in_the_seed_alone_are_one_line(page: Path):
    lines = lines_of([page.parent / name for name in ("empo2-1", "grpo", "empo2-2")])
    assert [(line.label, len(line.runs), line.last_step) for line in lines] == [("empo2", 2, 4), ("grpo", 1, 4)]
    assert differences(lines) == {"algorithm.name": ["empo2", "grpo"]}
    steps, curve = lines[0].curve("val/train/success_rate")
    assert steps == [0, 2, 4]
    # At the end 0.5 and 1: the standard deviation is 0.35355, t of 1 degree of freedom 12.7062, and 2 ** 0.5 in both.
    assert curve[2] == pytest.approx((0.75, 0.75 - 12.7062 * 0.25, 0.75 + 12.7062 * 0.25), rel=1e-4)
    assert lines[0].end("val/train/success_rate") == curve[2]
    assert np.isnan(lines[1].curve("val/train/success_rate")[1][0].low)
    assert lines[1].end("val/return") is None


def test_a_curve_has_the_steps_that_all_seeds_have(tmp_path: Path):
    runs = [make_run(tmp_path / f"a-{seed}", 1.0, f"algorithm.seed={seed}") for seed in (1, 2)]
    short = runs[1] / "metrics.jsonl"
    short.write_text("".join(line + "\n" for line in short.read_text().splitlines() if '"step": 4' not in line))
    (line,) = lines_of(runs)
    assert line.curve("val/train/success_rate")[0] == [0, 2]
    assert line.last_step == 3


def test_runs_without_settings_are_lines_of_their_own(tmp_path: Path):
    for name in ("a-1", "a-2"):
        (make_run(tmp_path / name, 1.0) / "config.yaml").unlink()
    assert [line.label for line in lines_of([tmp_path / "a-1", tmp_path / "a-2"])] == ["a-1", "a-2"]


def test_what_the_page_says(page: Path):
    text = Reader(page).text
    assert "empo2, grpo" in text and "empo2 smollm2-135m-instruct, 4 steps, 2 seeds" in text
    assert "75 ± 318" in text  # the end, in percent
    # Tip 1: (90 + 70) / 2 against (20 + 10 + 30) / 3. Tip 2: (70 + 20) / 2 against (90 + 10 + 30) / 3.
    tips = text.partition("Tips that helped most")[2].partition("Episodes as")[0]
    assert re.search(r"\+60 80 20 2 [\d.]+ Go east\.", tips)
    assert "+1.667 45 43.33 2" in tips and "Seen once" not in tips
    assert "step 1:" in text and "step 29:" in text and text.count("memory, off-policy") == 5
    assert "tip 77, which is no longer stored" in text
    assert "2 masked tokens, 5 read tokens, 1 trained tokens" in text


def test_the_page_needs_nothing_and_runs_nothing(page: Path):
    reader = Reader(page)
    assert EVIL in " ".join(reader.texts)
    used = {tag for tag, _ in reader.elements}
    assert used.isdisjoint({"script", "img", "link", "iframe", "object", "base", "form", "a"})
    for tag, attributes in reader.elements:
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "href")], tag
        assert (attributes.get("xlink:href") or "#").startswith("#")
    policy = next(each["content"] for tag, each in reader.elements if each.get("http-equiv"))
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    content = page.read_text()
    assert "@import" not in content and "\x1b" not in content
    assert set(re.findall(r"url\(([^)#]*)", content)) <= {""}


def test_secrets_of_the_environment_are_left_out(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_TOKEN", "Go east.")
    assert "Go east" not in write_page(lines_of([page.parent / "empo2-1"]), tmp_path / "report.html").read_text()


def test_a_memory_that_cannot_be_read_is_named(tmp_path: Path):
    (make_run(tmp_path / "grpo", 1.0) / "memory.sqlite").write_text("no database")
    page = write_page(lines_of([tmp_path / "grpo"]), tmp_path / "report.html")
    assert re.search(r"Inside \S+/grpo \S+/grpo/memory.sqlite: ", Reader(page).text)


def test_a_drawing_has_the_colors_of_the_page(page: Path):
    lines = lines_of([page.parent / "empo2-1", page.parent / "grpo"])
    chart = charts_of(lines)[0]
    assert (chart.title, chart.with_tips) == ("Success, training tasks", "val/train/memory_success_rate")
    svg = drawing(chart, lines)
    assert {*re.findall(r"(?:stroke|fill): ([^;\"]+)", svg)} == {
        "none",
        "currentColor",
        "var(--line-0)",
        "var(--line-1)",
    }
    assert svg.count("stroke-dasharray") == 2  # with tips
    assert not re.search(r' id="(figure|axes)_1"', svg)


def test_charts_of_panels(tmp_path: Path):
    run = make_run(tmp_path / "a", 1.0)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "val/success_rate": 0.5, "val/unseen/success_rate": 0.5}) + "\n")
        file.write(json.dumps({"step": 4, "empo2/tip_gain": 0.1}) + "\n")
    titles = [chart.title for chart in charts_of(lines_of([run]))]
    assert titles == ["Success, training tasks", "Success, unseen tasks", "Return, training", "Gain by tips"]


def browse(page: Path, *options: str) -> dict:
    script = Path(__file__).parents[1] / "browser.py"
    command = [sys.executable, str(script), str(page), str(page.with_suffix(".png")), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_browser_shows_it_all_and_runs_nothing(page: Path):
    need("pyside6-addons", by="make browser")
    shown = browse(page)
    assert shown["title"] == "empo2, grpo"
    assert shown["requests"] == [page.resolve().as_uri()] and shown["console"] == []
    assert (shown["scripts"], shown["hacked"]) == (0, "undefined")
    assert shown["text"].count(EVIL) >= 2  # as a tip, and in the open episode
    assert len(shown["drawings"]) == 2 and min(shown["drawings"]) > 100
    assert {"rgb(0, 114, 178)", "rgb(213, 94, 0)"} < set(shown["lines"])
    assert ["trained", "open "] in shown["marks"] and ["masked", "box\ufffd[2J"] in shown["marks"]
    assert page.with_suffix(".png").stat().st_size > 10_000


def test_a_browser_shows_it_in_the_dark_and_on_a_phone(page: Path):
    need("pyside6-addons", by="make browser")
    shown = browse(page, "--dark", "--width", "400")
    assert (shown["background"], shown["color"]) == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")
    assert shown["needs"] <= shown["width"] == 400
