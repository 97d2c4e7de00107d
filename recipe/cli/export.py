"""``empo2 export``."""

import os
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
examples:
  empo2 export runs/demo
  empo2 export runs/demo --step 4 --memory --output models/demo
"""


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
    from empo2.recipe.files.checkpoints import find_checkpoint, run_of
    from empo2.recipe.files.export import export_checkpoint
    from empo2.recipe.run_folder import step_of

    os.umask(0o077)  # weights and tips are for their owner only
    checkpoint = find_checkpoint(run, step)
    origin = run_of(checkpoint)
    target = output or origin.with_name(f"{origin.name}-step-{step_of(checkpoint)}")
    export_checkpoint(checkpoint, target, memory=memory)
    print(f"model  {target}\nserve  empo2 serve {target}")
