"""The order of `make test`, and the tests that `make test-fast` leaves out beside those marked `stack`."""

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

hypothesis.settings.register_profile("default", deadline=None)  # two workers on two cores: any example may have to wait
hypothesis.settings.load_profile("default")

HERE = Path(__file__).parent
WHOLE_STACK = {f"{HERE.name}/{file.name}" for file in HERE.glob("test_*.py") if "pytest.mark.stack" in file.read_text()}
WHOLE_STACK.add(f"{HERE.name}/recipe/test_tokens.py")  # starts a vLLM, for which there is no room beside a training

# Files, or tests of a file: seconds each, for what they start (frameworks, verl, embedder, servers) or wait for.
SLOW = (
    "agents/test_command.py::test_at_the_time_limit_the_whole_tree_is_ended",
    "agents/test_houses.py",
    "agents/webshop/test_generated.py",
    "memory/test_embedder.py",
    "memory/test_kill.py",
    "recipe/test_check.py::test_the_proof_for_gpus_runs_on_a_cpu_and_names_the_part_that_fails",
    "recipe/test_check.py::test_vllm_accepts_the_profiles",
    "recipe/test_compat.py",
    "recipe/test_engine.py",
    "recipe/test_evaluation.py::test_adaptation_writes_tips_and_reads_them",
    "recipe/test_evaluation.py::test_evaluation_goes_on_where_it_stopped",
    "recipe/test_frameworks.py",
    "recipe/test_gateway.py::test_the_real_controller_plays_many_agents_at_once",
    "recipe/test_gateway_budget.py::test_an_episode_with_ten_tips_of_100_words_fits_the_default_profile",
    "recipe/test_gateway_guard.py::test_rollouts_that_nobody_deletes_are_dropped_and_counted",
    "recipe/test_launcher.py::test_a_run_tells_its_causes_when_they_appear_and_counts_them_at_its_end",
    "recipe/test_models.py",
    "recipe/test_published.py",
    "recipe/test_ranks.py",
    "recipe/test_script.py::test_one_changed_import_is_enough",
    "recipe/test_sweep.py::test_neither_a_failed_run_nor_an_interruption_loses_what_was_trained",
    "recipe/test_tool_calls.py::test_without_tools_the_template_is_the_models_own",
    "recipe/test_traces.py::test_a_collector_that_does_not_take_spans_costs_spans_alone",
    "recipe/test_traces.py::test_spans_of_a_langgraph_agent_and_ours_are_one_tree",
    "small_model/test_batch.py",
    "small_model/test_rows.py",
    "test_cluster.py",
    "test_command_line.py",
    "test_docs.py",
    "test_init_command.py",
    "test_learning.py",
    "test_wheel.py",
)


def pytest_configure() -> None:
    for name in SLOW:
        file, _, test = name.partition("::")
        if not (HERE / file).exists() or f"def {test}" not in (HERE / file).read_text():
            raise pytest.UsageError(f"SLOW in tests/conftest.py names tests/{name}, which does not exist")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        file = item.path.relative_to(HERE).as_posix()
        if not {file, f"{file}::{item.name.partition('[')[0]}"}.isdisjoint(SLOW):
            item.add_marker("slow")
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
