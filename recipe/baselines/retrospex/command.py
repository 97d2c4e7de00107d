"""``empo2 critic``."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from empo2.recipe.errors import ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from empo2.recipe.evaluation.turns import Episode

app = typer.Typer()

_EXAMPLES = """\b
example:
  empo2 eval Qwen/Qwen2.5-7B-Instruct --panel scienceworld-paper-seen --samples 16 --keep-turns --output runs/played
  empo2 critic runs/played --output runs/critic.npz
  empo2 eval Qwen/Qwen2.5-7B-Instruct --panel scienceworld-paper critic.path=runs/critic.npz
"""

_HELD_OUT = slice(2, None, 5)  # of the episodes by their return, so that some of the successes are among them [ours]
_EMBEDDED_AT_ONCE = 256


@app.command(epilog=_EXAMPLES)
def critic(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER", help="Results of empo2 eval with --keep-turns; may be several.")
    ],
    output: Annotated[Path, typer.Option(metavar="FILE", help="Of the critic.")] = Path("critic.npz"),
    updates: Annotated[int, typer.Option(min=1, help="Optimizer steps, of 128 transitions each.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the networks, the batches, and the episodes that are held out.")] = 0,
) -> None:
    """Train a critic of actions on episodes of one's own, for critic.path.

    Implicit Q-learning, as in Retrospex (arXiv 2505.11807), on a CPU. A fifth of the episodes is held out; the table
    shows what the critic says about their actions.
    """
    from rich.console import Console
    from rich.progress import track

    from empo2.memory import EmbedderError, SentenceEmbedder
    from empo2.recipe.baselines.retrospex.critic import FACTS, Critic
    from empo2.recipe.baselines.retrospex.training import train, transitions_of
    from empo2.recipe.evaluation.tables import show_table
    from empo2.recipe.evaluation.turns import read_turns

    os.umask(0o077)
    settings = _common_settings(folders)
    facts, success_return = {name: settings[f"memory.{name}"] for name in FACTS}, settings["algorithm.success_return"]
    episodes = [episode for folder in folders for episode in read_turns(folder)]
    if len(episodes) < 5:
        raise ConfigError(f"FOLDER {folders[0]}: {len(episodes)} episodes; a fifth is held out, so give at least five")
    output.parent.mkdir(parents=True, exist_ok=True)
    shuffled = [episodes[row] for row in np.random.default_rng(seed).permutation(len(episodes))]
    training = sorted(shuffled, key=lambda episode: episode.return_)
    testing = training[_HELD_OUT]
    del training[_HELD_OUT]
    console = Console(highlight=False)
    try:
        embedder = SentenceEmbedder(facts["embedder"])
    except EmbedderError as error:
        raise ConfigError(f"FOLDER {folders[0]}: {error}") from None

    def embed(texts: Sequence[str]) -> np.ndarray:
        starts = range(0, len(texts), _EMBEDDED_AT_ONCE)
        parts = track(starts, f"{len(texts):,} texts", console=console)
        return np.concatenate([embedder.embed(texts[start : start + _EMBEDDED_AT_ONCE]) for start in parts])

    data = transitions_of(training, success_return, embed)
    learned = train(data, track(range(updates), f"{len(data):,} actions", console=console), seed=seed)
    q, advantages = learned.judge(transitions_of(testing, success_return, embed))
    Critic(facts, learned.q).save(output)
    show_table(judgements_table(testing, success_return, q, advantages), console)
    console.print(f"critic  {output}", soft_wrap=True, markup=False)


def judgements_table(
    episodes: Sequence["Episode"], success_return: float, q: np.ndarray, advantages: np.ndarray
) -> "Table":
    """Return a table of what a critic says about the actions of episodes, those of successes apart.

    Args:
        q, advantages: Q and Q - V of each action, in the order of the episodes, [n].
    """
    from empo2.recipe.evaluation.tables import table_of

    table = table_of("held out", "episodes", "actions", "mean Q", "mean Q - V", text=["held out"])
    solved = np.array([episode.return_ >= success_return for episode in episodes])
    of_solved = np.repeat(solved, [len(episode.turns) for episode in episodes])
    for name, mask, count in (("successes", of_solved, solved.sum()), ("failures", ~of_solved, (~solved).sum())):
        means = [f"{values[mask].mean():.3f}" if mask.any() else "" for values in (q, advantages)]
        table.add_row(name, str(count), str(mask.sum()), *means)
    return table


def _common_settings(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the settings of the memory and the return of a success, by key, that all evaluations have.

    Raises:
        ConfigError: a folder is of no evaluation, or they differ.
    """
    from empo2.recipe.evaluation.episode_results import kind_of, read_facts

    found: dict[str, Any] = {}
    for folder in folders:
        if kind_of(folder) != "eval":
            raise ConfigError(f"FOLDER {folder}: holds no results of empo2 eval")
        facts = read_facts(folder)
        for section, names in (("memory", facts["memory"]), ("algorithm", ["success_return"])):
            for name in names:
                key, value = f"{section}.{name}", facts[section][name]
                if (first := found.setdefault(key, value)) != value:
                    raise ConfigError(f"FOLDER {folder}: has {key}={value!r}, {folders[0]} has {first!r}; train on one")
    return found
