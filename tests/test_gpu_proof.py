"""`make gpu-proof` on the CPU: its parts, and the whole stack, whose memory `empo2 check` has estimated."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from empo2.recipe.preflight.estimate import GIB, SHAPES
from gpu_proof import runs
from gpu_proof.__main__ import main
from gpu_proof.parts import Part

from .processes import until

ROOT = Path(__file__).parents[1]


# Minutes by itself. CI runs it after `make test`; `make test-all` does, too.
@pytest.mark.stack
@pytest.mark.rare
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("tier", "parts"),
    [
        ("parts", ["log-probs", "loss", "sharing", "model", "embedder"]),
        (
            "stack",
            ["steps", "tips", "weights", "checkpoint", "weights, resumed", "memory", "LoRA", "distillation", "seconds"],
        ),
    ],
)
def test_every_part_of_a_tier_passes(tier: str, parts: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gpu_proof", tier, "--device", "cpu", "--runs", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["PASS"]), done.stdout + done.stderr
    told = (line.partition(": ") for line in done.stderr.splitlines())
    assert [name for name, _, found in told if found in ("pass", "FAIL")] == parts  # beside what torch says


def test_a_step_without_a_finite_gradient_and_a_run_without_steps_fail_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"empo2/off_policy_fraction": 0.5, "empo2/tips_injected_per_call": 1.0}
    (steps, tips) = runs._trained([step, step])
    assert not steps.passed and "gradient norms 0.00, 0.00" in steps.found and tips.passed
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    parts = [*runs.learning(tmp_path, gpu=False, steps=50)]
    assert [(part.name, part.passed) for part in parts] == [("grpo", False), ("empo2", False), ("report", False)]


def test_a_run_that_replays_nothing_fails_in_the_table() -> None:
    step = {"empo2/distilled_rows": 2.0, "empo2/replayed_rows": 0.0, "empo2/distillation_kl": 0.25}
    again = step | {"empo2/replayed_rows": 2.0}
    steps = [[step, again], [step, step], [step, again | {"empo2/distilled_rows": 0.0}], [step], []]
    assert [runs.distillation(each).passed for each in steps] == [True, False, False, False, False]
    assert runs.distillation([step, again]).found == "rows 2, 2, replayed 0, 2, KL 0.25, 0.25 nats a token"


def test_what_was_found_is_told_before_a_tier_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stack(*_: object, **__: object) -> Iterator[Part]:
        yield Part("tips", "0.00 [per] call", "shown")
        assert "tips: pass\n  0.00 [per] call; needed: shown\n" in capsys.readouterr().err
        raise KeyError("prompt_length/max")

    monkeypatch.setattr(runs, "stack", stack)
    monkeypatch.setattr(sys, "argv", ["gpu_proof", "stack", "--device", "cpu"])
    with pytest.raises(SystemExit, match="True"):
        main()
    out, err = capsys.readouterr()
    assert "KeyError" in err and "0.00 [per] call" in out and out.endswith("FAIL: stack\n")


def test_a_training_that_hangs_is_ended_and_says_what_it_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = "import time; print('the weights are pushed', flush=True); time.sleep(1000)"
    monkeypatch.setattr(runs, "_CLI", [sys.executable, "-c", hangs])
    monkeypatch.setattr(runs, "_TRAINING_SECONDS", 5)
    with pytest.raises(SystemExit, match=r"(?s)the weights are pushed.*longer than 5 s"):
        runs._train([], gpu=False)


def test_samples_of_a_card_go_on_after_nvidia_smi_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = ["[N/A]\n", subprocess.TimeoutExpired("nvidia-smi", 10), "2048\n"]

    def run(words: list[str], **_: object) -> SimpleNamespace:
        assert "--id=3" in words
        answer = answers.pop(0) if answers else "1024\n"
        if isinstance(answer, Exception):
            raise answer
        return SimpleNamespace(stdout=answer)

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(subprocess, "run", run)
    with runs.following(0, gpu=True) as samples:
        until(lambda: len(samples) > 1)
    assert samples[:2] == [2 * GIB, GIB]
    assert not runs.sleep([]).passed and "nvidia-smi" in runs.sleep([]).found


def test_memory_that_was_freed_before_it_was_sampled_counts() -> None:
    code = "held = b'x' * (300 << 20); del held; print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        assert 300 << 20 < runs.tree_memory(process.pid) < 350 << 20
        process.communicate(b"\n")


@pytest.mark.parametrize(
    ("samples", "passed"),
    [
        ([1, 5, 60, 62, 20, 61, 20, 60, 3, 0], True),  # 20 while it sleeps; 3 and 0 once it has ended
        ([1, 5, 60, 62, 50, 61, 50, 60, 3, 0], False),  # it does not sleep: only its end is low
        ([], False),
    ],
)
def test_memory_after_the_end_of_vllm_is_no_sleep(samples: list[float], passed: bool) -> None:
    assert runs.sleep([sample * GIB for sample in samples]).passed == passed


def test_a_gpu_peak_of_twice_its_estimate_fails() -> None:
    settings = runs.settings_of(["--config", str(runs.HOUSES), *runs.SIZES[True], *runs.STACK])
    shape = SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]
    # A push of the small model takes more than an update: float32 weights and AdamW, the bucket, the largest tensor.
    estimated = 12 * shape.parameters + 2 * GIB + 6 * shape.embedding
    found = {}
    for times in (0.5, 1, 2):
        peak = times * estimated / GIB
        steps = [{"prompt_length/max": 40, "response_length/max": 960, "actor/perf/max_memory_allocated_gb": peak}]
        found[times] = runs.memory(settings, [], steps, gpu=True)
    assert [part.passed for part in found.values()] == [False, True, False], found
