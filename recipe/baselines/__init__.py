"""What other papers bring: a folder each, hung in by the lines below. EMPO² itself needs none of them.

Remove a folder, and its paper is gone: the values that ask for it are refused, and nothing else changes. A folder
is imported only when it is asked for.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

from empo2.recipe.errors import ConfigError

_ANY = object()  # every value but None

# Values that ask for a paper, its module, and the names in it that are used where.
_HOOKS = {
    "algorithm.advantage": {  # turn_advantages and warning, in trainer/step.py
        "gigpo": "gigpo.advantage",
        "rlvmr": "rlvmr.advantage",
    },
    "algorithm.novelty": {"rnd": "rnd.novelty"},  # DistilledMemory, in gateway/memory.py
    "memory.retrieval": {  # policy, in gateway/memory.py
        "value": "memrl.retrieval",
        "newest": "reflexion.retrieval",
        "actions": "rememberer.records",
    },
    "reflection.form": {  # tip, in gateway/episodes/reflector.py
        "procedure": "memp.procedures",
        "actions": "rememberer.records",
    },
    "critic.path": {_ANY: "retrospex.reranking"},  # Reranking, in gateway/app.py
    "tasks.starts": dict.fromkeys(("by-count", "by-policy"), "go_explore.starts"),  # Starts, in gateway/pipeline.py
    "memory.judged": {True: "self_rag.relevance"},  # relevant_tips, in gateway/episodes/tip_search.py
}


def asked_for(settings: BaseModel, key: str) -> ModuleType | None:
    """Return the module that the value of a setting asks for, None if EMPO² has the value itself; raise as `check`."""
    name = _module(settings, key)
    return import_module(f"{__name__}.{name}") if name else None


def check(settings: BaseModel) -> None:
    """Refuse values that ask for a folder that was removed; nothing is imported.

    Raises:
        ConfigError: names the key, its value and the folder.
    """
    for key in _HOOKS:
        _module(settings, key)


def _module(settings: BaseModel, key: str) -> str | None:
    section, name = key.split(".")
    value: Any = getattr(getattr(settings, section), name)
    module = _HOOKS[key].get(value) or (value is not None and _HOOKS[key].get(_ANY)) or None
    if module and not (Path(__file__).parent / module.split(".")[0]).is_dir():
        raise ConfigError(
            f"{key}={value!r}: needs the folder recipe/baselines/{module.split('.')[0]}, which was removed; put it "
            "back, or leave the setting as config.yaml has it"
        )
    return module
