"""Write one HTML page about training runs: curves, figures, tips and episodes. It needs no script and no network.

Tips and episodes are text of a policy, which may hold anything: the template escapes all text, and a content security
policy forbids scripts and requests in any case.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from empo2.memory import MemoryFileError
from empo2.memory.browse import TipUse, stored_tips, tip_uses
from empo2.memory.file import reading
from empo2.recipe.evaluation.charts import COLORS, charts_of, drawing, validation_charts
from empo2.recipe.evaluation.run_lines import Line, Run, differences
from empo2.recipe.evaluation.statistics import Interval
from empo2.recipe.printed import printable
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import EPISODES_FILE, MEMORY_FILE, read_lines

_TIPS = 5  # that helped most, and as many that helped least
_EPISODES = 5  # of a run, at equal distances
_RUNS = 8  # whose tips and episodes are shown: one of each line


def write_page(lines: Sequence[Line], target: Path) -> Path:
    """Write the page, and return its file, which holds all that it shows."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["interval"] = _interval_text
    environment.filters["clean"] = printable
    validated = validation_charts(lines)
    texts = redacted(  # a page may be shown to others
        {
            "lines": [_facts(line) for line in lines],
            "differences": differences(lines),
            "runs": [_inside(line) for line in lines[:_RUNS]],
        }
    )
    charts = [{"title": chart.title, "unit": chart.unit, "svg": drawing(chart, lines)} for chart in charts_of(lines)]
    page = environment.get_template("report.html").render(
        **texts,
        charts=charts,
        colors=COLORS,
        headings=[chart.title for chart in validated],
        figures=[[chart.end(line) for chart in validated] for line in lines],
    )
    target.write_text(page)
    return target


def _facts(line: Line) -> dict[str, Any]:
    first = line.runs[0].settings
    return {
        "label": line.label,
        "seeds": len(line.runs),
        "algorithm": first.get("algorithm.name", ""),
        "model": first.get("model.path", ""),
        "step": line.last_step,
        "folders": [str(run.folder) for run in line.runs],
    }


def _inside(line: Line) -> dict[str, Any]:
    """Return the tips and the episodes of a line's first run, as plain values."""
    run = line.runs[0]
    uses: list[TipUse] = []
    texts: dict[int, str] = {}
    problem = ""
    if (run.folder / MEMORY_FILE).is_file():
        try:
            with reading(run.folder / MEMORY_FILE) as db:
                uses = tip_uses(db)
                texts = {tip.id: tip.text for tip in stored_tips(db, order="newest")}
        except MemoryFileError as error:  # such as one of an older version
            problem = str(error)
    least = [use for use in reversed(uses) if use.gain < 0][:_TIPS]
    most = [use for use in uses if use.gain > 0][:_TIPS]
    return {
        "folder": str(run.folder),
        "tables": [
            {"title": title, "rows": [_tip(use) for use in table]}
            for title, table in (("helped most", most), ("helped least", least))
        ],
        "compared": len(uses),
        "problem": problem,
        "stored": len(texts),
        "episodes": _episodes(run, texts),
    }


def _tip(use: TipUse) -> dict[str, Any]:
    outcome = {None: "", True: "after a success", False: "after a failure"}[use.tip.success]
    compared = {"gain": use.gain, "with": use.shown_return, "without": use.other_return}
    return use.tip._asdict() | compared | {"outcome": outcome}


def _episodes(run: Run, texts: dict[int, str]) -> list[dict[str, Any]]:
    """Return some of the run's recorded episodes, with the texts of the tips that they were shown."""
    records = read_lines(run.folder / EPISODES_FILE)
    chosen = sorted({round(number * (len(records) - 1) / (_EPISODES - 1)) for number in range(_EPISODES)})
    return [
        {
            **record,
            "task": json.dumps(record["task"], ensure_ascii=False),
            "tips": [texts.get(tip, f"tip {tip}, which is no longer stored") for tip in record["tips"]],
            "counts": {
                kind: sum(tokens for of, _, tokens in record["spans"] if of == kind)
                for kind in sorted({span[0] for span in record["spans"]})
            },
        }
        for record in (records[number] for number in chosen if records)
    ]


def _interval_text(interval: Interval) -> str:
    mean, low, high = interval
    return f"{mean:.4g}" if low != low else f"{mean:.4g} ± {high - mean:.3g}"
