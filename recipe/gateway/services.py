"""The objects that all calls and reflections of the gateway share."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from empo2.memory import MemoryService
from empo2.recipe.config import Settings
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.tokenizer import TipTokenizer
from empo2.recipe.gateway.upstream import ModelServers


@dataclass(frozen=True)
class Services:
    """The shared objects, each created once by `make_gateway`."""

    settings: Settings
    memory: MemoryService
    servers: ModelServers
    tokenizer: TipTokenizer
    metrics: StepMetrics
    _seen: set[str] = field(default_factory=set)

    def first_seen(self, names: Iterable[str]) -> list[str]:
        """Return the names that this method has not been given before."""
        new = [name for name in names if name not in self._seen]
        self._seen.update(new)
        return new
