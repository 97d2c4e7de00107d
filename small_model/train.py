"""Supervised training of the LoRA: loss on replies alone, logits at their positions alone, two one-thread workers."""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from empo2.memory.cpu import fast_dtype
from empo2.small_model.notes import COIN, NO_COIN
from empo2.small_model.rows import Message

WORKERS = 2  # two processes of one thread each are faster than one of two, and do not spin on a busy machine
ACTION_WEIGHT = 4.0  # of an action's tokens in the loss; a note's have 1
STATE = "training.pt"  # while it lasts: how far it is, and what the optimizer holds
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True)
class Settings:
    """rank, alpha: of the LoRA, on all linear layers of the blocks from `first_layer` on; batch: rows an update.

    save_every: updates after which a training that is ended can go on.
    """

    seed: int = 0
    rank: int = 16
    alpha: int = 32
    first_layer: int = 4
    batch: int = 8
    learning_rate: float = 1e-3
    warmup: float = 0.05  # share of the updates
    gradient_norm: float = 1.0
    save_every: int = 10


@dataclass(frozen=True)
class Encoded:
    """A row as tokens; `learned` are the positions of the tokens that the model is to say, `weights` their share."""

    ids: list[int]
    learned: list[int]
    weights: list[float]


def encode(messages: Sequence[Message], tokenizer: Any) -> Encoded:
    """Return a chat as tokens; learned are those that the model generates in it: a reply and the end of its turn.

    An action decides more than a word of a note does, and has two tokens to a note's forty: it weighs more.
    """
    chat = [{"role": message.role, "content": message.content} for message in messages]

    def render(count: int, answer_next: bool = False) -> list[int]:
        return tokenizer.apply_chat_template(chat[:count], add_generation_prompt=answer_next, return_dict=False)

    learned: list[int] = []
    weights: list[float] = []
    for index, message in enumerate(messages):
        if message.learned:
            begin, end = len(render(index, answer_next=True)), len(render(index + 1))
            tokens = range(begin, end - 1)  # the template's newline after the end of a turn is not generated
            learned += tokens
            weights += [1.0 if message.content.startswith((COIN, NO_COIN)) else ACTION_WEIGHT] * len(tokens)
    return Encoded(render(len(messages)), learned, weights)


def train(
    base: Path,
    rows: Sequence[Encoded],
    settings: Settings,
    output: Path,
    start: Path | None = None,
    workers: int = WORKERS,
) -> None:
    """Train on the rows in order, once each, and write `adapter_model.safetensors` and `adapter_config.json`.

    A training that was ended goes on where it was, in the same folder with the same rows and as many of them.

    Args:
        start: a folder with the LoRA to go on with; None: a fresh one.
        workers: processes of one thread each.
    """
    os.environ["GOMP_SPINCOUNT"] = "0"
    output.mkdir(parents=True, exist_ok=True)
    meeting = output.resolve() / f".meeting-{os.getpid()}"
    try:
        mp.spawn(_worker, (workers, base, rows, settings, output, start, meeting), nprocs=workers)  # pyright: ignore[reportPrivateImportUsage]
        (output / STATE).unlink()
    finally:
        meeting.unlink(missing_ok=True)


def lora(base: Path, settings: Settings, start: Path | None = None) -> Any:
    """Return the base model, as this CPU computes it fast, with a fresh LoRA, or with that of a folder."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(base, dtype=fast_dtype(), attn_implementation="sdpa")
    if start is not None:
        return PeftModel.from_pretrained(model, start, is_trainable=True, autocast_adapter_dtype=False)
    config = LoraConfig(
        task_type="CAUSAL_LM",
        r=settings.rank,
        lora_alpha=settings.alpha,
        target_modules=MODULES,
        layers_to_transform=list(range(settings.first_layer, model.config.num_hidden_layers)),
    )
    return get_peft_model(model, config, autocast_adapter_dtype=False)


def reply_loss(model: Any, row: Encoded) -> torch.Tensor:
    """Return the weighted sum of the learned tokens' negative log-probabilities; `model` is the one below the LoRA."""
    ids, learned = torch.tensor(row.ids), torch.tensor(row.learned)
    hidden = model.model(input_ids=ids[None]).last_hidden_state[0, learned - 1]
    losses = torch.nn.functional.cross_entropy(model.lm_head(hidden).float(), ids[learned], reduction="none")
    return losses @ torch.tensor(row.weights)


def _worker(
    rank: int,
    workers: int,
    base: Path,
    rows: Sequence[Encoded],
    settings: Settings,
    output: Path,
    start: Path | None,
    meeting: Path,
) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=workers)
    peft_model = lora(base, settings, start)
    model = peft_model.get_base_model()
    weights = [weight for weight in peft_model.parameters() if weight.requires_grad]
    masters = [weight.detach().float().clone() for weight in weights]  # bfloat16 would lose small updates
    optimizer = torch.optim.AdamW(masters, lr=settings.learning_rate, weight_decay=0.0, betas=(0.9, 0.99))
    updates, done = len(rows) // settings.batch, 0
    if (output / STATE).exists() and (state := torch.load(output / STATE))["of"] == updates:
        done = state["updates"]
        optimizer.load_state_dict(state["optimizer"])
        with torch.no_grad():
            for weight, master, saved in zip(weights, masters, state["masters"], strict=True):
                master.copy_(saved)
                weight.copy_(saved)
    dist.barrier()  # before anyone writes it anew
    started, tokens = time.monotonic(), 0
    parent = os.getppid()
    for update in range(done, updates):
        if os.getppid() != parent:  # the command was killed
            raise SystemExit(1)
        batch = sorted(
            rows[update * settings.batch : (update + 1) * settings.batch], key=lambda row: len(row.ids), reverse=True
        )
        share = sum(sum(row.weights) for row in batch)
        loss = torch.zeros(())
        for row in batch[rank::workers]:
            part = reply_loss(model, row) / share
            part.backward()
            loss += part.detach()
        tokens += sum(len(row.ids) for row in batch)
        gradients = torch.cat([_gradient(weight).flatten() for weight in weights] + [loss[None]])
        dist.all_reduce(gradients)
        gradients, loss = gradients[:-1], gradients[-1]
        norm = gradients.norm()
        gradients *= min(1.0, settings.gradient_norm / (norm.item() + 1e-6))
        for master, part in zip(masters, gradients.split([master.numel() for master in masters]), strict=True):
            master.grad = part.view_as(master)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * _schedule(update, updates, settings.warmup)
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(weights, masters, strict=True):
                weight.copy_(master)
                weight.grad = None
        if rank == 0 and (update % 5 == 0 or update == updates - 1):
            seconds = time.monotonic() - started
            line = {"update": update, "of": updates, "loss": round(loss.item(), 4), "norm": round(norm.item(), 3)}
            print(json.dumps({**line, "tokens": tokens, "seconds": round(seconds)}), flush=True)
        if rank == 0 and ((update + 1) % settings.save_every == 0 or update == updates - 1):
            _save(peft_model, output)
            held = {"optimizer": optimizer.state_dict(), "masters": masters}
            state = {"updates": update + 1, "of": updates, **held}
            torch.save(state, output / f"{STATE}.new")
            (output / f"{STATE}.new").replace(output / STATE)
    dist.barrier()
    dist.destroy_process_group()


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    return weight.grad.float() if weight.grad is not None else torch.zeros_like(weight, dtype=torch.float32)


def _schedule(update: int, updates: int, warmup: float) -> float:
    """Up from 0 over the warm-up, then down to 0 in a line."""
    rise = max(1, round(warmup * updates))
    return min((update + 1) / rise, (updates - update) / max(updates - rise, 1), 1.0)


def _save(peft_model: Any, output: Path) -> None:
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    state = {name: weight.bfloat16().contiguous() for name, weight in get_peft_model_state_dict(peft_model).items()}
    save_file(state, output / "adapter_model.safetensors", metadata={"format": "pt"})
    config = peft_model.peft_config["default"]
    config.base_model_name_or_path = "smollm2-135m-instruct"
    config.inference_mode = True
    config.save_pretrained(output)
