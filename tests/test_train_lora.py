"""The whole stack, real: a LoRA is trained, loses its gateway, goes on, loses its agents, and is exported."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from .stack import base_weights, empo2, metrics_of, weights_of

# Minutes by itself. CI runs it after `make test`; `make test-all` does, too.
pytestmark = [pytest.mark.stack, pytest.mark.rare, pytest.mark.timeout(3600)]

RANK, ALPHA = 8, 32
DOWN_AFTER = 3  # steps; then every agent fails


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The run's folder, what its first command said, and what its last one said on stderr."""
    folder = tmp_path_factory.mktemp("lora")
    run = folder / "runs" / "test"
    settings = [
        "run.name=test",
        "run.resume=auto",
        "run.save_every=1",
        "run.validate_first=false",
        f"model.lora_rank={RANK}",
        f"model.lora_alpha={ALPHA}",
        "agent.class=stack_agent:TroubledAgent",
        f"agent.env={{NAME: input.name, PACE: fast, METRICS: {run / 'metrics.jsonl'}, DOWN_AFTER: '{DOWN_AFTER}'}}",
        "tasks.source=stack_agent:paces",
        "hardware.kv_cache=1",
        "algorithm.name=grpo",
        "algorithm.learning_rate=3e-3",  # far from the base model in one step
        "algorithm.kl_coefficient=0.001",  # measures how far
        "algorithm.return_tolerance=0",
        "algorithm.tasks_per_step=3",
        "algorithm.rollouts_per_task=2",
    ]
    train = ["train", "--profile", "cpu", *settings]
    said = empo2(folder, *train, "run.steps=2").stdout
    return run, said, empo2(folder, *train, f"run.steps={DOWN_AFTER + 1}", code=1).stderr


def test_a_gateway_that_dies_in_a_step_costs_an_attempt_and_not_the_run(lora: tuple[Path, str, str]) -> None:
    run, said, _ = lora
    (trainer,) = run.glob("set-aside-*/trainer.log")  # the second command's is the run's
    assert "gateway was ended by SIGKILL and was started again" in said
    assert "step 2, attempt 1 of 3: the gateway has ended and was started again" in trainer.read_text()
    assert [metrics["empo2/step_attempts"] for metrics in metrics_of(run)] == [1, 2, 1]
    assert all(metrics["empo2/rollouts_dropped"] == 0 for metrics in metrics_of(run))


def test_a_lora_is_trained_and_vllm_samples_with_it(lora: tuple[Path, str, str]) -> None:
    first, second, third = metrics_of(lora[0])
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # a LoRA begins as nothing
    assert first["actor/grad_norm"] > 0
    for metrics in (second, third):  # the third goes on from the checkpoint
        assert metrics["actor/kl_loss"] > 0.05  # between the policy and the base model, on the policy's replies
        assert metrics["rollout_corr/log_ppl_abs_diff"] < 0.05  # between the policy and vLLM


def test_agents_that_always_fail_end_the_run_with_one_clear_line(lora: tuple[Path, str, str]) -> None:
    run, _, errors = lora
    (line,) = errors.splitlines()
    assert "none of 6 rollouts can be used: 6 failed" in line
    assert "RuntimeError: the game server is down (stack_agent.py:" in line and "controller.log" in line
    assert "the game server is down" in (run / "controller.log").read_text()


def test_a_lora_is_exported_as_a_model(lora: tuple[Path, str], tmp_path: Path) -> None:
    run, *_ = lora
    empo2(tmp_path, "export", str(run), "--output", "exported")
    trained = {name.removeprefix("base_model.model."): weight for name, weight in weights_of(run, DOWN_AFTER).items()}
    name = "model.layers.10.mlp.down_proj"
    base = base_weights()[f"{name}.weight"]
    assert torch.equal(trained[f"{name}.base_layer.weight"].bfloat16(), base)
    learned = ALPHA / RANK * trained[f"{name}.lora_B.default.weight"] @ trained[f"{name}.lora_A.default.weight"]
    found = load_file(tmp_path / "exported" / "model.safetensors")[f"{name}.weight"]
    assert (found != base).float().mean() > 0.05  # many changes are smaller than bfloat16 tells apart
    torch.testing.assert_close(found.float(), base.float() + learned, atol=1e-4, rtol=0.016)
