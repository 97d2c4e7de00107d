"""What a check finds."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line about the settings or the machine."""

    name: str
    said: str  # how it is; "" if ``fix`` says that, too, as a ConfigError does
    fix: str = ""  # what would be right; "" if nothing is wrong
    # Whether what is wrong refuses a start, or only warns of it: an estimate, or advice.
    weight: Literal["refuses", "estimate", "advice"] = "refuses"

    @property
    def text(self) -> str:
        return "; ".join(filter(None, [self.said, self.fix]))

    @property
    def refuses(self) -> bool:
        return bool(self.fix) and self.weight == "refuses"

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" if self.said else self.fix
