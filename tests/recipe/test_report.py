"""The table and the curves of a run, from the lines that the trainer writes."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from empo2.recipe.errors import Empo2Error
from empo2.recipe.evaluation.run_lines import lines_of
from empo2.recipe.evaluation.run_report import show_lines, show_runs
from empo2.recipe.launcher.progress import step_summary
from empo2.recipe.run_folder import read_metrics, step_mode

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


def make_run(folder: Path, rows: list[dict], ending: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + ending)
    return folder


def test_table_has_one_line_a_step(tmp_path, capsys):
    run, output = make_run(tmp_path / "demo", ROWS), io.StringIO()
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


@pytest.mark.parametrize(
    ("memory", "off_policy", "mode"),
    [
        (0, 0, "no memory"),
        (1, 0, "memory, on-policy"),
        (1, 1, "memory, off-policy"),
        (1, 0.5, "mixed"),
        (0.5, 0, "mixed"),
    ],
)
def test_mode_of_a_step(memory, off_policy, mode):
    assert step_mode(training(1, memory, off_policy)) == mode
    assert step_summary(training(1, memory, off_policy)).startswith(f"return   21.00  {mode:18}  8 tips")


def test_validation_alone_has_no_mode():
    assert step_mode(VALIDATION) is None
    assert step_summary(VALIDATION) == "validation 8.25"
    more = {"val/train/return": 50.0, "val/train/memory_return": 75.0}
    assert step_summary(VALIDATION | more) == "validation 8.25, training tasks 50.00, with tips 75.00"


def test_lines_of_a_step_are_merged_and_what_is_half_written_or_not_finite_is_absent(tmp_path):
    rows = [training(2, 0, 0), training(1, 0, 0, **{"actor/entropy": None})]
    rows += [{"step": 2, "val/return": 9.0}, {"step": 2, "training/return": 1.0}]  # the resumed run wins
    first, second = read_metrics(make_run(tmp_path / "demo", rows, ending='{"step": 4, "trai'))
    assert first["step"] == 1 and "actor/entropy" not in first
    assert (second["training/return"], second["val/return"], second["empo2/memory_size"]) == (1.0, 9.0, 16)


def shown(capsys: pytest.CaptureFixture[str], folder: Path, *runs: Path) -> str:
    show_lines(lines_of(runs), folder, Console(width=80))
    return capsys.readouterr().out


def test_a_run_without_anything_to_draw(tmp_path, capsys):
    run = make_run(tmp_path / "demo", [{"step": 0, "val/n_rollouts": 0}])
    assert shown(capsys, run, run) == f"report  {run / 'report.html'}\n"


def test_several_runs_are_compared_in_one_table(tmp_path, capsys):
    rows = [VALIDATION, {"step": 3, "training/return": 1.0}]
    runs = [make_run(tmp_path / "empo2", rows), make_run(tmp_path / "grpo$_", [{"step": 0, "val/success_rate": 0.5}])]
    lines = shown(capsys, tmp_path, *runs).splitlines()
    assert [line.split() for line in lines if line.startswith(("empo2", "grpo"))] == [
        ["empo2", "1", "3", "0.00"],
        ["grpo$_", "1", "0", "50.0"],
    ]
    assert lines[-1] == f"report  {tmp_path / 'report.html'}"


def test_no_run_there(tmp_path):
    with pytest.raises(Empo2Error, match=r"no metrics\.jsonl; give the folder of a run"):
        lines_of([tmp_path])


@pytest.mark.parametrize("content", ["", '{"step": 0, "val'])
def test_nothing_measured_yet(tmp_path, content):
    with pytest.raises(Empo2Error, match="no step yet"):
        lines_of([make_run(tmp_path / "demo", [], ending=content)])
