"""Measure which text of a chat separates states best, and above which cosine two states count as one, for 1/n.

Plays real games with seeded rollouts that act at random or follow the gold path, and embeds candidate texts for the
state with the real embedder. Truth: two visits are of one state if their observations have the same words, in any
order, in the same scope.

  visits       model calls; `states` is the number of different ones
  above 0.5    pairs of different states of a scope whose cosine is above 0.5, the minimum for a tip to be shown
  twin > t     states with a different state above the threshold t, with which they are wrongly merged
  error > t    mean difference between the reward 1/n that the threshold gives and the true one, 0..1
  r world      correlation at 0.98 between the reward and 1/n of the world's own state: look and inventory, in
               WebShop the page
  reordered > t  pairs of observations with the same words in another order that count as one
  ticking > t    equal observations that end in another number of steps left, as those of other agents may, that count
                 as one
"""

import argparse
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import batched, combinations
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from shared import report, say

from empo2.agents.scienceworld.agent import Environment as ScienceWorld
from empo2.agents.scienceworld.agent import Game as ScienceWorldGame
from empo2.agents.scienceworld.tasks import Episode as ScienceWorldEpisode
from empo2.agents.text_game.agent import Message, play_chat
from empo2.agents.text_game.episode import ActionForm
from empo2.agents.text_game.game import State, TextGame
from empo2.agents.textworld_express.agent import Environment as TextWorld
from empo2.agents.textworld_express.agent import begin
from empo2.agents.textworld_express.tasks import Episode as TextWorldEpisode
from empo2.agents.webshop.agent import Environment as WebShop
from empo2.agents.webshop.agent import Game as WebShopGame
from empo2.agents.webshop.tasks import OWN, open_catalogue
from empo2.agents.webshop.tasks import Episode as WebShopEpisode
from empo2.memory import SentenceEmbedder
from empo2.recipe.config import load_settings
from empo2.recipe.gateway.tips.state import StateReader

chat_state = StateReader(load_settings().memory).of_chat
TASKS = (
    *("find-animal", "power-component", "chemistry-mix", "measure-melting-point-known-substance"),
    *("lifespan-longest-lived", "test-conductivity", "use-thermometer", "identify-life-stages-2"),
)
THRESHOLDS = (0.8, 0.85, 0.9, 0.925, 0.95, 0.96, 0.97, 0.98, 0.985, 0.99, 0.995)
SHOWN = (0.9, 0.95, 0.98, 0.99)
CHOSEN = 0.98
MIN_SIMILARITY = 0.5
INVALID_SHARE = 0.1  # share of replies without a known action, as small models write them
INVALID = ("go forward", "look at the sky", "think about the task", "pick the thing up")
TICKING = 200  # states per world
PROGRESS = Console(stderr=True)


@dataclass(frozen=True)
class Visit:
    """One model call: the chat, which the gateway sees, and the world's own state, which it does not see."""

    scope: str
    chat: list[Message]
    world_state: str

    @property
    def observation(self) -> str:
        text = self.chat[-1]["content"]
        return (text.partition("\n\n")[2] if len(self.chat) == 2 else text).partition("\n\n1 ")[0]


class Watched:
    """An environment that stores its newest state for the player."""

    state: State

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)

    def reset(self, *arguments: Any) -> State:
        self.state = self._environment.reset(*arguments)
        return self.state

    def step(self, action: str) -> State:
        self.state = self._environment.step(action)
        return self.state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two rollouts a world, 2 minutes: a smoke run")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="also draw the error over the threshold, as PNG")
    options = parser.parse_args()
    count = 1 if options.quick else 2
    rollouts = 2 if options.quick else 8
    visits = {
        "ScienceWorld": scienceworld(TASKS[:count] if options.quick else TASKS, count, rollouts, "free-text"),
        "ScienceWorld, choice": scienceworld(TASKS[:2], count, rollouts, "choice"),
        "WebShop": webshop(range(1500, 1500 + 8 * count), rollouts, "free-text"),
        "WebShop, choice": webshop(range(1500, 1500 + 8 * count), rollouts, "choice"),
        "coin": textworld("coin", 2 * count, rollouts, "free-text"),
        "coin, choice": textworld("coin", 2 * count, rollouts, "choice"),
        "cookingworld": textworld("cookingworld", 2 * count, rollouts, "free-text"),
    }
    played = {name: list(track(each, f"{name:22s}", console=PROGRESS)) for name, each in visits.items()}
    keys = embed([text(visit.chat) for text in TEXTS.values() for each in played.values() for visit in each])
    table = Table(title="States told apart by their embeddings")
    for column in "world", "text":
        table.add_column(column, no_wrap=True)
    columns = (*(f"twin > {t}" for t in SHOWN), *(f"error > {t}" for t in SHOWN))
    for column in ("visits", "states", "above 0.5", *columns, "r world"):
        table.add_column(column, justify="right")
    curves: dict[str, dict[str, list[float]]] = {}
    for name, each in played.items():
        for label, text in TEXTS.items():
            found = measure(each, text, keys)
            table.add_row(name, label, *found.cells)
            curves.setdefault(name, {})[label] = found.errors
        table.add_section()
    nearly = Table("world", "reordered", title="States that are nearly equal")
    for column in (*(f"reordered > {t}" for t in SHOWN), *(f"ticking > {t}" for t in SHOWN)):
        nearly.add_column(column, justify="right")
    for name, each in played.items():
        nearly.add_row(name, *reordered(each, keys), *ticked(each))
    report(table, [])
    report(nearly, [])
    if options.plot:
        plot(curves, options.plot)


# Candidate texts for a state


def with_task(chat: list[Message]) -> str:
    task = chat[1]["content"].partition("\n\n")[0]
    return chat_state(chat) + (f"\n{task[:400]}" if len(chat) > 2 else "")


def with_reply(chat: list[Message]) -> str:
    return (f"{chat[-2]['content']}\n" if len(chat) > 2 else "") + chat_state(chat)


def with_previous(chat: list[Message]) -> str:
    return chat_state(chat) + (f"\n{chat_state(chat[:-2])}" if len(chat) > 2 else "")


def first_paragraph(chat: list[Message]) -> str:
    return chat_state(chat).partition("\n\n")[0]


TEXTS: dict[str, Callable[[list[Message]], str]] = {
    "observation": chat_state,
    "first paragraph": first_paragraph,
    "observation, task": with_task,
    "reply, observation": with_reply,
    "observation, previous": with_previous,
}

# Games


def play(
    scope: str, watched: Watched, game: TextGame, policy: Callable[[State], str], world_state: Callable[[], str]
) -> list[Visit]:
    """Play one episode with the chat of the agents in agents/text_game."""
    visits = []

    def model(messages: list[Message]) -> str:
        visits.append(Visit(scope, list(messages), world_state()))
        return policy(watched.state)

    play_chat(game, model)
    return visits


def player(seed: str, actions: ActionForm, choices: int, gold: Sequence[str] = ()) -> Callable[[State], str]:
    """Return a rollout's player: on the gold path never, at every second step or mostly, otherwise at random."""
    generator = random.Random(seed)
    remaining, follow = list(gold), generator.choice((0.0, 0.5, 0.9))

    def act(state: State) -> str:
        if generator.random() < INVALID_SHARE:
            return generator.choice(INVALID)
        if actions == "choice":
            return str(generator.randint(1, choices))
        if remaining and generator.random() < follow:
            return remaining.pop(0)
        return generator.choice(state.valid_actions)

    return act


def scienceworld(tasks: Sequence[str], variations: int, rollouts: int, actions: ActionForm) -> Iterator[Visit]:
    with ScienceWorld() as environment:
        simulator = environment._simulator
        for task in tasks:
            for variation in environment.split(task)[0][:variations]:
                simulator.load(task, variation, "easy", generateGoldPath=True)
                gold = simulator.get_gold_action_sequence()
                episode = ScienceWorldEpisode(
                    task=task,
                    variation=variation,
                    simplification="easy",
                    max_steps=30,
                    actions=actions,
                    choices=6,
                    seed=0,
                )
                for rollout in range(rollouts):
                    watched: Any = Watched(environment)
                    game = ScienceWorldGame(watched, episode)
                    policy = player(f"{episode.world} {rollout}", actions, 6, gold)
                    yield from play(
                        episode.world, watched, game, policy, lambda: simulator.look() + simulator.inventory()
                    )


def textworld(name: str, seeds: int, rollouts: int, actions: ActionForm) -> Iterator[Visit]:
    with TextWorld() as environment:
        simulator = environment._simulator

        def world_state() -> str:
            return simulator.runHistory[-1]["look"] + simulator.runHistory[-1]["inventory"]

        for seed in environment.split(name, "")[0][:seeds]:
            simulator.load(name, "")
            simulator.reset(seed=seed, gameFold="train", generateGoldPath=True)
            gold = simulator.getGoldActionSequence()
            episode = TextWorldEpisode(
                game=name, params="", fold="train", max_steps=30, actions=actions, choices=6, seed=seed
            )
            for rollout in range(rollouts):
                watched: Any = Watched(environment)
                game = begin(watched, episode)
                policy = player(f"{name} {seed} {rollout}", actions, 6, gold)
                yield from play(f"{name} {seed}", watched, game, policy, world_state)


def webshop(goals: Sequence[int], rollouts: int, actions: ActionForm) -> Iterator[Visit]:
    hits, choices = (10, 0) if actions == "free-text" else (3, 8)
    with closing(open_catalogue(OWN)) as catalogue:
        environment = WebShop(catalogue, hits)
        for goal in goals:
            episode = WebShopEpisode(
                catalogue=OWN,
                goal=goal,
                hits=hits,
                max_steps=15,
                actions=actions,
                choices=choices or 1,
                seed=0,
                option_matching="original",
            )
            for rollout in range(rollouts):
                watched: Any = Watched(environment)
                game = WebShopGame(watched, episode)
                policy = player(f"{goal} {rollout}", actions, choices)
                yield from play("own", watched, game, policy, lambda watched=watched: watched.state.observation)


# Figures


@dataclass(frozen=True)
class Found:
    cells: list[str]
    errors: list[float]  # one per threshold


def embed(texts: Sequence[str]) -> dict[str, np.ndarray]:
    say("the embedder is loaded")
    embedder, distinct = SentenceEmbedder("all-MiniLM-L6-v2"), sorted(set(texts), key=len)
    batches = list(batched(distinct, 32))
    return {
        text: key
        for batch in track(batches, "texts embedded        ", console=PROGRESS)
        for text, key in zip(batch, embedder.embed(batch), strict=True)
    }


def words(text: str) -> tuple[str, ...]:
    return tuple(sorted(re.findall(r"\w+|[^\w\s]", text.lower())))


def measure(visits: Sequence[Visit], text: Callable[[list[Message]], str], keys: dict[str, np.ndarray]) -> Found:
    """Return all figures of one world and one text."""
    scopes: defaultdict[str, list[Visit]] = defaultdict(list)
    for visit in visits:
        scopes[visit.scope].append(visit)
    states, pairs, twins, true, world = 0, [], [], [], []
    rewards: dict[float, list[float]] = {threshold: [] for threshold in THRESHOLDS}
    for each in scopes.values():
        observed = [words(visit.observation) for visit in each]
        true += rewards_of(observed)
        world += rewards_of([words(visit.world_state) for visit in each])
        cosines = (matrix := np.stack([keys[text(visit.chat)] for visit in each])) @ matrix.T
        for threshold in THRESHOLDS:
            rewards[threshold] += rewards_by_cosine(cosines, threshold)
        states += len(set(observed))
        # Each observation counts once: how often it was seen does not matter for separating states.
        rows = list({(text(visit.chat), observed[row]): row for row, visit in enumerate(each)}.values())
        numbers = np.unique([" ".join(observed[row]) for row in rows], return_inverse=True)[1]
        different, cosines = numbers[:, None] != numbers, cosines[np.ix_(rows, rows)]
        pairs.append(cosines[np.triu(different)])
        twins.append(np.where(different, cosines, -1).max(axis=1))
    pair, twin = np.concatenate(pairs), np.concatenate(twins)
    errors = [float(np.abs(np.subtract(rewards[threshold], true)).mean()) for threshold in THRESHOLDS]
    cells = [f"{len(visits):,}", f"{states:,}", f"{(pair > MIN_SIMILARITY).mean():.0%}"]
    cells += [f"{(twin > threshold).mean():.1%}" for threshold in SHOWN]
    cells += [f"{errors[THRESHOLDS.index(threshold)]:.3f}" for threshold in SHOWN]
    return Found([*cells, f"{np.corrcoef(rewards[CHOSEN], world)[0, 1]:.2f}"], errors)


def rewards_of(states: Sequence[object]) -> list[float]:
    """Return 1/n of every visit, where equal states are one."""
    seen, rewards = Counter(), []
    for state in states:
        seen[state] += 1
        rewards.append(1 / seen[state])
    return rewards


def rewards_by_cosine(cosines: np.ndarray, threshold: float) -> list[float]:
    """Return 1/n of every visit in turn, as the memory counts; `cosines` is [visits, visits]."""
    stored, counts, rewards = [], [], []
    for visit, row in enumerate(cosines):
        similar = row[stored] > threshold
        rewards.append(1 / (np.sum(counts, where=similar) + 1))
        if similar.any():
            counts[row[stored].argmax()] += 1
        else:
            stored.append(visit)
            counts.append(1)
    return rewards


def reordered(visits: Sequence[Visit], keys: dict[str, np.ndarray]) -> list[str]:
    """Return the number of pairs with equal words in another order, and the shares that count as one state."""
    alike: defaultdict[Any, set[str]] = defaultdict(set)
    for visit in visits:
        if "\n\n1 " not in visit.chat[-1]["content"]:  # a list of actions is evaluated separately
            first = len(visit.chat) == 2  # with the task
            alike[visit.scope, first, words(visit.observation)].add(chat_state(visit.chat))
    pairs = [keys[one] @ keys[other] for texts in alike.values() for one, other in combinations(sorted(texts), 2)]
    return [str(len(pairs)), *(f"{np.mean(np.array(pairs) > t):.0%}" if pairs else "" for t in SHOWN)]


def ticked(visits: Sequence[Visit]) -> list[str]:
    """Return the shares of states that count as the same when the steps left at their end go from 17 to 12."""
    texts = sorted({chat_state(visit.chat) for visit in visits})
    texts = random.Random(0).sample(texts, min(TICKING, len(texts)))
    keys = embed([f"{text}\nSteps left: {left}" for text in texts for left in (17, 12)])
    cosines = np.array([keys[f"{text}\nSteps left: 17"] @ keys[f"{text}\nSteps left: 12"] for text in texts])
    return [f"{(cosines > threshold).mean():.0%}" for threshold in SHOWN]


def plot(curves: dict[str, dict[str, list[float]]], file: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 4, figsize=(11, 5), sharex=True, sharey=True, layout="constrained")
    for axis, (name, lines) in zip(axes.flat, curves.items(), strict=False):
        for label, errors in lines.items():
            axis.plot(THRESHOLDS, errors, label=label, marker=".")
        axis.set_title(name, fontsize=10)
        axis.grid(alpha=0.3)
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(*axes.flat[0].get_legend_handles_labels(), loc="center", title="text that is embedded")
    figure.supxlabel("cosine above which two states count as one")
    figure.supylabel("mean error of the reward 1/n")
    figure.savefig(file, dpi=80)


if __name__ == "__main__":
    main()
