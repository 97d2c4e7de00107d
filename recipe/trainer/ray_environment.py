"""The environment that verl, vLLM and Ray are imported under, here and in every worker process.

Import it before verl. Variables that the user has set are left as they are.
"""

import os
from pathlib import Path


def has_gpu() -> bool:
    """Whether a GPU is there and not hidden, found out without the 4 s that it takes to import torch."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and any(Path("/dev").glob("nvidia[0-9]*"))


VARIABLES = {"VERL_USE_EXTERNAL_MODULES": "empo2.recipe.trainer.compat.verl"}

if not has_gpu():
    cores = sorted(os.sched_getaffinity(0))
    VARIABLES |= {
        # vLLM 0.20.2 crashes on "nobind" and "all"; an explicit list works.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in cores),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "OMP_NUM_THREADS": str(len(cores)),  # Ray would say 1
        # Threads that wait for each other by spinning take the cores from the agents: a decoding step of the small
        # model beside one busy process takes 84 ms with spinning, 40 ms without (29 ms alone).
        "OMP_WAIT_POLICY": "passive",
        # Ray hides GPUs from tasks that ask for none; there is none to hide.
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }

VARIABLES = {name: os.environ.setdefault(name, value) for name, value in VARIABLES.items()}
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # 15, upstream's, starves the model beside its own agents
