"""What is shown of runs: their tables and curves, the page of `empo2 report` in a browser, and the story of a demo."""

import io
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
from rich.console import Console

from empo2.memory import MemoryStore
from empo2.recipe.config import load_settings
from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.charts import charts_of
from empo2.recipe.evaluation.page import write_page
from empo2.recipe.evaluation.run_lines import differences, lines_of
from empo2.recipe.evaluation.run_report import show_lines, show_runs
from empo2.recipe.launcher.progress import step_summary
from empo2.recipe.run_folder import read_metrics
from empo2.small_model.demo import Point, read_points, sentences, tell

from ..memory.stores import add, play
from ..needs import need

EVIL = "<script>window.hacked = 1</script><img src=http://127.0.0.1:9/x onerror='hacked = 1'>&amp;"


def write_metrics(folder: Path, rows: list[dict], ending: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + ending)
    return folder


def validations(*points: tuple[int, float, float]) -> list[dict]:
    """Success without tips and with, after some steps."""
    keys = ("step", "val/train/success_rate", "val/train/memory_success_rate")
    return [dict(zip(keys, point, strict=True)) for point in points]


def make_run(folder: Path, end: float, *overrides: str) -> Path:
    """A run whose success without tips goes from 0 over 0.25 to `end`, and with tips is 0.5."""
    rows = [{"step": step, "training/return": 10.0 * step, "empo2/memory_fraction": 0} for step in (1, 2, 3, 4)]
    write_metrics(folder, rows + validations((0, 0.0, 0.5), (2, 0.25, 0.5), (4, end, 0.5)))
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
    def __init__(self, page: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(page.read_text())
        self.text = " ".join(filter(None, self.texts))

    def handle_starttag(self, tag, attrs) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(" ".join(data.split()))


@pytest.mark.parametrize("panel", ["hard-ones", "maze/easy"])
def test_a_panel_may_have_a_hyphen_or_a_slash(tmp_path: Path, panel: str) -> None:
    run = make_run(tmp_path / "a", 1.0)
    write_metrics(run, [{"step": 4, f"val/{panel}/return": 7.0}, {"step": 4, "val/train/return": 8.0}])
    keys = [chart.key for chart in charts_of(lines_of([run]))]
    assert f"val/{panel}/return" in keys


def test_what_is_validated_is_told_from_a_part_of_it_and_from_an_agents_own_metrics(tmp_path: Path) -> None:
    """Of two tasks one has a panel; the agent names its metrics as the trainer does."""
    row = {"step": 4, "val/success_rate": 0.5, "val/hard/success_rate": 0.0, "val/agent/success_rate": 9.0}
    run = write_metrics(tmp_path / "a", [row])
    assert [chart.key for chart in charts_of(lines_of([run]))] == ["val/success_rate", "val/hard/success_rate"]


def figures(page: Path) -> list[str]:
    return re.findall(r'<td class="number">(.*?)</td>', page.read_text().replace("\n", " "))


def test_a_panel_may_have_the_name_of_a_heading_or_of_a_secret(tmp_path: Path) -> None:
    shares = {"": 0.5, "validation/": 0.75, "DoorKey/": 0.25}
    row = {"step": 4} | {f"val/{panel}success_rate": share for panel, share in shares.items()}
    page = write_page(lines_of([write_metrics(tmp_path / "a", [row])]), tmp_path / "report.html")
    assert figures(page) == [f"{value}<small>step 4</small>" for value in (50, 25, 75)]


def test_the_last_figures_are_of_one_step_and_of_the_runs_that_have_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The third run has stopped at step 2, the fourth before its first validation; all are at 25 % at step 2."""
    runs = [make_run(tmp_path / f"e-{seed}", 1.0, f"algorithm.seed={seed}") for seed in (1, 2, 3, 4)]
    write_metrics(runs[2], validations((0, 0.0, 0.5), (2, 0.25, 0.5)))
    write_metrics(runs[3], [{"step": 1, "training/return": 1.0}])
    show_lines(lines_of(runs), tmp_path, Console(width=80))
    assert ["e", "3", "2", "25.0"] in [line.split() for line in capsys.readouterr().out.splitlines()]
    assert figures(tmp_path / "report.html") == ["25 ± 0<small>step 2, 3 seeds</small>"]


def test_names_in_brackets_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_metrics(tmp_path / name, [{"step": 0, "val/[easy] x/success_rate": 0.5}]) for name in "ab"]
    show_lines(lines_of(runs), tmp_path, Console(width=80))
    assert "[easy] x" in capsys.readouterr().out


def test_runs_that_differ_in_the_seed_alone_are_one_line(page: Path):
    lines = lines_of([page.parent / name for name in ("empo2-1", "grpo", "empo2-2")])
    assert [(line.label, len(line.runs), line.last_step) for line in lines] == [("empo2", 2, 4), ("grpo", 1, 4)]
    assert differences(lines) == {"algorithm.name": ["empo2", "grpo"]}
    steps, curve = lines[0].curve("val/train/success_rate")
    assert steps == [0, 2, 4]
    # At the end 0.5 and 1: the standard deviation is 0.35355, t of 1 degree of freedom 12.7062, and 2 ** 0.5 in both.
    assert curve[2] == pytest.approx((0.75, 0.75 - 12.7062 * 0.25, 0.75 + 12.7062 * 0.25), rel=1e-4)
    assert lines[0].end("val/train/success_rate") == (curve[2], 4, 2)
    assert np.isnan(lines[1].curve("val/train/success_rate")[1][0].low)


def test_a_curve_has_the_steps_that_all_seeds_have_and_charts_are_drawn_of_what_was_measured(tmp_path: Path):
    runs = [make_run(tmp_path / f"a-{seed}", 1.0, f"algorithm.seed={seed}") for seed in (1, 2)]
    short, long = (run / "metrics.jsonl" for run in runs)
    short.write_text("".join(line + "\n" for line in short.read_text().splitlines() if '"step": 4' not in line))
    (line,) = lines_of(runs)
    assert line.curve("val/train/success_rate")[0] == [0, 2]
    assert line.last_step == 3
    with long.open("a") as file:
        file.write(json.dumps({"step": 4, "val/success_rate": 0.5, "val/unseen/success_rate": 0.5}) + "\n")
        file.write(json.dumps({"step": 4, "empo2/tip_gain": 0.1}) + "\n")
    titles = [chart.title for chart in charts_of(lines_of(runs[1:]))]
    assert titles == ["Success, training tasks", "Success, unseen tasks", "Return, training", "Gain by tips"]
    for run in runs:
        (run / "config.yaml").unlink()  # without settings they are lines of their own
    assert [line.label for line in lines_of(runs)] == ["a-1", "a-2"]


def test_lines_are_named_such_that_they_are_told_apart(tmp_path: Path):
    seeds = [make_run(tmp_path / f"empo2-{seed}", 1.0, f"algorithm.seed={seed}") for seed in (10, 11)]
    other = make_run(tmp_path / "a" / "one", 1.0, "algorithm.name=grpo")
    assert [line.label for line in lines_of([*seeds, other])] == ["empo2", "one"]
    changed = make_run(tmp_path / "b" / "one", 1.0, "algorithm.rollouts_per_task=16")
    assert [line.label for line in lines_of([other, changed])] == [str(other), str(changed)]


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


def test_the_page_needs_nothing_and_runs_nothing_and_has_no_secrets(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
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
    monkeypatch.setenv("HF_TOKEN", "Go east.")
    assert "Go east" not in write_page(lines_of([page.parent / "empo2-1"]), tmp_path / "report.html").read_text()


def test_a_memory_that_cannot_be_read_is_named(tmp_path: Path):
    (make_run(tmp_path / "grpo", 1.0) / "memory.sqlite").write_text("no database")
    page = write_page(lines_of([tmp_path / "grpo"]), tmp_path / "report.html")
    assert re.search(r"Inside \S+/grpo \S+/grpo/memory.sqlite: ", Reader(page).text)


def test_a_browser_shows_it_all_and_runs_nothing(page: Path):
    need("pyside6-addons", by="make browser")

    def browse(*options: str) -> dict:
        script, picture = Path(__file__).parents[1] / "browser.py", str(page.with_suffix(".png"))
        command = [sys.executable, str(script), str(page), picture, *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    shown = browse()
    assert shown["title"] == "empo2, grpo"
    assert shown["requests"] == [page.resolve().as_uri()] and shown["console"] == []
    assert (shown["scripts"], shown["hacked"]) == (0, "undefined")
    assert shown["text"].count(EVIL) >= 2  # as a tip, and in the open episode
    assert len(shown["drawings"]) == 2 and min(shown["drawings"]) > 100
    assert {"rgb(0, 114, 178)", "rgb(213, 94, 0)"} < set(shown["lines"])
    assert ["trained", "open "] in shown["marks"] and ["masked", "box\ufffd[2J"] in shown["marks"]
    dark = browse("--dark", "--width", "400")
    assert (dark["background"], dark["color"]) == ("rgb(13, 17, 23)", "rgb(230, 237, 243)")
    assert dark["needs"] <= dark["width"] == 400


VALIDATION = {"step": 0, "val/return": 8.25, "val/success_rate": 0.0}


def training(step: int, memory: float, off_policy: float, **more: float | None) -> dict:
    return {
        "step": step,
        "training/return": 20.0 + step,
        "training/intrinsic_return": 1.5,
        "empo2/memory_fraction": memory,
        "empo2/off_policy_fraction": off_policy,
        "empo2/memory_size": 8 * step,
        "empo2/tips_injected_per_call": 2.4 * memory,
        "empo2/rollouts_dropped": 3,
        "timing_s/step": 24.4,
        **more,
    }


ROWS = [VALIDATION, training(1, 1, 1), training(2, 0, 0), training(3, 0.5, 0.25)]


def test_table_has_one_line_a_step(tmp_path, capsys):
    run, output = write_metrics(tmp_path / "demo", ROWS), io.StringIO()
    show_runs([run], run, Console(width=80, file=output))
    lines = output.getvalue().splitlines()
    rule = next(index for index, line in enumerate(lines) if "──" in line)
    assert [line.split() for line in lines[rule + 1 :] if line.strip()] == [
        ["0", "8.25"],
        ["1", "memory,", "off-policy", "21.00", "1.50", "8", "2.4", "3", "24", "s"],
        ["2", "no", "memory", "22.00", "1.50", "16", "0.0", "3", "24", "s"],
        ["3", "50%", "mem,", "25%", "off", "23.00", "1.50", "24", "1.2", "3", "24", "s"],
    ]
    assert capsys.readouterr().out == f"report  {run / 'report.html'}\n"


def test_summary_of_a_step():
    assert step_summary(training(1, 1, 0)).startswith("return   21.00  memory, on-policy ")
    said = step_summary(training(1, 0.5, 0))
    assert said.startswith("return   21.00  mixed ") and "  3 rollouts dropped (empo2 show --dropped; " in said
    more = {"val/train/return": 50.0, "val/train/memory_return": 75.0}
    assert step_summary(VALIDATION | more) == "validation 8.25, training tasks 50.00, with tips 75.00"


def test_lines_of_a_step_are_merged_and_what_is_half_written_or_not_finite_is_absent(tmp_path):
    rows = [training(2, 0, 0), training(1, 0, 0, **{"actor/entropy": None})]
    rows += [{"step": 2, "val/return": 9.0}, {"step": 2, "training/return": 1.0}]  # the resumed run wins
    first, second = read_metrics(write_metrics(tmp_path / "demo", rows, ending='{"step": 4, "trai'))
    assert first["step"] == 1 and "actor/entropy" not in first
    assert (second["training/return"], second["val/return"], second["empo2/memory_size"]) == (1.0, 9.0, 16)
    with pytest.raises(Empo2Error, match=r"no metrics\.jsonl; give the folder of a run"):
        lines_of([tmp_path])
    with pytest.raises(Empo2Error, match="no step yet"):
        lines_of([write_metrics(tmp_path / "begun", [], ending='{"step": 0, "val')])


def test_several_runs_are_compared_in_one_table(tmp_path, capsys):
    rows = [VALIDATION, {"step": 3, "training/return": 1.0}]
    first = write_metrics(tmp_path / "empo2", rows)
    runs = [first, write_metrics(tmp_path / "grpo$_", [{"step": 0, "val/success_rate": 0.5}])]
    nothing_to_draw = write_metrics(tmp_path / "demo", [{"step": 0, "val/n_rollouts": 0}])
    show_lines(lines_of([nothing_to_draw]), nothing_to_draw, Console(width=80))
    show_lines(lines_of(runs), tmp_path, Console(width=80))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines if line.startswith(("empo2", "grpo"))] == [
        ["empo2", "1", "0", "0.00"],
        ["grpo$_", "1", "0", "50.0"],
    ]
    assert lines[-1] == f"report  {tmp_path / 'report.html'}"


# The story of the demo


def told(*points: tuple[int, *tuple[float, ...]]) -> str:
    return " ".join(sentences([Point(point[0], *point[1:]) for point in points]))


def test_sentences_are_true_of_the_numbers():
    learned = told((0, 0.125, 0.125), (5, 0.25, 0.75), (10, 0.625, 0.875))
    assert "succeeds in 12 % of the episodes" in learned
    assert "by step 5, it succeeds in 75 %; without them, at the same step, in 25 %" in learned
    assert "in 62 %: 50 points more than before" in learned
    assert "+50 points at step 5 and +25 points at the end, so part of what the notes say is in the weights" in learned
    worse = told((0, 0.25, 0.25), (5, 0.25, 0.5), (10, 0.125, 0.375))
    assert "12 points less than before" in worse and worse.endswith("so it has not closed yet.")
    assert "-50 points at the end, so the weights do without notes now, and read them worse." in told(
        (0, 0.25, 0.25), (4, 0.25, 1.0), (12, 1.0, 0.5)
    )
    useless = told((0, 0.25, 0.25), (5, 0.25, 0.125))
    assert "in 25 %: no change. Notes add -12 points at step 5 and -12 points at the end." in useless
    by_heart = told((0, 0.25, 0.25, 0.25), (12, 1.0, 1.0, 0.0))
    assert (
        "In a house that it never played it succeeds in 0 %, before training in 25 %: what it has learned are"
        in by_heart
    )
    assert "before training in 0 %: some of what" in told((0, 0.25, 0.25, 0.0), (12, 1.0, 1.0, 0.125))


def test_steps_without_validation_are_no_points_and_the_first_one_was_measured_twice():
    rows = [*validations((0, 0.0, 0.5)), {"step": 1, "training/return": 3.0}, *validations((2, 0.5, 0.6))]
    rows[0]["val/success_rate"] = 0.125
    assert read_points(rows) == [Point(0, 0.25, 0.25, 0.125), Point(2, 0.5, 0.6)]
    with pytest.raises(Empo2Error, match="validate_with_memory=true"):
        read_points(rows[:2])


def test_the_whole_story(tmp_path: Path):
    write_metrics(tmp_path, validations((0, 0.0, 0.0), (5, 0.25, 0.75)))
    key = np.array([1.0, 0.0])
    way = [("You are in the hall.", key, "move east"), ("You are in the den.\nYou see a coin.", key, "take coin")]
    slip = "You are in the hall.", key, "move eastern shade"  # all that is new in an episode with the same tip
    with closing(MemoryStore(tmp_path / "memory.sqlite", embedder="none", dimension=2, capacity=10)) as store:
        add(store, "one", *way[:1], tip="No coin as far as the hall.", score=0.0, success=False)
        add(store, "two", *way, tip="Coin in the den.", score=100.0, success=True)
        add(store, "three", slip, *way, tip="Coin in the den.", score=100.0, success=True)
    said = tell(tmp_path).splitlines()
    assert said[:2] == ["tip (after a success)  Coin in the den.", "tip (after a failure)  No coin as far as the hall."]
    assert said[3:8] == [
        "the episode of the first tip, each move once",
        "  You are in the hall.",
        "    > move east",
        "  You are in the den. You see a coin.",
        "    > take coin",
    ]
    assert said[-1] == f"picture  {tmp_path / 'story.png'}"
    assert (tmp_path / "story.png").read_bytes().startswith(b"\x89PNG")
