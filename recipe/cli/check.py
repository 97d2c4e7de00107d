"""``empo2 check``."""

import contextlib
import shutil
from typing import Annotated

import typer

from empo2.recipe.cli.options import SettingsOptions, with_options
from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher.processes import ending_descendants
from empo2.recipe.preflight import estimate
from empo2.recipe.preflight.estimate import CARDS, GIB, Card, Shape, Terms
from empo2.recipe.preflight.machine import cpu_memory
from empo2.recipe.preflight.machine_checks import memory_parts
from empo2.recipe.preflight.start import Start

EXAMPLES = """\b
examples:
  empo2 check --profile gpu
  empo2 check --profile gpu-1 --gpu l40s-48 model.lora_rank=64
"""


@with_options
def check(
    options: SettingsOptions,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Pretend GPUs: h200-141, h100-80, a100-80, a100-40, l40s-48, rtx4090-24."),
    ] = None,
) -> None:
    """Say whether a training fits this machine and its GPUs, and how long a step takes, before anything starts.

    Makes the checks of `empo2 train`, which only warns of estimates: imports the agent, loads the tasks, reads
    nvidia-smi. An agent of your own is started until its first call, for the length of its prompt.
    What it says of memory and time is estimated. Exits with 2 if a setting is wrong, with 1 if the machine cannot.
    """
    from empo2.recipe.preflight.checks import MACHINE, PROMPT, SETTINGS, look

    if gpu is not None and gpu not in CARDS:
        raise ConfigError(f"--gpu {gpu}: is unknown; there are {', '.join(CARDS)}")
    start = Start(options.settings(), pretended=CARDS[gpu] if gpu is not None else None)
    with ending_descendants():  # such as a world that lists its tasks
        parts = {"settings": look(start, {**SETTINGS, **PROMPT}), "machine": look(start, MACHINE)}
    wrong: list[str] = []
    for part, found in parts.items():
        print(part)
        for each in found:
            verdict = "ok" if not each.fix else "warns" if each.weight == "advice" else "WRONG"
            if gpu is not None and each.weight == "estimate":  # only the machine with these GPUs could be asked
                verdict = "needs"
            print(f"  {verdict:7}{each.name:14} {each.said if verdict == 'needs' else each.text}")
            wrong += [part] if verdict == "WRONG" else []
    with contextlib.suppress(ConfigError):  # a line above
        _show_estimate(start)
        if shutil.which("sbatch"):
            _show_slurm(start)
    raise typer.Exit(2 if "settings" in wrong else 1 if wrong else 0)


def _show_estimate(start: Start) -> None:
    settings = start.settings
    if start.shape is None:
        print(f"\nmodel.path={settings.model.path}: its size is unknown, so that memory and time are not estimated")
    elif settings.hardware.device == "cpu":
        _show_processes(settings, start.shape)
    elif start.card is not None:
        _show_gpus(settings, start.shape, start.card)


def _show_slurm(start: Start) -> None:
    """Say what a job needs by the estimate: memory with a fifth in reserve; the time is the least."""
    settings, card = start.settings, start.card
    wanted = sum(memory_parts(settings, start.shape).values())
    hardware, memory = settings.hardware, f"{1.2 * wanted / GIB:.0f}G"
    asked = [f"--nodes={hardware.nodes} --gpus-per-node={hardware.gpus_per_node} --mem={memory}"]
    if card and start.shape is not None and (step := estimate.step_time(settings, start.shape, card)) is not None:
        minutes = settings.run.steps * (step.generation + step.update) / 60
        asked.append(f"--time={minutes:.0f}  # minutes, at the least")
    print(f"\nSlurm, estimated: sbatch {' '.join(asked)}")


def _gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def _show_processes(settings: Settings, shape: Shape) -> None:
    terms = cpu_memory(settings, shape)
    print(f"\nGiB of main memory at the longest row, estimated; {shape.parameters / 1e6:.0f} million parameters")
    for name, size in {**terms, "sum": sum(terms.values())}.items():
        print(f"  {name:30}{_gib(size):>8}")


def _show_gpus(settings: Settings, shape: Shape, card: Card) -> None:
    phases, limit = estimate.phases(settings, shape, card), card.usable
    gpus = settings.hardware.gpus
    print(f"\nGiB of each GPU of {gpus}, estimated; {shape.parameters / 1e9:.2f} billion parameters")
    print(f"  {'':30}" + "".join(f"{name:>14}" for name in phases))
    for name in dict.fromkeys(name for terms in phases.values() for name in terms):
        print(f"  {name:30}" + "".join(_cell(terms, name) for terms in phases.values()).rstrip())
    sums = [sum(terms.values()) for terms in phases.values()]
    room = estimate.sequences(settings, shape, card)
    fitting = [size <= limit and (name != "generation" or room >= 1) for name, size in zip(phases, sums, strict=True)]
    print(f"  {'sum (* its largest part)':30}" + "".join(f"{_gib(size):>14}" for size in sums))
    label = f"of {_gib(limit)} (95 % of {_gib(card.memory)}{f' - {_gib(card.taken)}' if card.taken > GIB else ''})"
    print(f"  {label:30}" + "".join(f"{'fits' if good else 'TOO LARGE':>14}" for good in fitting))
    held = f"{max(0, room):.0f} sequences of {settings.model.max_context_tokens:,} tokens"
    print(f"  The cache of each vLLM holds {held}.")
    if not all(fitting):
        print("change one of:" + "".join(f"\n  {each}" for each in estimate.remedies(settings, shape, card)[:4]))
    _show_step(settings, shape, card)


def _cell(terms: Terms, name: str) -> str:
    mark = "* " if name == max(terms, key=terms.__getitem__) else ""
    return f"{mark + _gib(terms[name]) if terms.get(name) else '':>14}"


def _show_step(settings: Settings, shape: Shape, card: Card) -> None:
    step = estimate.step_time(settings, shape, card)
    if step is None:
        print(f"\na step: the speed of {card.name} is unknown")
        return
    algorithm, first, turn = settings.algorithm, estimate.FIRST_PROMPT, estimate.TURN
    fewer = {"updates_per_step": max(1, algorithm.updates_per_step // 4)}  # four times the rows an update
    changed = settings.model_copy(update={"algorithm": algorithm.model_copy(update=fewer)})
    even = estimate.step_time(changed, shape, card)
    episodes = f"{algorithm.tasks_per_step * algorithm.rollouts_per_task} episodes of {estimate.TURNS} turns"
    prompts = f"a first prompt of {first} tokens, {turn} a turn"
    print("\na step, estimated by roofline; environments, embeddings and communication take no time")
    print(f"  assumed     {episodes}, {estimate.REPLY} tokens a reply, {prompts}")
    print(f"  tokens      {step.read:,} read and trained, {step.sampled:,} sampled")
    print(f"  generation  {step.generation:.0f} s")
    updates = algorithm.updates_per_step * algorithm.update_epochs
    print(f"  update      {step.update:.0f} s, {updates} optimizer steps")
    if even is not None and even.update < step.update:
        wait = f"of it {step.update - even.update:.0f} s wait for the longest row"
        print(f"              {wait}; algorithm.updates_per_step={fewer['updates_per_step']}: {even.update:.0f} s")
    hours = settings.run.steps * (step.generation + step.update) / 3600
    print(f"  training    {hours:.1f} hours at the least, {settings.run.steps} steps")
