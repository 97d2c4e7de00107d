"""Ray's start, which may run out of time on a busy machine."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray._raylet  # noqa: F401  which the Ray below has not
from omegaconf import OmegaConf

from empo2.recipe.errors import Empo2Error
from empo2.recipe.marked_lines import note_in
from empo2.recipe.trainer.ray_environment import start_ray

CONFIG = OmegaConf.create({"ray_kwargs": {"ray_init": {"num_cpus": 3}}})
LATE = Exception("The current node timed out during startup.\nThis could happen because the raylet failed.")


def ray_that(monkeypatch: pytest.MonkeyPatch, *failures: BaseException) -> list[str]:
    """Put a Ray that fails so often into the place of the real one; return what it is asked for."""
    asked: list[str] = []

    def init(**options: Any) -> None:
        assert options["num_cpus"] == 3
        asked.append("init")
        if asked.count("init") <= len(failures):
            raise failures[asked.count("init") - 1]

    ray = SimpleNamespace(init=init, shutdown=lambda: asked.append("shutdown"), is_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "ray", ray)
    return asked


def test_rays_start_is_retried_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ray_that(monkeypatch, LATE)
    start_ray(CONFIG)
    assert asked == ["init", "shutdown", "init"]
    (line,) = capsys.readouterr().out.splitlines()
    assert note_in(line) == (
        "Ray was started at the second attempt; the first one failed: Exception: The current node timed out during "
        "startup. This could happen because the raylet failed."
    )


def test_ray_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/scratch")
    asked = ray_that(monkeypatch, LATE, ConnectionError("gone"), LATE)
    with pytest.raises(Empo2Error, match="tried twice: ConnectionError: gone; look into /scratch/session_latest/logs"):
        start_ray(CONFIG)
    assert asked == ["init", "shutdown", "init"]


def test_wrong_options_are_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ray_that(monkeypatch, ValueError("no such option"))
    with pytest.raises(ValueError, match="no such option"):
        start_ray(CONFIG)
    assert asked == ["init"]
