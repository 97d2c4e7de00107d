"""examples/first_run.ipynb, run as a user runs it."""

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pyarrow.parquet as pq
import pytest
from nbclient import NotebookClient

from empo2.recipe.rollout_log import rollout_files

from .stack import metrics_of

# Minutes by itself. CI runs it after `make test`; `make test-all` does, too.
pytestmark = [pytest.mark.stack, pytest.mark.rare, pytest.mark.timeout(3600)]

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the notebook makes its folder; tmp_path would be too long for the sockets of Ray and vLLM."""
    with TemporaryDirectory() as name:
        monkeypatch.setenv("TMPDIR", name)
        yield Path(name)


def test_the_notebook_trains_and_shows_what_happened(folder: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(EXAMPLES / "first_run.ipynb", as_version=4)
    resources = {"metadata": {"path": str(EXAMPLES)}}
    client = NotebookClient(notebook, timeout=3000, coalesce_streams=True, record_timing=False, resources=resources)
    client.execute()
    nbformat.write(notebook, tmp_path / "first_run.ipynb")  # to be committed, without this machine's paths
    (run,) = folder.glob("*/runs/quiz")
    assert [line["step"] for line in metrics_of(run)][-1] == 2
    files = rollout_files(run / "rollouts")
    played = ["000-validation", "001-training", "001-validation", "002-training", "002-validation"]
    assert [file.stem[3:-3] for file in files] == played
    trained = [row for row in pq.read_table(files[3]).to_pylist() if any(row["trained"] or ())]
    assert {row["mode"] for row in trained} == {"memory, off-policy"} and any(row["tips"] for row in trained)
    said = "".join(each.get("text", "") for cell in notebook.cells for each in cell.get("outputs", ()))
    for words in ("can be trained", "step 2/2", " MB in ", "turn 1", "Notes from earlier episodes", " search_memory "):
        assert words in said, words
