"""Read the machine: its GPUs, their driver, the model's shape; neither torch, verl nor vLLM is imported."""

import importlib.metadata
import json
import os
import subprocess
from dataclasses import dataclass, replace

import psutil

from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import Settings
from empo2.recipe.files.models import files_of, is_built_in, model_of
from empo2.recipe.preflight import estimate
from empo2.recipe.preflight.estimate import CARDS, SHAPES, Card, Shape
from empo2.recipe.preflight.finding import Finding

DRIVER, OLDER_DRIVER = 580, 575  # of CUDA 13.0, for which the pinned torch is built, and of 12.9 (torch +cu129)


@dataclass(frozen=True)
class Gpus:
    """The cards of this machine that a run may use, and the version of their driver; None: pretended."""

    cards: list[Card]
    driver: str | None = None


def read_gpus() -> Gpus:
    """Return the GPUs that nvidia-smi lists, without those that CUDA_VISIBLE_DEVICES hides."""
    names = "index,uuid,name,memory.total,memory.used,compute_mode,driver_version"
    query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Gpus([], "")
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines() if line.count(",") == 6]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        seen = [name.strip() for name in visible.split(",")]
        rows = [row for row in rows if row[0] in seen or any(name and row[1].startswith(name) for name in seen)]
    shared = psutil.virtual_memory().total  # with the CPU, where nvidia-smi says [N/A]
    cards = []
    for _, _, name, mib, used, mode, _ in rows:
        card = card_of(name, int(mib) * 2**20 if mib.isdigit() else shared)
        taken = int(used) * 2**20 if used.isdigit() else 0
        cards.append(replace(card, taken=taken, one_process=mode in ("Exclusive_Process", "Prohibited")))
    return Gpus(cards, rows[0][6] if rows else "")


def card_of(name: str, memory: float) -> Card:
    """Return a card by the name that nvidia-smi gives it; its speed is that of the nearest one in `CARDS`."""
    words = name.lower().replace(" ", "")
    known = [card for card in CARDS.values() if card.name.rpartition("-")[0] in words]
    if not known:
        return Card(name, memory)
    return replace(min(known, key=lambda card: abs(card.memory - memory)), memory=memory)


def find_shape(settings: Settings) -> Shape | None:
    """Return the model's shape, from its folder or the table; None if it is unknown, a ConfigError without a folder."""
    path = settings.model.path
    if is_built_in(path):
        return SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]
    model_of(settings)  # refuses a folder that is not there, or is not a model's
    if (folder := files_of(path)) is None:
        return SHAPES.get(path)
    try:
        return estimate.shape_of(json.loads((folder / "config.json").read_text()))
    except (OSError, KeyError, ValueError):
        return None


def cpu_memory(settings: Settings, shape: Shape) -> estimate.Terms:
    width = 2 if fast_dtype() == "bfloat16" else 4
    return estimate.cpu_memory(settings, shape, width=width)


def driver_of(gpus: Gpus) -> Finding | None:
    """Return whether the driver is new enough for the installed torch; None if no driver is known."""
    if not gpus.driver:
        return None
    try:
        older = importlib.metadata.version("torch").endswith("+cu129")
    except importlib.metadata.PackageNotFoundError:
        older = False
    cuda, needed = ("12.9", OLDER_DRIVER) if older else ("13.0", DRIVER)
    old = int(gpus.driver.partition(".")[0]) < needed
    fix = f"install {needed} or later" + ("" if older else ", or agent-lightning's setup_verl.sh 0.8.0 cu129")
    return Finding("driver", f"{gpus.driver}; CUDA {cuda} needs {needed}", fix if old else "")
