"""``empo2 demo``."""

from pathlib import Path
from typing import Annotated

import typer

DEFAULT_RUNS = Path("runs")


def demo(
    directory: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the run's folder is made.")] = DEFAULT_RUNS,
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Tell the story of a finished run again.")] = None,
) -> None:
    """Train the small model on two houses that it has never seen, and show what its notes are worth.

    Some ten minutes on two cores, without a GPU: EMPO² with vLLM, verl and the gateway, as on a big machine.
    """
    from rich.console import Console

    from empo2.recipe.config import load_settings, read_layer
    from empo2.recipe.evaluation.story import tell
    from empo2.recipe.launcher.launch import launch

    if run is None:
        world = Path(__file__).parents[2] / "agents/coin_collector"
        layer = read_layer(world / "demo.yaml")
        layer = {**layer, "run": {**layer["run"], "directory": str(directory)}}
        run = launch(load_settings("cpu", file=world / "train.yaml", layer=layer), "demo", Console())
    print(tell(run))
