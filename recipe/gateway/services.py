"""The objects that all calls and reflections of the gateway share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import structlog

from empo2.memory import MemoryService
from empo2.recipe.config import Settings
from empo2.recipe.gateway.gate import PolicyGate
from empo2.recipe.gateway.logs import described
from empo2.recipe.gateway.metrics import StepMetrics
from empo2.recipe.gateway.tips.state import StateReader
from empo2.recipe.gateway.tips.text import shown_tip
from empo2.recipe.gateway.tokens.tokenizer import TipTokenizer
from empo2.recipe.gateway.traces import Traces
from empo2.recipe.gateway.upstream import ModelServers

log = structlog.get_logger()


@dataclass(frozen=True)
class Services:
    """The shared objects, each created once by `make_gateway`."""

    settings: Settings
    memory: MemoryService
    servers: ModelServers
    tokenizer: TipTokenizer
    state: StateReader
    traces: Traces
    metrics: StepMetrics = field(default_factory=StepMetrics)
    gate: PolicyGate = field(default_factory=PolicyGate)

    @cached_property
    def shown(self) -> Callable[[str], str]:
        """Return `shown_tip` of the run; the same tips are shown many times, and cleaning one takes milliseconds."""
        words, special_tokens = self.settings.reflection.max_words, self.tokenizer.special_tokens
        return lru_cache(maxsize=4096)(lambda text: shown_tip(text, special_tokens, words))

    def memory_failed(self, error: Exception) -> None:
        """Count a failure of the memory, which costs no call more than its tips or its visit."""
        log.error("the memory failed", error=described(error))
        self.metrics.counts["memory_failures"] += 1
