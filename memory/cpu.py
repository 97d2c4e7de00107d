"""What this machine's CPU computes fast; importing it loads no torch."""

from pathlib import Path
from typing import Literal

# Matrices (AMX), Arm's, and AVX-512's where its bfloat16 is faster than its float32. Intel's without AMX, as in virtual
# machines that hide AMX, is half as fast.
_BFLOAT16 = ({"amx_bf16"}, {"bf16"}, {"AuthenticAMD", "avx512_bf16"})

# Tokens of a block of vLLM's prefix cache, the fewest that its CPU kernels are made for. With its own 128 a short turn
# computes half a block anew, a third of a rollout's time in worlds such as agents/houses.
CACHE_BLOCK = 32

# vLLM's "uni" executor, named by its class: on a CPU vLLM turns "uni" itself into "mp", one more process, which imports
# vLLM for 20 s and holds a gigabyte, and for which the engine waits in a loop that takes a third of a core.
EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def fast_dtype() -> Literal["bfloat16", "float32"]:
    """Return "bfloat16" if this CPU multiplies matrices in less time with it than with float32, else "float32".

    Without instructions for it bfloat16 is emulated: a 135M model reads a prompt six times slower with it than with
    float32, and writes at half the speed (measured on two cores of an AMD EPYC Milan, which has AVX2).
    """
    file = Path("/proc/cpuinfo")
    words = set(file.read_text().split()) if file.is_file() else set()
    return "bfloat16" if any(needed <= words for needed in _BFLOAT16) else "float32"
