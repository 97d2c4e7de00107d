"""Two ranks of verl's FSDP2 engine, on gloo, train the same step as one: the loss of whole groups, dealt over ranks."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from .engine_parts import command

pytestmark = pytest.mark.slow

RUN = """
import sys
from pathlib import Path

import torch
from recipe.engine_parts import FP32, make, save_llama
from recipe.test_objective import actor_config
from recipe.test_updates import RESPONSE, batch_of, rollouts_of
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.updates import planned_batch

UPDATES = 2
folder = sys.argv[1]
if not Path(folder, "config.json").exists():  # one rank comes first
    save_llama(folder, vocab_size=512)
engine = make(folder, optimizer=dict(lr=0.01), mixed_precision=FP32)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

batch = batch_of(rollouts_of(seed=6, groups=3, split=True))
batch.batch["old_log_probs"] += -6.2 - batch.batch["old_log_probs"].mean()  # about those of a random model
planned, size = planned_batch(batch, updates=UPDATES, ranks=ranks, micro_batch=1)
assert len(planned) == UPDATES * size
part = planned.chunk(ranks)[rank]  # as verl's dispatch

config = actor_config(rollout_n=1, ppo_mini_batch_size=1)
seen, gradients = {}, []

def loss(model_output, data, dp_group=None):
    log_prob = no_padding_2_padding(model_output["log_probs"], data).detach()
    for name, weight, own, values in zip(data["row"], data["token_weight"], data["response_mask"], log_prob):
        if weight > 0:
            seen.setdefault(int(name), []).append((values * own).tolist())
    return hybrid_loss(config, model_output, data, dp_group, mask_threshold=0.002)

for part in part.chunk(UPDATES):
    data = left_right_2_no_padding(part.to_tensordict())
    tu.assign_non_tensor(data, use_remove_padding=False, use_fused_kernels=False, use_dynamic_bsz=False,
                         micro_batch_size_per_gpu=1, max_response_length=RESPONSE, temperature=1.0,
                         calculate_entropy=False, global_batch_size=size)
    with engine.train_mode(disable_auto_offload=True):
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss)
        gradients.append(torch.cat([p.grad.full_tensor().flatten() for p in engine.module.parameters()]))
        engine.optimizer_step()
weights = torch.cat([p.full_tensor().detach().flatten() for p in engine.module.parameters()])
torch.save({"gradients": gradients, "weights": weights, "seen": seen}, f"{folder}/{ranks}-{rank}.pt")
"""


def train(folder: Path, ranks: int) -> list[Any]:
    """What each rank has seen and has got."""
    import torch

    commands = [command(RUN, folder / f"rendezvous-{ranks}", folder, rank=rank, ranks=ranks) for rank in range(ranks)]
    processes = [subprocess.Popen(**each, stderr=subprocess.PIPE) for each in commands]
    for process in processes:
        _, errors = process.communicate(timeout=280)
        assert process.returncode == 0, errors[-3000:]
    return [torch.load(folder / f"{ranks}-{rank}.pt") for rank in range(ranks)]


def test_two_ranks_train_the_step_of_one(tmp_path: Path) -> None:
    import torch

    [alone] = train(tmp_path, 1)
    both = train(tmp_path, 2)
    assert not set(both[0]["seen"]) & set(both[1]["seen"])  # each row is on one rank
    assert set(both[0]["seen"]) | set(both[1]["seen"]) == set(alone["seen"]) == set(range(len(alone["seen"])))
    assert min(len(rank["seen"]) for rank in both) > len(alone["seen"]) / 3
    for rank in both:
        for row, log_probs in rank["seen"].items():
            torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(alone["seen"][row]), atol=1e-5, rtol=1e-5)
        for mine, one in zip(rank["gradients"], alone["gradients"], strict=True):
            assert float(one.abs().max()) > 1e-3
            torch.testing.assert_close(mine, one, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(rank["weights"], alone["weights"], atol=1e-5, rtol=1e-4)
