"""What ``empo2 eval`` and ``empo2 adapt`` evaluate: a model that plays a panel, with results in a folder."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from empo2.recipe.config import Settings
from empo2.recipe.evaluation.panels import Panel
from empo2.recipe.files.checkpoints import NamedModel
from empo2.recipe.files.run_directory import put_memory
from empo2.recipe.launcher.serving import Served, serving
from empo2.recipe.preflight.checks import PLAYED, require
from empo2.recipe.preflight.start import Start
from empo2.recipe.redaction import redacted
from empo2.recipe.run_folder import saved_at


@dataclass(frozen=True)
class Evaluated:
    """What a command evaluates."""

    verb: str
    named: NamedModel
    panel: Panel
    settings: Settings  # with everything that the command line says, but for the model's path
    memory: Path | None  # the file that the gateway's memory begins with; None for an empty one
    folder: Path  # of the results

    @property
    def facts(self) -> dict[str, Any]:
        """What decides the results; a folder of results belongs to one set of facts."""
        values, checkpoint = redacted(self.settings.to_dict()), self.named.checkpoint
        more = {
            "critic": values["critic"] if self.settings.critic.path else None,
            "chat_template_kwargs": values["model"]["chat_template_kwargs"],
            "tool_parser": values["model"]["tool_parser"].removeprefix("auto"),
            "starts": values["tasks"]["starts"].removeprefix("first"),
            "other_server": values["gateway"]["other_server"],
            # Of a run that was removed and trained again the path is the same.
            "saved": checkpoint and saved_at(checkpoint),
        }
        return {
            "kind": self.verb,
            "model": str(self.named.checkpoint or self.named.model),
            "panel": self.panel.name,
            "rows": self.panel.checksum,
            "groups": self.panel.groups(),
            "memory_from": None if self.memory is None else str(self.memory.absolute()),
            "agent": values["agent"],
            "algorithm": {"success_return": values["algorithm"]["success_return"]},
            "sampling": {name: values["model"][name] for name in ("server", "val_temperature", "max_context_tokens")},
            "memory": values["memory"],
            **{name: value for name, value in more.items() if value},
        }

    def announce(self, missing: int, total: int) -> None:
        """Say what is evaluated, and how many of its episodes have no result yet."""
        print(
            f"model  {self.named.checkpoint or self.named.model}\n"
            f"panel  {self.panel.name}: {self.panel.description}\n"
            f"tasks  {len(self.panel.rows)} in {len(self.panel.groups())} groups; "
            f"{missing:,} of {total:,} episodes to play\nfolder {self.folder}",
            flush=True,
        )

    @contextlib.contextmanager
    def serving(self, memory: Path | None) -> Iterator[Served]:
        """Start all that plays episodes with a memory, unless a check refuses it, and stop it afterwards."""
        start = Start(self.settings, served=self.named.model)
        require(start, PLAYED)
        if start.agent:
            print(f"agent  {start.agent}", flush=True)
        model = self.named.resolve()
        put_memory(memory, self.folder)
        with serving(self.settings, self.folder, model) as served:
            yield served
