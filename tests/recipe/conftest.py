"""The gateway, empty and quiet."""

import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from agentlightning.server.app import create_app

from empo2.recipe.cli import main
from empo2.recipe.controller.warm_agents import AGENT_CLASS

from .harness import KEY, STORES, GatewayUnderTest, as_trainer, running_gateway
from .model_server import MODEL, serving


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
def empty_stores() -> Iterator[None]:
    """agent-lightning's stores belong to the process, and tests of other files may have left something in them."""
    for store in STORES:
        store.clear()
    yield
    for store in STORES:
        store.clear()


@pytest.fixture
def no_fork_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No fork server before the test, and none after it, as when the process that started it has ended."""

    def stop() -> None:
        servers: Any = (forkserver._forkserver, resource_tracker._resource_tracker)  # type: ignore[attr-defined]
        for server in servers:
            with contextlib.suppress(ChildProcessError):  # a launcher in this process has ended all that it started
                server._stop()
        forkserver._forkserver._forkserver_pid = None  # type: ignore[attr-defined]

    stop()
    monkeypatch.setenv(AGENT_CLASS, "")  # which is set while the test runs
    yield
    stop()


@pytest.fixture
def offline_wandb(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A wandb with a process of its own: that of a test before may have ended."""
    import wandb

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture
async def gateway(quiet: None, empty_stores: None, tmp_path: Path) -> AsyncIterator[GatewayUnderTest]:
    async with running_gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def plain(quiet: None, empty_stores: None) -> AsyncIterator[httpx.AsyncClient]:
    temperatures = {"train": {"temperature": 1.0}, "val": {"temperature": 0.4}}
    proxy = {"model_name": MODEL, "include_log_probs": True, **temperatures}
    with serving(create_app({"key": KEY, "default_proxy": proxy})) as url:
        async with as_trainer(url) as client:
            yield client


@pytest.fixture
def empo2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    """A command in this process and an empty folder, profile cpu; what it prints and its errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("COLUMNS", "120")
    mask = os.umask(0o077)

    def run(*arguments: str, code: int = 0) -> tuple[str, str]:
        ended = main([*arguments, "--profile", "cpu"])
        printed = capfd.readouterr()
        assert ended == code, printed
        return printed.out, printed.err

    yield run
    os.umask(mask)
