"""The environment variables of Ray, verl and vLLM, here and in every worker process. Import it before verl.

Variables that the user has set are left as they are.
"""

import os
import secrets
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from empo2.recipe.errors import Empo2Error
from empo2.recipe.marked_lines import say_note
from empo2.recipe.network import LOOPBACK, address_in
from empo2.recipe.trainer.compat.fork_server import worker_command

_CHARACTERS = 300  # of an error's message

# As in verl 0.8's ``PPO_RAY_RUNTIME_ENV``, copied to avoid importing verl.
_VERL_VARIABLES = {
    "TOKENIZERS_PARALLELISM": "true",
    "NCCL_DEBUG": "WARN",
    "VLLM_LOGGING_LEVEL": "WARN",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "true",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}

DEVICE = "EMPO2_DEVICE"  # gpu | cpu: what the run trains on, told to every process
RUN = "EMPO2_RUN"  # a random name of the run, told to its workers
NETWORK = "EMPO2_NETWORK"  # hardware.network, told to the workers of a Ray cluster


def device() -> str:
    """Return ``gpu`` or ``cpu``: the value of ``EMPO2_DEVICE``, else the device of this machine.

    Workers need the variable: Ray hides the GPUs from an actor that requests none. Asking torch would take 4 s.
    """
    if told := os.environ.get(DEVICE):
        return told
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return "cpu" if hidden or not any(Path("/dev").glob("nvidia[0-9]*")) else "gpu"


def _variables() -> dict[str, str]:
    variables = {DEVICE: device(), "VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl"}
    if variables[DEVICE] == "gpu":
        # PyTorch 2.11 would take cuDNN's attention on Hopper, which makes a plan for each new length of a row.
        return variables | {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}
    cores = sorted(os.sched_getaffinity(0))
    return variables | {
        # vLLM 0.20.2 crashes on "nobind" and "all"; an explicit list works.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(len(cores)),  # Ray would set it to 1
        # Threads that spin while they wait take the cores from the agents: a decoding step of the small
        # model beside one busy process takes 84 ms with spinning, 40 ms without it (29 ms alone).
        "OMP_WAIT_POLICY": "passive",
        # vLLM compiles one function of its sampler all the same with enforce_eager, for half a minute at first.
        "TORCHDYNAMO_DISABLE": "1",
        # Keeps Ray from hiding the GPUs from tasks that request none.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }


VARIABLES = {name: os.environ.setdefault(name, value) for name, value in (_VERL_VARIABLES | _variables()).items()}
os.environ.pop("ROCR_VISIBLE_DEVICES", None)  # Slurm may set it beside CUDA_VISIBLE_DEVICES, and verl refuses both
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_COLOR_PREFIX", "0")  # its lines go into a log
os.environ.setdefault("RAY_prestart_worker_first_driver", "0")  # three workers that nobody needs
os.environ.setdefault("RAY_worker_niceness", "0")  # 15, upstream's, starves the model beside its own agents


def use_network() -> None:
    """Let gloo, NCCL and vLLM of a Ray worker use the run's network, by this host's own names.

    That is ``hardware.network``, or the address by which Ray knows the node: loopback where the trainer has started it.
    By themselves they take what the host's name stands for, which may be an address that other hosts cannot reach.
    """
    import ray

    if ray.is_initialized():
        # verl sets this variable for its vLLM servers; each keeps to one node, and agents reach it by HTTP.
        alone = LOOPBACK if "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES" in os.environ else None
        address, interface = address_in(alone or os.environ.get(NETWORK) or ray.util.get_node_ip_address())
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
        os.environ.setdefault("VLLM_HOST_IP", address)


def start_ray(config: DictConfig) -> None:
    """Start or join Ray as configured in ``config.ray_kwargs.ray_init``, unless this process has already done so.

    On a busy machine its start may run out of time; it is tried twice. A Ray that is started has a token of its own.

    Raises:
        Empo2Error: it failed both times.
    """
    options: Any = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    import ray
    from ray._private import ray_constants
    from ray._raylet import Config  # pyright: ignore[reportAttributeAccessIssue]
    from ray.job_config import JobConfig

    class InstalledModules(JobConfig):
        """Leaves out the current folder, which Ray searches first: a vllm.py there would run in the place of vLLM."""

        def _runtime_env_has_working_dir(self) -> bool:
            return True

    if ray.is_initialized():
        return
    address = options.get("address") or os.environ.get("RAY_ADDRESS")  # as ray.init takes it
    joined = address not in (None, "", "local")
    if address == "local":  # else Ray puts the host's address on the network in the place of 127.0.0.1
        os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for the processes that it starts
        ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray asks for its token, and presents it
    Config.initialize("")  # as ray.init does where it sets the mode itself
    runtime_env = dict(options.pop("runtime_env", None) or {})
    variables = VARIABLES | {RUN: secrets.token_hex(4)}
    if joined and (network := OmegaConf.select(config, "empo2.hardware.network")):
        variables[NETWORK] = network
    # Not agent-lightning's worker_process_setup_hook: idle workers would import verl for nothing. The loss is
    # registered by the module that the loss function lies in (objective.py).
    if not joined and not runtime_env.keys() - {"env_vars"} and (command := worker_command()):
        runtime_env["py_executable"] = command
    runtime_env["env_vars"] = variables | runtime_env.get("env_vars", {})
    if OmegaConf.select(config, "empo2.run_directory"):  # else a script of the user's, with modules of its own
        options["job_config"] = InstalledModules()
    if not joined:
        options["_temp_dir"] = os.environ.get("RAY_TMPDIR")
    if address == "local" and "RAY_AUTH_TOKEN_PATH" not in os.environ:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    failed = None
    while True:
        try:
            ray.init(runtime_env=runtime_env, **options)
            break
        except (ValueError, TypeError):  # wrong options
            raise
        except Exception as error:
            said = f"{type(error).__name__}: {' '.join(str(error).split())[:_CHARACTERS]}"
            if failed:
                logs = Path(os.environ.get("RAY_TMPDIR") or "/tmp/ray") / "session_latest" / "logs"
                fix = f"look into {logs}, and see whether the machine has memory, disk and a core left"
                raise Empo2Error(f"Ray does not start, tried twice: {said}; {fix}") from None
            failed = said
            ray.shutdown()
    if failed:
        say_note(f"Ray was started at the second attempt; the first one failed: {failed}")
