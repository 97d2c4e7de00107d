"""What lets verl 0.9.1 take 0.8's place on a CPU; VERL_USE_EXTERNAL_MODULES names it in each process that imports verl.

Its platforms have none for a CPU, and agent-lightning 1.0.2 imports two names by their places in 0.8.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
import importlib
from contextlib import nullcontext
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, set_platform

from empo2.recipe.trainer.compat import imports


def _returning(value: Any) -> Any:
    return lambda *_, **__: value


VALUES = {"device_name": "cpu", "vendor_name": "cpu", "device_module": torch.cpu}
ANSWERS = {
    **{"is_available": True, "device_count": 1, "current_device": "cpu", "get_device_capability": (None, None)},
    **{"communication_backend_name": "gloo", "visible_devices_envvar": "CUDA_VISIBLE_DEVICES"},
    **{"ray_resource_name": "GPU", "ray_noset_envvars": [], "is_ipc_supported": False, "nvtx_range": nullcontext()},
}
NOTHING: frozenset[str] = PlatformBase.__abstractmethods__ - VALUES.keys() - ANSWERS.keys()  # seeds, caches, profilers
METHODS = {name: _returning(value) for name, value in (dict.fromkeys(NOTHING) | ANSWERS).items()}

set_platform(type("Cpu", (PlatformBase,), VALUES | METHODS)())
imports._WRITTEN_FOR["verl"] = "0.9"
importlib.import_module("empo2.recipe.trainer.compat.verl")

main_ppo = importlib.import_module("verl.trainer.main_ppo")
main_ppo.TaskRunner = importlib.import_module("verl.trainer.main_ppo_v0").BaseTaskRunner
main_ppo.create_rl_sampler = importlib.import_module("verl.trainer.ppo.utils").create_rl_sampler
