"""Fixed lists of task rows to evaluate on, as JSON files beside this module, and their reader."""

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from empo2.recipe.errors import ConfigError

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Panel:
    """A fixed list of tasks."""

    name: str  # of its file, without ``.json``
    description: str  # where the rows come from, in a sentence
    group: tuple[str, ...]  # fields by whose values the table lists the rows; empty for one line
    config: Mapping[str, Any]  # settings of the panel's world (agent, scope, range of the returns), over a profile
    rows: tuple[dict[str, Any], ...]  # each the input of a rollout

    @property
    def checksum(self) -> str:
        """Return 12 hexadecimal digits that change with any row."""
        return hashlib.sha256(json.dumps(self.rows, sort_keys=True).encode()).hexdigest()[:12]

    def groups(self) -> dict[str, list[int]]:
        """Return the indices of the rows of each group by its name, in the order of the file."""
        found: dict[str, list[int]] = {}
        for index, row in enumerate(self.rows):
            name = ", ".join(str(row[field]) for field in self.group) or "all"
            found.setdefault(name, []).append(index)
        return found


def names() -> list[str]:
    """Return the names of the panels in this package."""
    return sorted(file.stem for file in FOLDER.glob("*.json"))


def load_panel(
    name: str,
    changes: Sequence[str] = (),
    limit: int | None = None,
    only: Sequence[str] = (),
    *,
    option: str = "--panel",
) -> Panel:
    """Read a panel.

    Args:
        name: of a panel of this package, or the path of a file like those.
        changes: ``field=value`` for every row, the value as JSON or plain text.
        limit: rows kept of each group, from its beginning; None for all.
        only: groups that are kept; none for all.
        option: that named the panel, for errors.

    Raises:
        ConfigError: no such panel or group, a file that is none, or a change of a field that the rows do not have.
    """
    file = Path(name) if name.endswith(".json") else FOLDER / f"{name}.json"
    if not file.is_file():
        nearest = difflib.get_close_matches(name, names(), 1, cutoff=0.3) or names()
        raise ConfigError(f"{option} {name}: there is no such panel; nearest: {', '.join(nearest)}, or a .json file")
    try:
        content = json.loads(file.read_text())
        rows = [content["common"] | row for row in content["rows"]]
        panel = Panel(file.stem, content["description"], tuple(content["group"]), content["config"], tuple(rows))
        if not panel.groups():
            raise ValueError("no rows")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{option} {name}: not a panel ({error!r}); it has description, group, config, common and rows"
        ) from None
    changed = dict(_change(text, panel) for text in changes)
    groups = panel.groups()
    for group in only:
        if group not in groups:
            nearest = difflib.get_close_matches(group, groups, 3, cutoff=0.3) or groups
            raise ConfigError(f"--only {group}: panel {panel.name} has no such group; nearest: {', '.join(nearest)}")
    kept = sorted(index for group in dict.fromkeys(only or groups) for index in groups[group][:limit])
    rows = tuple(panel.rows[index] | changed for index in kept)
    return Panel(panel.name, panel.description, panel.group, panel.config, rows)


def _change(text: str, panel: Panel) -> tuple[str, Any]:
    field, equals, value = text.partition("=")
    if not equals or field not in panel.rows[0]:
        raise ConfigError(f"--row {text}: give FIELD=VALUE; the fields are {', '.join(panel.rows[0])}")
    try:
        return field, json.loads(value)
    except ValueError:
        return field, value
