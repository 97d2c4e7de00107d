"""Prove on a GPU what the tests prove on a CPU: `make gpu-proof`, `make gpu-proof tier=stack`, `tier=learning`.

Tier `parts`: two minutes, one card. It needs torch, transformers and sentence-transformers, and verl for the loss.

  log-probs   log-probs, entropies and gradients of 2,100 sampled positions of Qwen2.5's vocabulary against float64
  loss        the hybrid loss of a tiny model and its gradients against those of the CPU
  peak        GPU memory of a row of 12,692 tokens with 960 sampled ones, beside the estimate and that at all positions
  attention   one row of 8,192 tokens and 28 heads over 4 of keys gets PyTorch's flash kernel; a dense mask does not
  sharing     another process writes to this one's GPU memory (CUDA IPC), through which weights come to vLLM
  model       log-probs of the small model against those of the CPU in float32
  embedder    states a second; 128 agents send 100

Tier `stack`: ten minutes, one card from 16 GB. The small model plays CoinCollector through the whole stack, if memory
can be shared as in `parts`: without that a training waits for ever.

  steps         two steps are trained, in modes with and without tips in the update
  tips          the gateway shows tips
  weights       log-probs of vLLM and trainer agree, in the second step and after the run goes on from its checkpoint
  sleep         vLLM gives its memory back while the policy is trained
  checkpoint    the run goes on after step 2, with weights and memory
  memory        the trainer's peak, in an update or a weight push, against the estimate of `empo2 check`
  LoRA          the same agreement for a LoRA of the form `internalise` after its first update
  distillation  that LoRA learns successes with tips, also stored ones
  seconds       where they went

Tier `learning`: hours, one 80 GB card. GRPO and EMPO² train Qwen2.5-1.5B for 50 steps on ScienceWorld's
find-living-thing; an interrupted proof goes on.

  grpo, empo2   the curve of validations and the hours; EMPO² must rise
  report        the page with both curves

Each line says what was found and what is needed. A part that breaks fails, and the others go on; a training that
breaks ends its tier, with what the ones before it have shown. The last line is PASS, or what failed. On the CPU
(`--device cpu`) sizes are small, and what only a GPU can show is left out. The runs are kept in runs/gpu-proof.
"""

import argparse
import sys
import traceback
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

TIERS = ("parts", "stack", "learning")


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m gpu_proof", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tier", choices=TIERS, nargs="?", default="parts")
    parser.add_argument("--device", default="cuda", help="cuda, cpu, or for the tier parts cuda:1 (default: cuda)")
    parser.add_argument("--steps", type=int, default=50, metavar="N", help="of the tier learning (default: 50)")
    parser.add_argument("--runs", type=Path, default=Path("runs/gpu-proof"), metavar="FOLDER", help="of the runs")
    options = parser.parse_args()

    import torch  # --help answers at once

    device = torch.device(options.device)
    if device.index and options.tier != "parts":
        parser.error(f"--device {options.device}: only for the tier parts; others take CUDA_VISIBLE_DEVICES")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch {torch.__version__} finds no GPU here; nvidia-smi says why")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"
    if options.tier == "parts":
        from .parts import parts

        found = parts(device)
    elif options.tier == "stack":
        from .runs import stack

        found = stack(options.runs / "stack", gpu=device.type == "cuda")
    else:
        from .runs import learning

        found = learning(options.runs / "learning", gpu=device.type == "cuda", steps=options.steps)
    table = Table(title=f"gpu-proof {options.tier} on {name}, torch {torch.__version__}")
    for column in ("part", "found", "needed", ""):
        table.add_column(column)
    failed = []
    try:
        for part in found:
            verdict = "pass" if part.passed else "FAIL"
            # At once, since a time limit may end the rest.
            print(f"{part.name}: {verdict}\n  {part.found}; needed: {part.needed or '-'}", file=sys.stderr, flush=True)
            table.add_row(part.name, escape(part.found), part.needed, verdict)
            failed += [] if part.passed else [part.name]
    except SystemExit as error:
        print(error, file=sys.stderr)
        failed.append("a training")
    except Exception:  # what a training has left cannot be read
        traceback.print_exc()
        failed.append(options.tier)
    finally:
        Console(width=None if sys.stdout.isatty() else 140).print(table)
    print(f"FAIL: {', '.join(failed)}" if failed else "PASS")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
