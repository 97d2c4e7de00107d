"""The rows that say what one episode of MapReader plays."""

from dataclasses import dataclass
from functools import partial

from ..houses.tasks import HouseEpisode, load_houses
from .levels import LEVELS, PANELS


@dataclass(frozen=True, kw_only=True)
class Episode(HouseEpisode):
    """An episode of MapReader."""

    variables = "MAPREADER"
    game = "mapreader"
    levels = LEVELS
    panels = PANELS


load = partial(load_houses, Episode)
