"""Fine-tune all weights of a model on a run's successes, without the notes that they were shown.

It is the rival of reinforcement learning in experiments/deep.yaml: what the start finds, learned by heart.
"""

import json
import math
import random
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from learning_rollouts import played, succeeded
from transformers import AutoModelForCausalLM, AutoTokenizer

from empo2.recipe.tip_block import without_tips
from empo2.small_model.rows import Message
from empo2.small_model.train import Encoded, encode, reply_loss

GRADIENT_NORM = 1.0


type Chat = tuple[Message, ...]


def successes(run: Path, success_return: float) -> list[Chat]:
    """Return the chats, without blocks of tips, of the training rollouts that were used and reached a return."""
    chats = []
    for calls in chain(*played(run, "training", ["messages", "reply", "return", "dropped"]).values()):
        *_, last = calls
        if succeeded(last, success_return):
            said = [each for call in calls for each in json.loads(call["messages"])] + [json.loads(last["reply"])]
            chats.append(tuple(Message(m["role"], m["content"], m["role"] == "assistant") for m in without_tips(said)))
    return chats


def fine_tune(
    start: Path, chats: Sequence[Chat], output: Path, *, rate: float, epochs: int, updates: int, batch: int, seed: int
) -> None:
    """Write the model `start` after `epochs` over the chats, by AdamW on its replies' mean loss a token, in float32.

    A batch is `batch` chats in a random order; without any chat the model is written as it is. Where chats are so few
    that these are less than `updates`, it goes on for further epochs. Chats that are alike, as successes in one house
    mostly are, cost one pass in a batch.
    """
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(start)
    model: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32, attn_implementation="sdpa")
    rows, generator = {chat: encode(chat, tokenizer) for chat in chats}, random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    batches = math.ceil(len(chats) / batch)
    for _ in range(max(epochs, math.ceil(updates / max(batches, 1)))):
        order = generator.sample(chats, len(chats))
        for begin in range(0, len(order), batch):
            counts = Counter(order[begin : begin + batch])
            _update(model, optimizer, [(rows[chat], count) for chat, count in counts.items()])
    model.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def _update(model: torch.nn.Module, optimizer: torch.optim.Optimizer, rows: Sequence[tuple[Encoded, int]]) -> None:
    share = sum(count * sum(row.weights) for row, count in rows)
    for row, count in rows:
        (reply_loss(model, row) * (count / share)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
    optimizer.step()
    optimizer.zero_grad()
