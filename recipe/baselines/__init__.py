"""What other papers bring: a folder each, hung in by the lines below. EMPO² itself needs none of them.

Remove a folder, and its paper is gone: the values that ask for it are refused, its verbs are not there, and nothing
else changes. A folder is imported only when it is asked for.
"""

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from empo2.recipe.errors import ConfigError

if TYPE_CHECKING:
    from typer import Typer

_ANY = object()  # every value but null

# Values that ask for a paper, its module, and the names in it that are used where.
_HOOKS = {
    "algorithm.advantage": {"gigpo": "gigpo.advantage"},  # add_turn_advantages and warning, in trainer/trainer.py
    "memory.retrieval": {"value": "memrl.retrieval", "newest": "reflexion.retrieval"},  # policy, in gateway/memory.py
    "memory.judged": {True: "self_rag.relevance"},  # relevant_tips, in gateway/tips/search.py
    "critic.path": {_ANY: "retrospex.reranking"},  # Reranking, in gateway/app.py; facts and summary, in cli/eval.py
}
_VERBS = {"empo2": "retrospex.command", "empo2 memory": "memrl.command"}  # a typer app, in cli/verbs.py


def asked_for(settings: BaseModel, key: str) -> ModuleType | None:
    """Return the module that the value of a setting asks for; None if EMPO² has the value itself.

    Raises:
        ConfigError: as `check`.
    """
    name = _module(settings, key)
    return import_module(f"{__name__}.{name}") if name else None


def check(settings: BaseModel) -> None:
    """Refuse values that ask for a folder that was removed; nothing is imported.

    Raises:
        ConfigError: names the key, its value and the folder.
    """
    for key in _HOOKS:
        _module(settings, key)


def add_verbs(app: "Typer", command: str) -> None:
    """Add the verbs that papers bring to a command, ``empo2`` or ``empo2 memory``."""
    if _is_there(_VERBS[command]):
        app.add_typer(import_module(f"{__name__}.{_VERBS[command]}").app)


def _module(settings: BaseModel, key: str) -> str | None:
    section, name = key.split(".")
    value: Any = getattr(getattr(settings, section), name)
    module = _HOOKS[key].get(value) or (_HOOKS[key].get(_ANY) if value is not None else None)
    if module and not _is_there(module):
        raise ConfigError(
            f"{key}={value!r}: needs the folder recipe/baselines/{module.split('.')[0]}, which was removed; put it "
            "back, or leave the setting as config.yaml has it"
        )
    return module


def _is_there(module: str) -> bool:
    return (Path(__file__).parent / module.split(".")[0]).is_dir()
