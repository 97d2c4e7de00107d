"""vLLM 0.20.2 on a CPU as verl's rollout engine: a worker extension, loaded before the model is built.

Named by ``rollout.engine_kwargs.vllm.worker_extension_cls``; vLLM imports it in each worker process.
"""

import torch
import vllm._custom_ops as ops
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

# oneDNN linears pack their weights once; a later weight push "succeeds" and the model then answers uniformly
# (vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm). Plain torch linears keep their weights live.
ops._supports_onednn = False


class CpuWorkerExtension(vLLMColocateWorkerExtension):
    """verl's extension, for ``CPUWorker``, which never sets ``device``."""

    def update_weights_from_ipc(self, *args, **kwargs):
        self.device = torch.device("cpu")
        return super().update_weights_from_ipc(*args, **kwargs)
