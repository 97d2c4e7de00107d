"""Are notes still followed? Forward passes alone, for each checkpoint of a run, in houses that it was not trained on.

    .venv/bin/python experiments/probe.py runs/learning/empo2-1 [--level hard] [--houses 16] [--output FILE]

In every state on a house's true way, reached by this way, the policy is asked for the way's next action: with the true
note in the prompt, as agent and gateway make it, and without it. A line of JSON for the start and for each checkpoint
has, `with_note` and `without_note`:

- `action`: the probability of the action at temperature 1, mean over the states; `way`: of all actions of a way, mean
  over the houses;
- `entropy` of the policy and `start_kl`, KL(policy || start's weights), nats per token of the action: mean.

All is deterministic. Merging a checkpoint's weights leaves a folder of 0.3 GB in it.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from empo2.agents.houses.agent import SYSTEM
from empo2.agents.houses.games import COIN_COLLECTOR
from empo2.agents.houses.house import TAKE, House, room_text
from empo2.memory.cpu import fast_dtype
from empo2.recipe.files.checkpoints import merged
from empo2.recipe.files.models import NOTES, resolve_model
from empo2.recipe.gateway.tips.injection import Block, ChatRequest, EpisodeTips
from empo2.recipe.run_folder import CHECKPOINTS, complete_checkpoints, step_of
from empo2.recipe.tip_block import render_tips
from empo2.small_model.evaluate import true_note
from empo2.small_model.houses import LEVEL_SEEDS
from empo2.small_model.levels import first
from empo2.small_model.notes import way_to


@dataclass(frozen=True)
class Walk:
    """A true way as one chat in tokens, and where its actions lie in it.

    Attributes:
        ids: of the whole chat.
        places: of each action, the places of its tokens and of the end of its turn.
    """

    ids: list[int]
    places: list[range]


def walk(house: House, note: str | None, tokenizer: Any) -> Walk:
    """Return a house's true way as the policy would play it, with a note from the first turn on or without.

    Raises:
        ValueError: the chat template does not only append.
    """
    way = way_to(house.doors, house.start, house.coin)
    turns = [*((room, f"move {direction}") for room, direction in way), (house.coin, TAKE)]
    tips, messages = EpisodeTips(), [{"role": "system", "content": SYSTEM}]
    ids, places = list[int](), list[range]()
    for room, action in turns:
        here = room_text(room, house.doors[room], room == house.coin)
        messages.append({"role": "user", "content": here if ids else f"{COIN_COLLECTOR.task}\n\n{here}"})
        request = ChatRequest(tips, messages)
        request.put(Block(render_tips([note])) if note and not ids else Block())
        chat = request.fields["messages"]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        if prompt[: len(ids)] != ids:
            raise ValueError("the chat template rewrites earlier turns, so that a chat is more than one sequence")
        reply = [*tokenizer(action, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = [*prompt, *reply]
        places.append(range(len(prompt), len(ids)))
        messages.append({"role": "assistant", "content": action})
    return Walk(ids, places)


@torch.no_grad()
def log_probs(model: Any, walk: Walk) -> torch.Tensor:
    """Return the distribution from which each token of the actions comes, [tokens, vocabulary]."""
    before = torch.tensor([place - 1 for places in walk.places for place in places])
    logits = model(torch.tensor([walk.ids]), logits_to_keep=before).logits[0]
    return logits.float().log_softmax(-1)


def probe(model: Any, walks: Sequence[Walk], start: Sequence[torch.Tensor]) -> dict[str, float]:
    """Return `action`, `way`, `entropy` and `start_kl`, see above.

    Args:
        start: the start's `log_probs` of the same walks.
    """
    actions, ways, entropies, kls = [], [], [], []
    for each, begin in zip(walks, start, strict=True):
        found = log_probs(model, each)
        chances = found.exp()
        entropies += (-(chances * found).sum(-1)).tolist()
        kls += (chances * (found - begin)).sum(-1).tolist()
        said = torch.tensor([each.ids[place] for places in each.places for place in places])
        of_tokens = found.gather(-1, said.unsqueeze(-1))[:, 0]
        of_actions = torch.stack([part.sum() for part in of_tokens.split([len(places) for places in each.places])])
        actions += of_actions.exp().tolist()
        ways.append(float(of_actions.sum().exp()))
    values = {"action": actions, "way": ways, "entropy": entropies, "start_kl": kls}
    return {name: round(sum(each) / len(each), 6) for name, each in values.items()}


def curve(checkpoints: Sequence[Path], start: str, houses: Sequence[House]) -> Iterator[dict[str, Any]]:
    """Yield a line for the start, as step 0, and for each checkpoint.

    Args:
        start: `model.path` of the run.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_model(start)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    notes = {"with_note": [true_note(house) for house in houses], "without_note": [None for _ in houses]}
    walks = {
        kind: [walk(house, note, tokenizer) for house, note in zip(houses, of_kind, strict=True)]
        for kind, of_kind in notes.items()
    }
    starts: dict[str, list[torch.Tensor]] = {}
    for checkpoint in (None, *checkpoints):
        begun = time.perf_counter()
        source = merged(checkpoint) if checkpoint else folder
        model = AutoModelForCausalLM.from_pretrained(source, dtype=fast_dtype()).eval()
        if checkpoint is None:
            starts = {kind: [log_probs(model, each) for each in of_kind] for kind, of_kind in walks.items()}
        line: dict[str, Any] = {"step": step_of(checkpoint) if checkpoint else 0}
        line |= {kind: probe(model, of_kind, starts[kind]) for kind, of_kind in walks.items()}
        states = sum(len(each.places) for each in walks["with_note"])
        yield line | {"houses": len(houses), "states": states, "seconds": round(time.perf_counter() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("--start", default=NOTES, help="the model that the run began with")
    parser.add_argument("--level", choices=COIN_COLLECTOR.levels, default="hard")
    parser.add_argument("--houses", type=int, default=16)
    parser.add_argument("--output", type=Path, help="a file for the lines")
    arguments = parser.parse_args()
    checkpoints = sorted(complete_checkpoints(arguments.run / CHECKPOINTS), key=step_of)
    if not checkpoints:
        raise SystemExit(f"{arguments.run}: no checkpoint; run.save_every makes them, run.keep_checkpoints keeps them")
    houses = first(LEVEL_SEEDS, arguments.level, arguments.houses)
    lines = []
    for line in curve(checkpoints, arguments.start, houses):
        lines.append(json.dumps(line))
        print(lines[-1], flush=True)
    if arguments.output:
        arguments.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
