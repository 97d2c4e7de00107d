"""The tiers `stack` and `learning` of gpu_proof: trainings through the whole stack, judged by what they left."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from empo2.recipe.config import Settings, load_settings
from empo2.recipe.errors import Empo2Error
from empo2.recipe.preflight import estimate, machine
from empo2.recipe.preflight.estimate import GIB
from empo2.recipe.run_folder import MEMORY_FILE, checkpoint_folder, is_complete, read_metrics

from .parts import Part, sharing

ROOT = Path(__file__).parents[1]
HOUSES = ROOT / "agents/houses/coin.yaml"
AGREEMENT = 0.05  # nats, mean over rows
ESTIMATE = 0.2  # share by which a peak may differ from its estimate
_CLI = [sys.executable, "-m", "empo2.recipe.cli"]
_TRAINING_SECONDS, _ENDING_SECONDS = 1800, 120
_NVIDIA_SMI_SECONDS = 10  # it hangs where a card has failed
_POLL_SECONDS = 3  # reading the memory of 30 processes takes a fifth of a second of a core
_WHERE = ("rollouts", "drain", "embedding", "old_log_prob", "update_actor", "update_weights", "save_checkpoint")
STACK = (
    "run.resume=auto",
    "run.save_every=1",
    "run.keep_checkpoints=1",
    "run.validate_every=0",
    "run.validate_first=false",
    "algorithm.mode_per=group",
    "algorithm.memory_probability=1",
    "algorithm.off_policy_probability=0.5",
    "algorithm.seed=42",  # one off-policy group in each of the first three steps: both updates have on-policy rows
    "algorithm.tasks_per_step=4",
    "algorithm.rollouts_per_task=4",
    "algorithm.updates_per_step=2",
    "algorithm.learning_rate=1e-4",
    "algorithm.return_tolerance=0",
    "tasks.args={level: easy, train_houses: 4, unseen_houses: 1}",
)
INTERNALISE = (
    "algorithm.form=internalise",
    "algorithm.off_policy_loss=distillation",  # which needs more of both engines than imitation
    "algorithm.failure_return=-100",
    "algorithm.success_return=0",  # so that each rollout is a success, which is distilled, stored and replayed
)
SIZES = {
    # Row by row, as in the profiles for GPUs: rows of unequal length in one micro-batch never get the flash kernel.
    True: (
        *("--profile", "gpu-1", "model.max_context_tokens=4096"),
        *("hardware.max_sequences=32", "hardware.micro_batch=1"),
    ),
    False: ("--profile", "cpu", "hardware.kv_cache=1"),
}


@dataclass
class Training:
    """What a command left: its output, its peak in bytes (of the card, or of main memory), the seconds it took."""

    output: str
    seconds: float
    peak: float
    samples: list[float] = field(default_factory=list)

    @property
    def start(self) -> float:
        """Seconds until the first rollout."""
        found = re.search(r"first rollout (\d+) s", self.output)
        return float(found[1]) if found else self.seconds


def stack(folder: Path, *, gpu: bool) -> Iterator[Part]:
    """Train two steps, go on for a third, and train a LoRA by the form `internalise`; yield after each what it shows.

    Raises:
        SystemExit: a training failed.
    """
    if gpu:
        shares = sharing(torch.device("cuda"))
        yield shares
        if not shares.passed:
            return
    shutil.rmtree(folder, ignore_errors=True)
    arguments = ["--config", str(HOUSES), *SIZES[gpu], *STACK, f"run.directory={folder}"]
    full = [*arguments, "run.name=full"]
    of_rank = ("model.lora_rank=8", "model.lora_alpha=32", "algorithm.learning_rate=1e-3")
    lora = [*arguments, "run.name=lora", *of_rank, *INTERNALISE]
    begun = _train([*full, "run.steps=2"], gpu)
    steps = read_metrics(folder / "full")
    yield from _trained(steps)
    yield agreement("weights", steps[1:])
    if gpu:
        yield sleep(begun.samples)

    resumed = _train([*full, "run.steps=3"], gpu)
    steps = read_metrics(folder / "full")
    checkpoint = checkpoint_folder(folder / "full/checkpoints", 3)
    went_on = len(steps) == 3 and "resume after step 2," in resumed.output
    kept = is_complete(checkpoint) and (checkpoint / MEMORY_FILE).exists()
    said = f"{'went on after step 2' if went_on else 'began anew'}; {'weights and memory' if kept else 'nothing'} kept"
    yield Part("checkpoint", said, "goes on; both kept", went_on and kept)
    yield agreement("weights, resumed", steps[2:])
    yield memory(settings_of(full), [begun, resumed], steps, gpu=gpu)

    of_lora = _train([*lora, "run.steps=2"], gpu)
    lora_steps = read_metrics(folder / "lora")
    yield agreement("LoRA", lora_steps[1:])
    yield distillation(lora_steps)
    yield spent_seconds([begun, resumed, of_lora], [*steps, *lora_steps])


def _trained(steps: Sequence[dict[str, Any]]) -> Iterator[Part]:
    norms = [step.get("actor/grad_norm", 0.0) for step in steps]  # one that is not finite is not kept
    off_policy = [step["empo2/off_policy_fraction"] for step in steps]
    found = f"{len(steps)}, gradient norms {_list(norms)}, off-policy {_list(off_policy)}"
    both = all(0 < share < 1 for share in off_policy)
    yield Part("steps", found, "2, gradients, both updates", len(steps) == 2 and max(norms, default=0) > 0 and both)
    shown = [step["empo2/tips_injected_per_call"] for step in steps]
    yield Part("tips", f"{_list(shown)} a call", "shown from step 2 on", min(shown[1:], default=0) > 0)


def distillation(steps: Sequence[dict[str, Any]]) -> Part:
    """Return whether each step distilled rows, and each but the first replayed some as well."""
    own, replayed, kl = (
        [step.get(f"empo2/{name}", 0.0) for step in steps]
        for name in ("distilled_rows", "replayed_rows", "distillation_kl")  # a number that is not finite is not kept
    )
    found = f"rows {_list(own, 0)}, replayed {_list(replayed, 0)}, KL {_list(kl)} nats a token"
    passed = len(steps) > 1 and min(own) > 0 and min(replayed[1:]) > 0 and max(kl) > 0
    return Part("distillation", found, "rows, from step 2 on old ones, and a KL", passed)


def agreement(name: str, steps: Sequence[dict[str, Any]]) -> Part:
    # A step has none if its first update is off-policy.
    gaps = [step["rollout_corr/log_ppl_abs_diff"] for step in steps if "rollout_corr/log_ppl_abs_diff" in step]
    found = f"mean log-probs {_list(gaps, 4)} nats apart" if gaps else "no step"
    return Part(name, found, f"{AGREEMENT}", bool(gaps) and max(gaps) < AGREEMENT)


def sleep(samples: Sequence[float]) -> Part:
    """Compare the card's memory while vLLM is awake, and between two such times: before and after, it has none."""
    if not samples:
        return Part("sleep", "nvidia-smi gave nothing", "falls by a third", False)
    awake = max(samples)
    full = [at for at, sample in enumerate(samples) if sample > 0.9 * awake]
    asleep = min(samples[full[0] : full[-1] + 1]) if full else 0
    found = f"{awake / GIB:.1f} GiB in use, at the least {asleep / GIB:.1f}"
    return Part("sleep", found, "falls by a third", 0 < asleep < awake * 2 / 3)


def memory(settings: Settings, trainings: Sequence[Training], steps: Sequence[dict[str, Any]], *, gpu: bool) -> Part:
    """Compare the peak with the estimate at the longest row that was trained.

    On a GPU it is the trainer's in an update or a weight push, by PyTorch's allocator, which verl never resets: the
    card's own is what vLLM was told to take.
    """
    row = int(max(step["prompt_length/max"] + step["response_length/max"] for step in steps))
    prompt = min(row - 1, settings.model.max_prompt_tokens)
    sizes = {"max_prompt_tokens": prompt, "max_episode_tokens": row - prompt}
    settings = settings.model_copy(update={"model": settings.model.model_copy(update=sizes)})
    shape = machine.find_shape(settings)
    assert shape is not None
    if gpu:
        phases = (estimate.update_memory(settings, shape), estimate.push_memory(settings, shape))
        others = ("vLLM", "CUDA context")
        expected = max(sum(size for name, size in terms.items() if not name.startswith(others)) for terms in phases)
        peak = max(step["actor/perf/max_memory_allocated_gb"] for step in steps) * GIB
    else:
        expected = sum(machine.cpu_memory(settings, shape).values())
        peak = max(training.peak for training in trainings)
    found = f"peak {peak / GIB:.1f} GiB, estimated {expected / GIB:.1f} for rows of {row} tokens"
    return Part("memory", found, f"{ESTIMATE:.0%} apart at most", abs(peak - expected) < expected * ESTIMATE)


def spent_seconds(trainings: Sequence[Training], steps: Sequence[dict[str, Any]]) -> Part:
    spent: Counter[str] = Counter({f"{len(trainings)} starts": round(sum(training.start for training in trainings))})
    for step in steps:
        spent.update({name: step.get(f"timing_s/{name}") or 0 for name in _WHERE})
    total = sum(training.seconds for training in trainings)
    return Part("seconds", f"{total:.0f}: {', '.join(f'{name} {seconds:.0f}' for name, seconds in spent.items())}")


def learning(folder: Path, *, gpu: bool, steps: int) -> Iterator[Part]:
    """Train GRPO and EMPO² one after the other, or go on; yield their curves."""
    settings = [f"run.steps={steps}", "tasks.args.names=[find-living-thing]"]
    command = ["sweep", str(ROOT / "gpu_proof/learning.yaml"), "--output", str(folder)]
    subprocess.run([*_CLI, *command, "--profile", "gpu-1" if gpu else "cpu", *settings], check=False)
    for arm in ("grpo", "empo2"):
        rows: Sequence[dict[str, Any]] = []
        with suppress(Empo2Error):  # it has ended before its first step
            rows = read_metrics(folder / f"{arm}-1")
        yield curve(arm, rows, steps, rises=arm == "empo2" and gpu)
    page = folder / "report.html"
    yield Part("report", str(page) if page.exists() else "none", "a page", page.exists())


def curve(arm: str, rows: Sequence[dict[str, Any]], steps: int, *, rises: bool) -> Part:
    """Return what a run's metrics say of its validations and its cost.

    Args:
        rises: whether the last validation must be above the first.
    """
    points = [(row["step"], row["val/return"]) for row in rows if row.get("val/return") is not None]
    hours = sum(row.get("timing_s/step") or 0 for row in rows) / 3600
    said = ", ".join(f"{value:.0f} at {step}" for step, value in points) or "no validation"
    ended = bool(rows) and rows[-1]["step"] >= steps
    passed = ended and (not rises or (len(points) > 1 and points[-1][1] > points[0][1]))
    needed = f"{steps} steps{', rises' if rises else ''}"
    return Part(arm, f"return {said}; {hours:.1f} hours", needed, passed)


def _list(values: Sequence[float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def settings_of(arguments: Sequence[str]) -> Settings:
    given = list(arguments)
    file, profile = (given.pop(given.index(option) + 1) for option in ("--config", "--profile"))
    return load_settings(profile, [each for each in given if not each.startswith("--")], file=Path(file))


def _train(arguments: Sequence[str], gpu: bool) -> Training:
    """Run `empo2 train` and follow its memory.

    Raises:
        SystemExit: it failed, or took longer than half an hour; the message is the end of what it printed.
    """
    begin, late = time.monotonic(), ""
    with (
        subprocess.Popen(
            [*_CLI, "train", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process,
        following(process.pid, gpu) as samples,
    ):
        try:
            output = process.communicate(timeout=_TRAINING_SECONDS)[0]
        except subprocess.TimeoutExpired:
            late = f"it took longer than {_TRAINING_SECONDS} s\n"
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_ENDING_SECONDS)
            process.kill()
            output = process.communicate()[0]
    if process.returncode or late:
        raise SystemExit(f"empo2 train {' '.join(arguments)}\n{output[-3000:]}\n{late}FAIL: a training")
    return Training(output, time.monotonic() - begin, max(samples, default=0), samples)


@contextmanager
def following(pid: int, gpu: bool) -> Iterator[list[float]]:
    """Yield samples of the memory of the first visible card, or of a process and its descendants, in bytes."""
    samples: list[float] = []
    ended = threading.Event()

    def follow() -> None:
        while not ended.wait(0.2 if gpu else _POLL_SECONDS):
            with suppress(OSError, subprocess.SubprocessError, ValueError):  # nvidia-smi fails or says "[N/A]"
                samples.append(_card_memory() if gpu else tree_memory(pid))

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join(2 * _NVIDIA_SMI_SECONDS)


def _card_memory() -> float:
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    query = ["nvidia-smi", f"--id={card}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    listed = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_SECONDS).stdout
    return float(listed) * 2**20


def tree_memory(pid: int) -> float:
    """Return what the processes of a tree have had at most, in bytes: proportional set sizes, shared pages count once.

    Each process's peak is the kernel's own (VmHWM): that of the longest row passes between two samples.
    """
    total = 0
    try:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            folder = Path(f"/proc/{process.pid}")
            try:
                text = (folder / "smaps_rollup").read_text() + (folder / "status").read_text()
            except OSError:
                continue
            kib = Counter({name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)})
            total += (kib["Pss"] + kib["VmHWM"] - kib["Rss"]) * 1024
    except psutil.NoSuchProcess:
        pass
    return total
