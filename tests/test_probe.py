"""The probe of a checkpoint against plain numpy, and what it says of the small model."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import probe

from empo2.agents.houses.house import House
from empo2.recipe.launcher.model_files import NOTES, SMOLLM2, resolve_model

HOUSE = House("hall", "den", {"hall": {"east": "study"}, "study": {"west": "hall", "north": "den"}, "den": {}})
OTHER = House("den", "attic", {"den": {"west": "attic", "south": "study"}, "attic": {"east": "den"}, "study": {}})
WIDE = {"hall": {"north": "attic", "east": "study", "south": "cellar", "west": "porch"}}
WIDE |= {"study": {"north": "den", "east": "balcony", "south": "pantry", "west": "hall"}}
WIDE |= {room: {} for room in ("attic", "cellar", "porch", "den", "balcony", "pantry")}
NOTE = "Coin in the den: hall move east, study move north, den take coin."
ACTIONS = ("move east", "move north", "take coin")
TURNS = (  # as agent and gateway make them of this house
    "<|im_start|>system\nReply with one action: move north, move east, move south, move west or take coin.<|im_end|>\n"
    "<|im_start|>user\nNotes from earlier episodes of this task (each may be wrong):\n"
    f"- {NOTE}\n\nFind the coin and take it.\n\nYou are in the hall. East: study.<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\nYou are in the study. North: den. West: hall.<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\nYou are in the den. You see a coin.<|im_end|>\n<|im_start|>assistant\n",
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(resolve_model(SMOLLM2))


def tiny(seed: int) -> Any:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    return LlamaForCausalLM(LlamaConfig(vocab_size=49152, initializer_range=0.4, **sizes)).eval()


def in_numpy(models: Sequence[Any], walks: Sequence[probe.Walk]) -> dict[str, float]:
    """A forward pass for each action alone, and sums over the vocabulary in float64."""
    actions, ways, entropies, kls = [], [], [], []
    for walk in walks:
        way = 1.0
        for places in walk.places:
            with torch.no_grad():
                both = [m(torch.tensor([walk.ids[: places.stop]])).logits[0].double().numpy() for m in models]
            action = 1.0
            for place in places:
                p, q = (np.exp(each[place - 1]) / np.exp(each[place - 1]).sum() for each in both)
                action *= p[walk.ids[place]]
                entropies.append(-(p * np.log(p)).sum())
                kls.append((p * np.log(p / q)).sum())
            actions.append(action)
            way *= action
        ways.append(way)
    values = {"action": actions, "way": ways, "entropy": entropies, "start_kl": kls}
    return {name: float(np.mean(each)) for name, each in values.items()}


def test_prompts_are_those_of_agent_and_gateway(tokenizer: Any) -> None:
    end = tokenizer.eos_token
    for note, first in (
        (NOTE, TURNS[0]),
        (None, TURNS[0].replace(TURNS[0][TURNS[0].index("Notes") :].split("Find")[0], "")),
    ):
        walk = probe.walk(HOUSE, note, tokenizer)
        turns = [first, *TURNS[1:]]
        text = "".join(f"{turn}{action}{end}" for turn, action in zip(turns, ACTIONS, strict=True))
        assert tokenizer.decode(walk.ids) == text
        assert [tokenizer.decode(walk.ids[p.start : p.stop]) for p in walk.places] == [f"{a}{end}" for a in ACTIONS]
    assert probe.true_note(HOUSE) == NOTE


def test_numbers_in_numpy(tokenizer: Any) -> None:
    start, model = tiny(0), tiny(1)
    walks = [probe.walk(HOUSE, NOTE, tokenizer), probe.walk(OTHER, None, tokenizer)]
    found = probe.probe(model, walks, [probe.log_probs(start, walk) for walk in walks])
    want = in_numpy((model, start), walks)
    assert found["start_kl"] > 0.1 and found["entropy"] > 0.1
    assert found == pytest.approx(want, rel=1e-4, abs=1e-6)  # rounded to six digits
    assert probe.probe(start, walks, [probe.log_probs(start, walk) for walk in walks])["start_kl"] == 0


def test_the_small_model_follows_a_true_note(tokenizer: Any) -> None:
    """Of two rooms with four doors each a true note names the right one."""
    (line,) = probe.curve([], NOTES, [House("hall", "balcony", WIDE), House("hall", "pantry", WIDE)])
    assert line["step"] == 0 and (line["houses"], line["states"]) == (2, 6)
    assert line["with_note"]["start_kl"] == line["without_note"]["start_kl"] == 0
    assert line["with_note"]["way"] > 0.5 > line["without_note"]["way"]
    assert json.loads(json.dumps(line)) == line
