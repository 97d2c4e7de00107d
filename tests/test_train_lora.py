"""The whole stack, real: a LoRA is trained, vLLM samples with it, a run goes on with it, and it is exported."""

import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from empo2.recipe.launcher.models import resolve_model

from .test_train import CLI, _environment, metrics_of

pytestmark = [pytest.mark.stack, pytest.mark.timeout(1500)]

RANK, ALPHA = 8, 32


def empo2(folder: Path, *arguments: str) -> None:
    done = subprocess.run(
        [*CLI, *arguments], cwd=folder, env=_environment(), capture_output=True, text=True, timeout=700
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_lora_is_trained_and_vllm_samples_with_it(tmp_path: Path) -> None:
    settings = [
        "run.name=test",
        "run.resume=auto",
        "run.save_every=1",
        "run.validate_first=false",
        f"model.lora_rank={RANK}",
        f"model.lora_alpha={ALPHA}",
        "agent.class=stack_agent:PacedAgent",
        "agent.env={NAME: input.name, PACE: fast, METRICS: ''}",
        "tasks.source=stack_agent:paces",
        "algorithm.name=grpo",
        "algorithm.learning_rate=3e-3",  # far from the base model in one step
        "algorithm.kl_coefficient=0.001",  # measures how far
        "algorithm.return_tolerance=0",
        "algorithm.tasks_per_step=3",
        "algorithm.rollouts_per_task=2",
    ]
    train = ["train", "--profile", "cpu", *settings]
    empo2(tmp_path, *train, "run.steps=2")
    empo2(tmp_path, *train, "run.steps=3")  # from the checkpoint
    run = tmp_path / "runs" / "test"
    first, second, third = metrics_of(run)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # a LoRA begins as nothing
    assert first["actor/grad_norm"] > 0
    for metrics in (second, third):
        assert metrics["actor/kl_loss"] > 0.05  # between the policy and the base model, on the policy's replies
        assert metrics["rollout_corr/log_ppl_abs_diff"] < 0.05  # between the policy and vLLM
    exported = tmp_path / "exported"
    empo2(tmp_path, "export", str(run), "--output", str(exported))
    (shard,) = (run / "checkpoints" / "global_step_3" / "actor").glob("model_world_size_1_rank_0.pt")
    trained = {
        name.removeprefix("base_model.model."): weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        for name, weight in torch.load(shard, weights_only=False).items()
    }
    name = "model.layers.10.mlp.down_proj"
    base = load_file(Path(resolve_model("smollm2-135m-instruct")) / "model.safetensors")[f"{name}.weight"]
    assert torch.equal(trained[f"{name}.base_layer.weight"].bfloat16(), base)
    learned = ALPHA / RANK * trained[f"{name}.lora_B.default.weight"] @ trained[f"{name}.lora_A.default.weight"]
    found = load_file(exported / "model.safetensors")[f"{name}.weight"]
    assert (found != base).float().mean() > 0.05  # many changes are smaller than bfloat16 tells apart
    torch.testing.assert_close(found, (base.float() + learned).bfloat16(), atol=1e-4, rtol=0.016)
