"""``empo2 export``: a Hugging Face folder with weights, tokenizer, chat template, settings and a model card."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from empo2.recipe.config import read_layer
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.checkpoints import find_checkpoint, merged, run_of
from empo2.recipe.run_folder import CONFIG_FILE, MEMORY_FILE, METRICS_FILE, SETTINGS_FILE, read_metrics, step_of

EXAMPLES = """\b
examples:
  empo2 export runs/demo
  empo2 export runs/demo --step 4 --memory --output models/demo
"""
_CARD = "README.md"
_WEIGHTS = ".safetensors"
_VALIDATION = ("val/return", "val/success_rate", "val/memory_return", "val/memory_success_rate")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, or a checkpoint.")],
    output: Annotated[Path | None, typer.Option(metavar="FOLDER", help="A new one.  [default: RUN-step-N]")] = None,
    step: Annotated[int | None, typer.Option(metavar="N", help="Of the checkpoint.  [default: the last]")] = None,
    memory: Annotated[bool, typer.Option("--memory", help="Also write the memory of the step, with its tips.")] = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder.

    It has the weights, the tokenizer with its chat template, the settings (empo2.yaml) and a model card; transformers,
    vLLM, empo2 eval and empo2 serve load it.
    """
    os.umask(0o077)  # weights and tips are for their owner only
    checkpoint = find_checkpoint(run, step)
    origin = run_of(checkpoint)
    target = output or origin.with_name(f"{origin.name}-step-{step_of(checkpoint)}")
    if memory and not (checkpoint / MEMORY_FILE).is_file():
        raise ConfigError(f"--memory: {checkpoint} has none; algorithm.name=grpo trains without")
    if target.exists():
        raise ConfigError(f"--output {target}: exists; give another folder, or remove it")
    card = model_card(checkpoint, read_layer(origin / CONFIG_FILE, "RUN"), memory=memory)
    weights = merged(checkpoint)
    try:
        target.absolute().parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.absolute().parent) as scratch:
            made = Path(scratch) / target.name
            shutil.copytree(weights, made, copy_function=_link_weights)
            shutil.copy(origin / CONFIG_FILE, made / SETTINGS_FILE)
            if memory:
                shutil.copy(checkpoint / MEMORY_FILE, made)
            (made / _CARD).write_text(card)
            made.rename(target)  # atomic: the folder is complete or absent
    except OSError as error:
        raise ConfigError(f"--output {target}: cannot be written: {error.strerror}") from None
    print(f"model  {target}\nserve  empo2 serve {target}")


def model_card(checkpoint: Path, settings: Mapping[str, Any], *, memory: bool) -> str:
    """Return the text of a model card: run, step, base model and results.

    Args:
        settings: of the run, by section.
        memory: whether the step's memory lies beside it.
    """
    run, step = run_of(checkpoint), step_of(checkpoint)
    algorithm, model = settings["algorithm"], settings["model"]
    name = "EMPO²" if algorithm["name"] == "empo2" else "GRPO"
    if (advantage := algorithm.get("advantage", "grpo")) != "grpo":
        name += f" with algorithm.advantage={advantage}"
    rank = model.get("lora_rank")
    rows = {
        "run": run.name,
        "step": f"{step} of {settings['run']['steps']}",
        "base model": model["path"],
        "trained": f"{name}, {f'a LoRA of rank {rank}, merged' if rank else 'all weights'}",
        "agent": settings["agent"]["class"],
        "tasks": settings["tasks"]["source"],
    }
    if results := _results(run, step):
        rows["validation"] = results
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    files = f"All settings are in `{SETTINGS_FILE}`."
    if memory:
        files += f" `{MEMORY_FILE}` holds the tips of this step, which `empo2 serve --memory` shows."
    return (
        f"---\n{yaml.safe_dump(_metadata(model['path']), sort_keys=False)}---\n\n# {run.name}, step {step}\n\n"
        "Trained with [agent-lightning](https://github.com/microsoft/agent-lightning) and EMPO² "
        f"([arXiv 2602.23008](https://arxiv.org/abs/2602.23008)).\n\n| | |\n|---|---|\n{table}\n\n{files}\n"
    )


def _metadata(base: str) -> dict[str, Any]:
    on_the_hub = base.count("/") == 1 and not base.startswith(("/", ".", "~")) and not Path(base).exists()
    tags = ["reinforcement-learning", "agent-lightning", "empo2"]
    found = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    return found | ({"base_model": base} if on_the_hub else {}) | {"tags": tags}


def _results(run: Path, step: int) -> str:
    """Return the results of the last validation up to the step; "" if there was none."""
    if not (run / METRICS_FILE).is_file():
        return ""
    for row in reversed([row for row in read_metrics(run) if row["step"] <= step]):
        if found := [f"{name} {row[name]:.3g}" for name in _VALIDATION if name in row]:
            return f"{', '.join(found)} (step {row['step']:.0f})"
    return ""


def _link_weights(source: str, target: str) -> str:
    """Copy a file; make a hard link, which takes no room, of one of weights, which is never edited in place."""
    if source.endswith(_WEIGHTS):
        with contextlib.suppress(OSError):  # another file system, or one without hard links
            os.link(source, target)
            return target
    return shutil.copy2(source, target)
