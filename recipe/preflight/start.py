"""What the checks of a start look at; each part is read once, when it is first asked for."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.models import model_of
from empo2.recipe.files.tasks import Tasks, load_tasks
from empo2.recipe.preflight import cluster
from empo2.recipe.preflight.agent import check_agent
from empo2.recipe.preflight.estimate import Card, Shape
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.machine import Gpus, find_shape, read_gpus


@dataclass
class Start:
    """A start that is planned; attributes raise a ConfigError if they cannot be read."""

    settings: Settings
    _: KW_ONLY
    served: str | None = None  # the model, where ``model.path`` does not name it
    pretended: Card | None = None  # stands in the place of each of ``hardware.gpus_per_node``
    say: Callable[[str], object] = lambda _: None  # is told which nodes of a cluster are waited for
    seconds: float = 0  # that they are waited for
    errors: set[str] = field(default_factory=set, init=False)  # that checks have met

    @cached_property
    def model(self) -> str:
        """Folder or name that transformers and vLLM load; one that comes with a package is built at first."""
        return model_of(self.settings) if self.served is None else self.served

    @cached_property
    def shape(self) -> Shape | None:
        return find_shape(self.settings)

    @cached_property
    def agent(self) -> str | None:
        """What the agent's ``check()`` says."""
        return check_agent(self.settings)

    @cached_property
    def tasks(self) -> Tasks:
        return load_tasks(self.settings)

    @property
    def cluster(self) -> tuple[list[Finding], Gpus]:
        """What the nodes have and lack, and their GPUs."""
        if isinstance(self._cluster, ConfigError):
            raise self._cluster
        return self._cluster

    @cached_property
    def _cluster(self) -> tuple[list[Finding], Gpus] | ConfigError:
        try:  # nodes that have not come are waited for once
            return cluster.look_at_cluster(self.settings, self.model, say=self.say, seconds=self.seconds)
        except ConfigError as error:
            return error

    @cached_property
    def joins_cluster(self) -> bool:
        return self.settings.hardware.cluster is not None and self.pretended is None

    @cached_property
    def gpus(self) -> Gpus:
        """Those that the start may use."""
        if self.pretended is not None:
            return Gpus([self.pretended] * self.settings.hardware.gpus_per_node)
        if self.joins_cluster:
            return self.cluster[1]
        return Gpus([]) if self.settings.hardware.device == "cpu" else read_gpus()

    @property
    def card(self) -> Card | None:
        """The one with the least room, of those that Ray takes."""
        return min(self.gpus.cards[: self.settings.hardware.gpus], key=lambda card: card.usable, default=None)
