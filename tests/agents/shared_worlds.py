"""The official data of worlds, where they lie beside the project's folder."""

from pathlib import Path

import pytest

WORLDS = Path(__file__).parents[3] / "shared" / "worlds"


def need_world(name: str) -> Path:
    """Return the folder of a world's data; skip the test, saying why, unless it is there."""
    folder = WORLDS / name
    if not folder.is_dir():
        pytest.skip(f"needs the official tasks in {folder.relative_to(WORLDS.parents[1])}, beside the project's folder")
    return folder
