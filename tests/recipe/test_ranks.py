"""Two ranks of verl's FSDP2 engine, on gloo, train the same step as one: the loss of whole groups, dealt over ranks."""

import subprocess
from pathlib import Path
from typing import Any

from .engine_parts import command

RUN = """
import sys
from pathlib import Path

import numpy as np
import torch
from agentlightning.verl.per_rollout_loss import PER_ROLLOUT_MEAN_LOSS_MODE
from engine_parts import FP32, make, save_llama
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

from empo2.recipe.trainer.objective import hybrid_loss
from empo2.recipe.trainer.updates import planned_batch

UPDATES = 2
folder = sys.argv[1]
if not Path(folder, "config.json").exists():  # one rank comes first
    save_llama(folder, vocab_size=97)
engine = make(folder, optimizer=dict(lr=0.01), mixed_precision=FP32)
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

# Three groups of 4, 3 and 4 rollouts, of which one has two rows; prompts of 2 to 6 tokens, replies of 3 to 8.
torch.manual_seed(0)
groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 5
rollouts = [*map(str, range(11)), "10"]
rows, prompt, reply = len(groups), 6, 8
attention = torch.zeros(rows, prompt + reply, dtype=torch.long)
mask = torch.zeros(rows, reply, dtype=torch.long)
for row in range(rows):
    own, length = 2 + row % 5, 3 + (5 * row) % 6
    attention[row, prompt - own : prompt + length] = 1
    mask[row, :length] = 1
    mask[row, 1] = row % 2  # an observation in every second row
ids = torch.randint(97, (rows, prompt + reply))
tokens = {name: sum(int(mask[i].sum()) for i in range(rows) if rollouts[i] == name) for name in rollouts}
advantage = torch.randn(rows)[[rollouts.index(name) for name in rollouts]]
share = torch.tensor([1 / (tokens[name] * rows) for name in rollouts])  # agent-lightning's per_rollout_mean
off_policy = torch.tensor([group == "b" for group in groups])
tensors = {
    "input_ids": ids, "prompts": ids[:, :prompt], "responses": ids[:, prompt:], "attention_mask": attention,
    "position_ids": (attention.cumsum(1) - 1).clamp(min=0), "response_mask": mask,
    "old_log_probs": torch.full((rows, reply), -4.6) + 0.3 * torch.randn(rows, reply),
    "advantages": (advantage * share).unsqueeze(1) * mask, "off_policy": off_policy, "memory": off_policy,
    "distilled": torch.zeros(rows, dtype=torch.bool),
    "first_index": torch.arange(rows) * reply, "row": torch.arange(rows),
}
names = {"data_id_list": np.array(groups), "rollout_id_list": np.array(rollouts)}
batch = DataProto.from_dict(tensors=tensors, non_tensors=names)
planned, size = planned_batch(batch, updates=UPDATES, ranks=ranks, micro_batch=1)
assert len(planned) == UPDATES * size
part = planned.chunk(ranks)[rank]  # as verl's dispatch

config = FSDPActorConfig(
    strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=1, ppo_mini_batch_size=1, clip_ratio_low=0.2,
    clip_ratio_high=0.3, clip_ratio_c=10.0, policy_loss=PolicyLossConfig(loss_mode=PER_ROLLOUT_MEAN_LOSS_MODE),
)
seen, gradients = {}, []


def loss(model_output, data, dp_group=None):
    log_prob = no_padding_2_padding(model_output["log_probs"], data).detach()
    for name, weight, own, values in zip(data["row"], data["token_weight"], data["response_mask"], log_prob):
        if weight > 0:
            seen.setdefault(int(name), []).append((values * own).tolist())
    return hybrid_loss(config, model_output, data, dp_group, mask_threshold=0.005)


for part in part.chunk(UPDATES):
    data = left_right_2_no_padding(part.to_tensordict())
    tu.assign_non_tensor(data, use_remove_padding=False, use_fused_kernels=False, use_dynamic_bsz=False,
                         micro_batch_size_per_gpu=1, max_response_length=reply, temperature=1.0,
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
    assert set(both[0]["seen"]) | set(both[1]["seen"]) == set(alone["seen"]) == set(range(12))
    assert min(len(rank["seen"]) for rank in both) >= 5
    for rank in both:
        for row, log_probs in rank["seen"].items():
            torch.testing.assert_close(torch.tensor(log_probs), torch.tensor(alone["seen"][row]), atol=1e-5, rtol=1e-5)
        for mine, one in zip(rank["gradients"], alone["gradients"], strict=True):
            assert float(one.abs().max()) > 1e-3
            torch.testing.assert_close(mine, one, atol=1e-6, rtol=1e-4)
        torch.testing.assert_close(rank["weights"], alone["weights"], atol=1e-5, rtol=1e-4)
