"""What a check finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line about the settings or the machine.

    Attributes:
        said: how it is; "" if ``fix`` says that, too, as a ConfigError does.
        fix: what would be right; "" if nothing is wrong.
        weight: whether what is wrong refuses a start, or only warns of it: an estimate, or advice.
    """

    name: str
    said: str
    fix: str = ""
    weight: Literal["refuses", "estimate", "advice"] = "refuses"

    @property
    def text(self) -> str:
        return "; ".join(filter(None, [self.said, self.fix]))

    @property
    def refuses(self) -> bool:
        return bool(self.fix) and self.weight == "refuses"

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.said else self.fix
