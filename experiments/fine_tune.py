"""Fine-tune all weights of a model on a run's successes, without the notes that they were shown.

It is the rival of reinforcement learning in experiments/deep.yaml: what the start finds, learned by heart.
"""

import json
import random
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.dataset as dataset
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from empo2.recipe.rollout_log import SCHEMA, rollout_files
from empo2.recipe.tip_block import without_tips
from empo2.small_model.rows import Message
from empo2.small_model.train import Encoded, encode, reply_loss

GRADIENT_NORM = 1.0


def successes(folder: Path, success_return: float) -> list[list[Message]]:
    """Return the chats, without blocks of tips, of the training rollouts that were used and reached a return."""
    field = dataset.field
    kept = dataset.dataset([str(file) for file in rollout_files(folder)], SCHEMA, format="parquet")
    wanted = (field("phase") == "training") & (field("return") >= success_return) & field("dropped").is_null()
    rows = kept.to_table(columns=["rollout", "messages", "reply"], filter=wanted).to_pylist()
    chats = []
    for _, calls in groupby(rows, key=lambda row: row["rollout"]):
        *_, last = calls = [*calls]
        said = [each for call in calls for each in json.loads(call["messages"])] + [json.loads(last["reply"])]
        chats.append([Message(m["role"], m["content"], m["role"] == "assistant") for m in without_tips(said)])
    return chats


def fine_tune(
    start: Path, chats: Sequence[Sequence[Message]], output: Path, *, rate: float, epochs: int, batch: int, seed: int
) -> None:
    """Write the model `start` after `epochs` over the chats, by AdamW on its replies' mean loss a token, in float32.

    A batch is `batch` chats in a random order; without any chat the model is written as it is.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="sdpa")
    rows, generator = [encode(chat, tokenizer) for chat in chats], random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for _ in range(epochs):
        order = generator.sample(rows, len(rows))
        for begin in range(0, len(order), batch):
            _update(model, optimizer, order[begin : begin + batch])
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[Encoded]) -> None:
    share = sum(sum(row.weights) for row in rows)
    for row in rows:
        (reply_loss(model, row) / share).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
