"""The gateway, empty and quiet."""

import logging
from collections.abc import AsyncIterator, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import httpx
import pytest
import structlog
from agentlightning.server.app import create_app

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
        forkserver._forkserver._stop()  # type: ignore[attr-defined]
        resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]

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
    """agent-lightning's own app, on the same stores."""
    temperatures = {"train": {"temperature": 1.0}, "val": {"temperature": 0.4}}
    proxy = {"model_name": MODEL, "include_log_probs": True, **temperatures}
    with serving(create_app({"key": KEY, "default_proxy": proxy})) as url:
        async with as_trainer(url) as client:
            yield client
