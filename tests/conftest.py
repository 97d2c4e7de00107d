"""The order of `make test`, and what all tests need before anything is imported."""

import os
import signal
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before numpy: two threads would wait for the other worker's core

# A shell starts background jobs with Ctrl-C ignored, and nohup ignores SIGHUP. What the tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)  # a handler is not inherited

# Two workers on two cores: any example may have to wait, and be drawn slowly. The same ones each time: what fails is
# what was changed.
hypothesis.settings.register_profile(
    "default", derandomize=True, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("default")

HERE = Path(__file__).parent
WHOLE_STACK = {f"{HERE.name}/{file.name}" for file in HERE.glob("test_*.py") if "pytest.mark.stack" in file.read_text()}
WHOLE_STACK.add(f"{HERE.name}/recipe/test_tokens.py")  # starts a vLLM, for which there is no room beside a training


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.nodeid.partition("::")[0] not in WHOLE_STACK)


class OneTraining(LoadFileScheduling):
    """Gives each worker whole files, and one worker all trainings, with which it begins.

    Two trainings at once need more than 24 GB. The other worker needs as long for everything else.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "whole stack" if file in WHOLE_STACK else file


@pytest.hookimpl(optionalhook=True)  # pytest -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneTraining | None:
    return OneTraining(config, log) if config.getvalue("dist") == "loadfile" else None
