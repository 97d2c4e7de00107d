"""``empo2 demo``."""

from pathlib import Path
from typing import Annotated

import typer

from empo2.recipe.config import Settings, load_settings, read_layer

_WORLD = Path(__file__).parents[2] / "agents/houses"


def demo(
    directory: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the run's folder is made.")] = Path("runs"),
    run: Annotated[Path | None, typer.Option(metavar="RUN", help="Tell the story of a finished run again.")] = None,
) -> None:
    """Train the small model on two houses that it has never seen, and show what its notes are worth.

    Some ten minutes on two cores, without a GPU: EMPO² with vLLM, verl and the gateway, as on a big machine.
    """
    from rich.console import Console

    from empo2.recipe.evaluation.demo_story import tell
    from empo2.recipe.launcher.launch import launch

    if run is None:
        run = launch(demo_settings(directory), "demo", Console())
    print(tell(run))


def demo_settings(directory: Path) -> Settings:
    """Return the demo's settings, whose run is made in a folder of ``directory``."""
    layer = read_layer(_WORLD / "demo.yaml")
    run = {**layer["run"], "directory": str(directory)}
    return load_settings("cpu", file=_WORLD / "coin.yaml", layer={**layer, "run": run})
