"""Train a critic by implicit Q-learning (arXiv 2110.06169) on the rollouts that a run has kept, as Retrospex does.

python -m empo2.recipe.baselines.retrospex.train runs/NAME --output runs/critic.pt
"""

import argparse
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from empo2.memory import EmbedderError, SentenceEmbedder
from empo2.recipe.baselines.retrospex.reranking import READS, network, smaller, task_of
from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import Empo2Error
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.messages import spoken
from empo2.recipe.rollout_log import read_calls, read_rollouts
from empo2.recipe.run_folder import CONFIG_FILE, ROLLOUTS

EXPECTILE, DISCOUNT = 0.7, 0.99  # of V's loss, of later rewards [retrospex]
_TARGET_RATE, _RATE = 0.005, 3e-4  # of the target networks' average [retrospex], of Adam [IQL; retrospex: 1e-4]
_BATCH = 128  # transitions [retrospex]

type Episode = tuple[float, Sequence[tuple[str, str, str]]]  # scaled return; task, state and action of each turn


class Transitions(NamedTuple):
    """Steps of episodes, those of one side by side, [n, ...]: the state after row i is that of row i + 1."""

    situations: torch.Tensor  # embeddings of task and state, [n, 2 * dimension]
    actions: torch.Tensor  # [n, dimension]
    rewards: torch.Tensor  # [n]
    last: torch.Tensor  # of an episode, [n]


def episodes_of(run: Path, settings: Settings) -> list[Episode]:
    """Return the training rollouts of a run that saw no tips, each with its return, scaled to -1..1."""
    largest = max(abs(settings.algorithm.success_return), abs(settings.algorithm.failure_return))
    reader, limit, episodes = StateReader(settings.memory), settings.memory.state_characters, []
    for rollout in read_rollouts(run / ROLLOUTS):
        of_policy = (rollout.phase, rollout.mode, rollout.dropped) == ("training", "no memory", None)
        if of_policy and rollout.return_ is not None:
            calls = [call for call in read_calls(run / ROLLOUTS, rollout.id) if call["reply"]]
            task = task_of(each for call in calls for each in call["messages"])[:limit]
            turns = [(task, reader.of_chat(call["messages"]), spoken(call["reply"])[:limit]) for call in calls]
            episodes += [(rollout.return_ / largest, turns)] if turns else []
    return episodes


def transitions_of(
    episodes: Sequence[Episode], embed: Callable[[Sequence[str]], np.ndarray], *, spread: bool
) -> Transitions:
    """Return the steps of episodes; the return is the last one's reward, or with ``spread`` an equal part of each's."""
    texts = {text: None for _, turns in episodes for turn in turns for text in turn}
    keys = dict(zip(texts, torch.from_numpy(embed([*texts])), strict=True))
    situations, actions, rewards, last = [], [], [], []
    for return_, turns in episodes:
        situations += [torch.cat([keys[task], keys[state]]) for task, state, _ in turns]
        actions += [keys[action] for *_, action in turns]
        before = len(turns) - 1
        rewards += [return_ / len(turns)] * len(turns) if spread else [0.0] * before + [return_]
        last += [False] * before + [True]
    return Transitions(torch.stack(situations), torch.stack(actions), torch.tensor(rewards), torch.tensor(last))


def expectile_loss(differences: torch.Tensor, expectile: float) -> torch.Tensor:
    """Return the mean of |τ - 1(u < 0)| u² (equation 5 of IQL)."""
    return ((expectile - (differences < 0).float()).abs() * differences**2).mean()


def train(data: Transitions, updates: int, *, seed: int) -> tuple[Any, Any]:
    """Return the twin target Q networks and V; equal data and seeds give equal ones.

    V(s) is the expectile of the target Q(s, a) over the actions in the data, Q(s, a) learns r + DISCOUNT V(s').
    """
    torch.set_num_threads(1)  # more are not faster with such small matrices
    torch.manual_seed(seed)
    inputs = torch.cat([data.situations, data.actions], dim=1)
    twins, v = torch.nn.ModuleList([network(inputs.shape[1]) for _ in range(2)]), network(data.situations.shape[1])
    target = deepcopy(twins)
    adam = torch.optim.Adam([*twins.parameters(), *v.parameters()], lr=_RATE)
    for _ in range(updates):
        rows = torch.randint(len(data.last), (_BATCH,))
        with torch.no_grad():
            following = v(data.situations[(rows + 1) % len(data.last)])[:, 0]
            goal = data.rewards[rows] + DISCOUNT * ~data.last[rows] * following
            wanted = smaller(target, inputs[rows])
        loss = expectile_loss(wanted - v(data.situations[rows])[:, 0], EXPECTILE)
        loss = loss + sum(((q(inputs[rows])[:, 0] - goal) ** 2).mean() for q in twins)
        adam.zero_grad()
        loss.backward()
        adam.step()
        with torch.no_grad():
            for weight, learned in zip(target.parameters(), twins.parameters(), strict=True):
                weight.lerp_(learned, _TARGET_RATE)
    return target, v


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m empo2.recipe.baselines.retrospex.train")
    parser.add_argument("run", type=Path, help="whose training rollouts without tips are learned from")
    parser.add_argument("--output", type=Path, default=Path("critic.pt"))
    parser.add_argument("--updates", type=int, default=20_000, help=f"of {_BATCH} transitions each")
    parser.add_argument("--spread", action="store_true", help="each step earns an equal part of the return (WebShop's)")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="secrets that the run's settings lack")
    options = parser.parse_intermixed_args()
    try:
        settings = load_settings(overrides=options.settings, file=options.run / CONFIG_FILE)
        episodes, embedder = episodes_of(options.run, settings), SentenceEmbedder(settings.memory.embedder)
    except (Empo2Error, EmbedderError) as error:
        raise SystemExit(f"error: {error}") from None
    if not episodes:
        raise SystemExit(f"{options.run}: has kept no training rollouts without tips; run.keep_rollouts=all keeps them")
    data = transitions_of(episodes, embedder.embed, spread=options.spread)
    twins, _ = train(data, options.updates, seed=settings.algorithm.seed)
    values = smaller(twins, torch.cat([data.situations, data.actions], dim=1)).detach()
    reads = {name: getattr(settings.memory, name) for name in READS}
    torch.save({"reads": reads, "q": twins.state_dict()}, options.output)
    learned = f"{len(episodes)} episodes, {len(values)} actions, Q {values.min():.2f} to {values.max():.2f}"
    print(f"critic  {options.output}: {learned}")


if __name__ == "__main__":
    main()
