"""empo2 check, against numbers worked out by hand; what vLLM makes of the profiles for GPUs; the proof for GPUs."""

import dataclasses
import functools
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from empo2.recipe.cli import main
from empo2.recipe.config import Settings, load_settings, warnings_of
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.models import SMOLLM2, resolve_model
from empo2.recipe.files.tasks import Tasks, load_tasks
from empo2.recipe.preflight import estimate, machine, machine_checks, start
from empo2.recipe.preflight.checks import MACHINE, require
from empo2.recipe.preflight.estimate import CARDS, GIB, SHAPES
from empo2.recipe.preflight.start import Start
from empo2.recipe.protocol import KEY_CHECK
from empo2.recipe.trainer.log_probs import log_probs_of

P = 7_615_616_512  # Qwen2.5-7B
SEVEN = SHAPES["Qwen/Qwen2.5-7B-Instruct"]
LISTED = "{index}, GPU-{index}, NVIDIA {name}, {mib}, {used}, {mode}, {driver}"


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, and a PATH without GPUs, with a compiler."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "cc").write_text("")
    for program in ("nvidia-smi", "cc"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setattr(machine_checks, "HEADER", tmp_path / "cc")
    monkeypatch.setattr(start, "load_tasks", _load_tasks)


@functools.cache
def _listed(source: str, args: str) -> Tasks:
    return load_tasks(load_settings("cpu", [f"tasks.source={source}", f"tasks.args={args}"]))


def _load_tasks(settings: Settings) -> Tasks:
    """The real tasks, listed by Java once."""
    return _listed(str(settings.tasks.source), json.dumps(settings.tasks.args))


def require_room(settings: Settings) -> list[str]:
    return require(Start(settings), MACHINE)


def with_gpus(
    count: int,
    name: str = "H100 80GB HBM3",
    mib: int = 81_559,
    driver: str = "580.65.06",
    used: Sequence[int] = (),
    mode: str = "Default",
) -> None:
    taken = [*used, *[1] * (count - len(used))]
    lines = [
        LISTED.format(index=index, name=name, mib=mib, driver=driver, used=taken[index], mode=mode)
        for index in range(count)
    ]
    Path("nvidia-smi").write_text("#!/bin/sh\ncat <<END\n" + "\n".join(lines) + "\nEND\n")


def lines_of(profile: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, list[str]]]:
    """The exit code, and the words of each line about the machine by its name."""
    code = main(["check", "--profile", profile, *arguments])
    lines = capsys.readouterr().out.split("\n\n")[0].split("machine\n")[1].splitlines()
    return code, {line[9:24].strip(): [line[:9].strip(), line[24:]] for line in lines}


def test_parameters_are_those_published() -> None:
    assert {name: shape.parameters for name, shape in SHAPES.items()} == {
        "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
        "Qwen/Qwen2.5-1.5B-Instruct": 1_543_714_304,
        "Qwen/Qwen2.5-3B-Instruct": 3_085_938_688,
        "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
        "Qwen/Qwen2.5-14B-Instruct": 14_770_033_664,
        "Qwen/Qwen3-1.7B": 1_720_574_976,
        "Qwen/Qwen3-4B": 4_022_468_096,
        "Qwen/Qwen3-8B": 8_190_735_360,
        "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
        "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
    }
    folder = load_settings("cpu", [f"model.path={resolve_model(SMOLLM2)}"])
    assert machine.find_shape(folder) == SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"]


def test_an_unknown_model_is_not_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for config in ('{"model_type": "mixtral"}', '{"model_type": "llama"}', "not JSON"):
        (tmp_path / "config.json").write_text(config)
        main(["check", "--profile", "gpu", "--gpu", "h100-80", f"model.path={tmp_path}"])
        assert "its size is unknown" in capsys.readouterr().out


def test_the_update_of_7b_on_eight_gpus() -> None:
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3 * 3584 * 18_944 + (3584 + 512 + 512) + 2 * 3584
    assert layer == SEVEN.layer == 233_057_792
    assert estimate.update_memory(load_settings("gpu"), SEVEN) == {
        "weights, float32": P / 2,  # 4 bytes, on 8 GPUs
        "gradients, float32": P / 2,
        "AdamW, float32": P,
        # 2 x (LM head 544,997,376 + two layers), and 6 x (LM head + layer) for gradients
        "LM head and layers, gathered": 2_022_225_920 + 4_668_331_008,
        # 12,692 tokens x (28 x 3584 + 6 x 18,944 + 16 x 3584 = 271,360 values) x 2 bytes
        "activations": 6_888_202_240,
        # all in bfloat16, gradients of 7 chunks, and the last chunk five times in float32
        "logits": (8192 * 2 + 7168 * 2 + 1024 * 20) * 152_064,
        "vLLM asleep": 2 * GIB,
        "CUDA context, NCCL": GIB,
    }


class _Alive(TorchDispatchMode):
    """The bytes of all tensors that operations have made and that are still held, at most."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                held = StorageWeakRef(storage := each.untyped_storage())
                self.held[held.cdata] = held, storage.nbytes()
        self.peak = max(self.peak, sum(size for held, size in self.held.values() if not held.expired()))
        return out


@pytest.mark.parametrize("positions", [960, 2048])
def test_the_logits_are_what_torch_holds_of_them(positions: int) -> None:
    """In one chunk, and in two that are computed again. What is not of the vocabulary's size adds 0.3 % here."""
    words = 1_000
    hidden = torch.randn(1, positions, 8, dtype=torch.bfloat16, requires_grad=True)
    head, labels = torch.randn(words, 8, dtype=torch.bfloat16), torch.randint(words, (1, positions))
    with _Alive() as alive:
        (found,) = log_probs_of(hidden @ head.T, labels, torch.ones(1, 1, 1), entropy=False)
        found.sum().backward()
    settings = load_settings("gpu", [f"model.max_episode_tokens={positions}", "memory.episode_tokens=100"])
    expected = estimate.logits(settings, dataclasses.replace(SEVEN, vocabulary=words))
    assert alive.peak == pytest.approx(expected, rel=0.01)


def test_generation_and_push_of_7b_on_eight_gpus() -> None:
    settings, card = load_settings("gpu"), CARDS["h100-80"]
    # 12,800 tokens in a batch; 28,416 = 3 x 18,944 / 2 GPUs
    overhead = 2 * GIB + 12_800 * (28_416 + 4 * 3584) * 2 + 256 * 152_064 * 8
    cache = 0.6 * 81_559 * 2**20 - P - overhead
    terms = estimate.generation_memory(settings, SEVEN, card)
    assert terms["vLLM: KV cache"] == pytest.approx(cache)
    assert sum(terms.values()) == pytest.approx(0.6 * card.memory + GIB)  # offload: nothing of the trainer
    # 57,344 bytes a token = 2 (K, V) x 28 layers x 4 heads x 128 x 2 bytes, shared by two GPUs
    assert estimate.sequences(settings, SEVEN, card) == pytest.approx(2 * cache / (57_344 * 12_800))
    push = estimate.push_memory(settings, SEVEN)
    assert sum(push.values()) == P / 2 + P + 2 * GIB + (2 * GIB + 544_997_376 * 6) + GIB


def test_a_lora_trains_its_own_parameters_only() -> None:
    settings = load_settings("gpu", ["model.lora_rank=64"])
    # inputs + outputs of q and o 7168 each, k and v 4096 each, gate, up and down 22,528 each
    lora = 28 * 64 * (2 * 7168 + 2 * 4096 + 3 * 22_528)
    terms = estimate.update_memory(settings, SEVEN)
    assert terms["AdamW, float32"] == lora
    assert terms["weights, float32"] == (P + lora) / 2
    assert terms["LM head and layers, gathered"] == 2_022_225_920


def test_a_step_by_roofline() -> None:
    step = estimate.step_time(load_settings("gpu"), SEVEN, CARDS["h100-80"])
    assert step is not None
    assert (step.read, step.sampled) == (128 * 2033, 128 * (30 * 32 + 160))
    useful = 8 * 989e12 * 0.35
    assert step.update == pytest.approx(8 * P * 128 * 2033 / useful * 1.5)  # one row a rank
    decode = (30 * 32 + 160) * (2 * P + 32 * 2033 * 57_344) / 2 / 3.35e12  # 32 episodes on each of 4 vLLMs
    assert step.generation == pytest.approx(decode + 2 * P * 128 * 2033 / useful)
    thrice = load_settings("gpu", ["algorithm.update_epochs=3", "algorithm.kl_coefficient=0.01"])
    step = estimate.step_time(thrice, SEVEN, CARDS["h100-80"])
    assert step is not None
    assert step.update == pytest.approx((3 * 8 + 2) * P * 128 * 2033 / useful * 1.5)  # the reference passes once
    replay = load_settings("gpu", ["algorithm.off_policy_loss=distillation", "algorithm.replay_per_task=2"])
    step = estimate.step_time(replay, SEVEN, CARDS["h100-80"])
    assert step is not None
    assert step.update == pytest.approx(8 * P * 160 * 2033 / useful * 1.6)  # ten rows an update: some ranks have two
    hosts = ["hardware.nodes=2", "hardware.ray_address=auto"]
    waits = "algorithm.updates_per_step=16: an update has 8 rows for 16 GPUs, and the others wait; take 8"
    for updates, share, warned in ((16, 1.0, [waits]), (8, 0.5, [])):
        two = load_settings("gpu", [*hosts, f"algorithm.updates_per_step={updates}"])
        step = estimate.step_time(two, SEVEN, CARDS["h100-80"])
        assert step is not None and step.update == pytest.approx(8 * P * 128 * 2033 / useful * 1.5 * share)
        assert [line for line in warnings_of(two) if "wait" in line] == warned
    frozen = estimate.step_time(load_settings("gpu", ["algorithm.learning_rate=0"]), SEVEN, CARDS["h100-80"])
    assert frozen is not None
    assert frozen.update == pytest.approx(8 * P * 16 * 2033 / useful * 1.5)  # a row in each of sixteen updates


def test_main_memory_and_disk() -> None:
    settings = load_settings("gpu")
    # A GPU's eighth of a moment, pinned: twice 272 MB in 2^29, and of each layer 6.4 MB in 2^23 twice, 0.9 in 2^20
    # twice and 33.9 in 2^26 three times.
    pinned = 2 * 2**29 + 28 * (2 * 2**23 + 2 * 2**20 + 3 * 2**26)
    assert estimate.offloaded(settings, SEVEN) == 4 * P + 2 * 8 * pinned
    with_kl = load_settings("gpu", ["algorithm.kl_coefficient=0.01"])
    assert estimate.offloaded(with_kl, SEVEN) == 8 * P + 2 * 8 * pinned
    assert estimate.offloaded(load_settings("gpu", ["hardware.offload=false"]), SEVEN) == 0
    assert estimate.checkpoints(settings, SEVEN) == 2 * 14 * P
    assert estimate.checkpoints(load_settings("gpu", ["run.keep_checkpoints=1"]), SEVEN) == 2 * 14 * P  # for a while
    assert estimate.checkpoints(load_settings("gpu", ["run.keep_checkpoints=3"]), SEVEN) == 3 * 14 * P
    # Imports of the trainer, eight workers, vLLM's eight, four servers and engines; gateway, Ray, launcher, controller.
    stack = 25 * 0.9 * GIB + 0.75 * GIB + 0.4 * GIB + 0.2 * GIB
    assert estimate.stack_memory(settings, SEVEN) == pytest.approx(stack)
    assert estimate.stack_memory(load_settings("gpu", ["model.lora_rank=64"]), SEVEN) == pytest.approx(stack + 4 * P)
    assert estimate.java_seconds(settings) == pytest.approx(128 * 2.3)
    cuda = load_settings("gpu", ["memory.embedder_device=cuda:0"])
    plain, more = (estimate.phases(each, SEVEN, CARDS["a100-40"]) for each in (settings, cuda))
    for name, terms in more.items():
        assert sum(terms.values()) == pytest.approx(sum(plain[name].values()) + 1e9)
    small, cpu = SHAPES["HuggingFaceTB/SmolLM2-135M-Instruct"], load_settings("cpu")
    terms = estimate.cpu_memory(cpu, small, width=2)
    logits = (2048 * 2 + 1024 * 2 + 1024 * 20) * 49_152
    activations = 3072 * 30 * (5 * 1536 + 14 * 576) * 2
    assert terms["trainer's workers"] == 0.9 * GIB + 16 * 134_515_008 + logits + activations
    assert terms["vLLM: engine"] == 0.9 * GIB + 2 * 134_515_008 + 2 * GIB


@pytest.mark.parametrize(
    ("profile", "card", "fits"),
    [
        ("gpu", "h100-80", True),
        ("gpu", "a100-40", True),
        ("gpu", "rtx4090-24", False),
        ("gpu-1", "h100-80", True),
        ("gpu-1", "rtx4090-24", False),
        ("gpu-24", "rtx4090-24", True),
    ],
)
def test_profiles_on_cards(
    profile: str, card: str, fits: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/sbatch")
    assert main(["check", "--profile", profile, "--gpu", card]) == (0 if fits else 1)
    printed = capsys.readouterr().out
    assert ("TOO LARGE" in printed, "change one of:" in printed) == (not fits, not fits)
    assert "estimated by roofline" in printed and "(pretended; driver not checked)" in printed
    if fits:
        machine, memory, step, slurm = printed.split("\n\n")
        (needed,) = re.findall(r"host memory +(\d+) GiB needed", machine)
        gpus, size, minutes = re.findall(r"--nodes=1 --gpus-per-node=(\d) --mem=(\d+)G --time=(\d+)  # min", slurm)[0]
        assert int(size) == pytest.approx(1.2 * int(needed), abs=1) and gpus == ("8" if profile == "gpu" else "1")
        page = (Path(__file__).parents[2] / "docs/gpus.md").read_text()
        if (profile, card) == ("gpu", "h100-80"):
            assert memory in page and step in page, "paste the output of empo2 check into docs/gpus.md anew"
        (sums,) = re.findall(r"^  sum .*?\)((?: +[\d.]+){3})$", memory, re.MULTILINE)
        (row,) = re.findall(rf"^\| `{profile}`, `{card}`[^|]*\| (.*) \|$", page, re.MULTILINE)
        (limit,) = re.findall(r"^  of ([\d.]+) ", memory, re.MULTILINE)
        (sequences,) = re.findall(r"holds (\d+) sequences", memory)
        times = [re.findall(rf"^  {what} +([\d.]+) ", step, re.MULTILINE)[0] for what in ("generation", "update")]
        (hours,) = re.findall(r"^  training +([\d.]+ hours)", step, re.MULTILINE)
        assert int(minutes) == pytest.approx(60 * float(hours.split()[0]), abs=3.5)  # which are rounded to 0.1
        assert row.split(" | ") == [*sums.split(), limit, sequences, *times, hours], "docs/gpus.md"


def test_what_it_advises_fits() -> None:
    for profile in ("gpu", "gpu-1"):
        shape, card = SHAPES[load_settings(profile).model.path], CARDS["rtx4090-24"]
        for remedy in estimate.remedies(load_settings(profile), shape, card):
            assert estimate.excess(load_settings(profile, remedy.split()), shape, card) <= 1, remedy
    two_rows = load_settings("gpu", ["hardware.micro_batch=2"])
    assert estimate.remedies(two_rows, SHAPES[two_rows.model.path], CARDS["a100-40"])[0] == "hardware.micro_batch=1"
    huge = load_settings("gpu-1", ["model.path=Qwen/Qwen2.5-14B-Instruct", "model.max_context_tokens=32768"])
    shape = SHAPES["Qwen/Qwen2.5-14B-Instruct"]
    assert estimate.remedies(huge, shape, CARDS["rtx4090-24"])[0].startswith(("another card", "a smaller"))


def test_the_cpu_profile_is_shown_by_process_and_wrong_arguments_are_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main(["check", "--profile", "cpu"])
    printed = capsys.readouterr().out
    assert "vLLM: engine" in printed and "gateway with embedder" in printed
    assert main(["check", "--profile", "gpu", "--gpu", "h100"]) == 2
    assert "--gpu h100: is unknown; there are h200-141, h100-80" in capsys.readouterr().err
    assert main(["check", "--profile", "gpu", "verl.actor_rollout_ref.ref.strategy=megatron"]) == 2
    assert "WRONG  verl           actor_rollout_ref.ref.strategy='megatron': must be fsdp2" in capsys.readouterr().out


def test_gpus_of_the_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpus(8, "B300", 275_040)
    assert lines_of("gpu", capsys=capsys)[1]["GPUs"] == ["ok", "8 of 8: NVIDIA B300"]
    with_gpus(8)
    _, found = lines_of("gpu", capsys=capsys)
    assert found["GPUs"] == ["ok", "8 of 8: h100-80"] and found["driver"][0] == "ok"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    code, found = lines_of("gpu", capsys=capsys)
    assert code == 1 and found["GPUs"][0] == "WRONG"
    assert found["GPUs"][1].startswith("hardware.gpus_per_node=8: this machine has 2; --profile cpu needs none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with_gpus(9, used=[30_720, 0, 2048, 600, 0, 0, 0, 0, 80_000])  # Ray takes the first eight
    _, found = lines_of("gpu", capsys=capsys)
    assert found["GPUs"][0] == "warns" and "h100-80; other processes hold 30 and 2 GiB of them" in found["GPUs"][1]
    with_gpus(8, mode="Exclusive_Process")
    code, found = lines_of("gpu", capsys=capsys)
    assert code == 1 and found["GPU mode"][0] == "WRONG" and "--compute-mode=DEFAULT" in found["GPU mode"][1]
    with_gpus(8, driver="550.54.15")
    code, found = lines_of("gpu", capsys=capsys)
    assert code == 1 and found["driver"][0] == "WRONG" and "580" in found["driver"][1]
    with_gpus(8, driver="575.57.08")
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0+cu129")
    _, found = lines_of("gpu", capsys=capsys)
    assert found["driver"] == ["ok", "575.57.08; CUDA 12.9 needs 575"]
    monkeypatch.setattr(machine_checks, "HEADER", Path("Python.h"))
    monkeypatch.setenv("PATH", ".")
    Path("cc").unlink()
    code, found = lines_of("gpu", capsys=capsys)
    assert code == 1 and found["compiler"][0] == "WRONG" and "a C compiler and Python.h missing" in found["compiler"][1]


def test_train_refuses_what_cannot_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_free_memory", lambda: 1e12)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(64)))
    with pytest.raises(ConfigError, match=r"hardware.gpus_per_node=8: this machine has 0; --profile cpu"):
        require_room(load_settings("gpu"))
    with_gpus(8, "GeForce RTX 4090", 24_564)
    with pytest.raises(ConfigError, match=r"does not fit 8 GPUs of 24 GiB .*; change .*=") as caught:
        require_room(load_settings("gpu"))
    assert "\n" not in str(caught.value)
    with_gpus(8, used=[0, 40_960])
    with pytest.raises(ConfigError, match=r"does not fit 8 GPUs of 80 GiB, 40 of them taken \(estimated"):
        require_room(load_settings("gpu"))
    with_gpus(8, "A100-SXM4-40GB", 40_960)
    settings = load_settings("gpu", ["run.save_every=0", "model.path=Qwen/Qwen3-1.7B", "run.directory=/dev/shm"])
    assert require_room(settings) == require_room(load_settings("cpu")) == []
    with_gpus(8, "A100-SXM4-40GB", 38_500)  # smaller by 1 %
    (warning,) = require_room(load_settings("gpu", ["run.save_every=0", "run.directory=/dev/shm"]))
    assert warning.startswith("model.path='Qwen/Qwen2.5-7B-Instruct': may not fit 8 GPUs of 38 GiB")
    monkeypatch.setattr(machine_checks, "_free_memory", lambda: 1e9)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    _, memory, cores = require_room(load_settings("gpu", ["run.save_every=0", "run.directory=/dev/shm"]))
    assert memory.startswith("host memory: 205 GiB needed, 1 free") and cores.startswith("cores: 1: ")
    with_gpus(8, driver="550.54.15")
    monkeypatch.setattr(machine_checks, "SHARED", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"driver: 550.*\| shared memory: .*--shm-size"):
        require_room(load_settings("gpu"))


def test_what_the_machine_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = ["gpu-24", "--gpu", "rtx4090-24"]
    (tmp_path / "tasks.jsonl").write_text('{"question": "a"}\n{"question": "b"}\n')
    mine = ["tasks.source=tasks.jsonl", "agent.class=empo2.agents.command.agent:CommandAgent", "memory.scope=all-tasks"]
    monkeypatch.setenv("JAVA", "/no/such/java")
    assert main(["check", "--profile", *fits]) == 2
    assert "  WRONG  agent          agent.class=" in capsys.readouterr().out
    assert lines_of(*fits, *mine, capsys=capsys)[0] == 0  # which needs no Java
    monkeypatch.delenv("JAVA")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = f"gateway.port={taken.getsockname()[1]}"
        code, found = lines_of(*fits, port, capsys=capsys)
    assert code == 1 and found["port"][0] == "WRONG" and port in found["port"][1]
    disks = [SimpleNamespace(mountpoint="/", fstype="ext4"), SimpleNamespace(mountpoint=str(tmp_path), fstype="")]
    hidden = SimpleNamespace(mountpoint=str(tmp_path), fstype="autofs")  # below what it mounts
    monkeypatch.setattr(machine_checks.psutil, "disk_partitions", lambda all: [hidden, *disks])
    for kind, said in (("nfs4", "WRONG"), ("fuse.sshfs", "WRONG"), ("fuse.overlayfs", "ok")):
        disks[1].fstype = kind
        found = lines_of(*fits, *mine, capsys=capsys)[1]["memory file"]
        assert found[0] == said and f"on {kind}" in found[1]
    disks[1].fstype = "nfs4"  # a job of Slurm may go on on another node
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert lines_of("gpu", "--gpu", "h100-80", *mine, capsys=capsys)[1]["memory file"][0] == "ok"
    monkeypatch.delenv("RAY_ADDRESS")
    (tmp_path / "mine").write_text("4:memory:/elsewhere\n0::/job/step/task\n")  # as in a job of Slurm
    (job := tmp_path / "groups" / "job").mkdir(parents=True)
    for name, said in (("max", 9 * GIB), ("current", 17 * GIB // 2), ("stat", f"inactive_file {GIB // 2}")):
        (job / f"memory.{name}").write_text(f"{said}\n")
    monkeypatch.setattr(machine_checks, "CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(machine_checks, "MINE", tmp_path / "mine")
    monkeypatch.setattr(machine_checks, "SHARED", tmp_path / "none")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with_gpus(8)
    _, found = lines_of("gpu", "run.keep_checkpoints=1000000", capsys=capsys)
    wrong = {"host memory": "1 free", "disk": "run.keep_checkpoints", "model": "HF_HUB_OFFLINE"}
    for name, said in (wrong | {"shared memory": "--shm-size"}).items():
        assert found[name][0] == "WRONG" and said in found[name][1]


# The arguments that verl makes of a profile, read by vLLM's own parser; the server itself is not started.
PARSE = """
import asyncio, json, sys
from pathlib import Path
from types import SimpleNamespace

from empo2.recipe.config import load_settings
from empo2.recipe.trainer.verl_config import build_verl_config, name_middleware
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.vllm_rollout.vllm_async_server import AsyncEngineArgs, vLLMHttpServer

class Server(vLLMHttpServer):
    def __init__(self, config):
        model = config.actor_rollout_ref.model
        self.config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self.model_config = SimpleNamespace(
            local_path=model.path, trust_remote_code=False, lora=model.lora, lora_rank=model.lora_rank
        )
        self.replica_rank, self.node_rank, self.nnodes = 1, 0, 1  # the first one would print its arguments
        self.profiler_controller = SimpleNamespace(config=None, tool_config=None)

    async def run_server(self, arguments):
        engine = AsyncEngineArgs.from_cli_args(arguments)
        found[profile] = vars(arguments) | vars(engine)

found = {}
for profile in sys.argv[1:]:
    settings = load_settings(profile, ["agent.class=a:B", "tasks.source=a:b"])
    config = build_verl_config(settings, model_path=settings.model.path, run_directory=Path("runs"), gateway_url="",
                               gateway_key="", tool_parser="hermes")
    name_middleware(config, settings)
    asyncio.run(Server(config).launch_server())
print(json.dumps(found, default=str))
"""


@pytest.mark.slow
def test_vllm_accepts_the_profiles() -> None:
    command = [sys.executable, "-c", PARSE, "gpu", "gpu-1", "gpu-24"]
    device = {"CUDA_VISIBLE_DEVICES": "-1", "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | device)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for profile in ("gpu", "gpu-1", "gpu-24"):
        hardware, given = load_settings(profile).hardware, load_settings(profile).model
        expected = {
            "model": given.path,
            "tensor_parallel_size": hardware.tensor_parallel,
            "max_model_len": given.max_context_tokens,
            "max_num_seqs": hardware.max_sequences,
            "max_num_batched_tokens": max(8192, given.max_context_tokens),
            "gpu_memory_utilization": hardware.gpu_memory_fraction,
            **dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill", "enable_sleep_mode"), True),
            "enable_lora": None,  # it is merged
            "middleware": [KEY_CHECK],
            "enable_auto_tool_choice": True,
            "tool_call_parser": "hermes",
        }
        assert expected.items() <= found[profile].items()


@pytest.mark.slow
def test_the_proof_for_gpus_runs_on_a_cpu_and_names_the_part_that_fails() -> None:
    """With log-probs that are twice the right ones, a loss that raises, and all else as it is."""
    wrong = (
        "import sys, runpy; from empo2.recipe.trainer import log_probs; right = log_probs.log_probs_of\n"
        "log_probs.log_probs_of = lambda *given, **options: [2 * each for each in right(*given, **options)]\n"
        "from gpu_proof import parts; parts.copy = None\n"
        "sys.argv = ['gpu_proof', '--device', 'cpu']; runpy.run_module('gpu_proof', run_name='__main__')"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", wrong], cwd=root, capture_output=True, text=True)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "FAIL: log-probs, loss"), done.stdout + done.stderr
