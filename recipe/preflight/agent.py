"""Whether an agent can be started, and its tasks be played."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from empo2.recipe.config import Settings, imported
from empo2.recipe.errors import ConfigError
from empo2.recipe.files.tasks import agent_variables
from empo2.recipe.files.tool_calls import tool_support
from empo2.recipe.protocol import scope_of

if TYPE_CHECKING:
    from empo2.recipe.retrofit.recorder import Call

_CALL_SECONDS = 60


def check_agent(settings: Settings) -> str | None:
    """Import the agent's class, so that an error shows here instead of in each rollout's log.

    Return the line of the class's ``check()``; None if it has no ``check()`` or returns none.
    """
    name = settings.agent.name
    loaded = imported(name, "agent.class")
    if not hasattr(loaded, "run"):
        raise ConfigError(f"agent.class={name!r}: has no run() method, which agent-lightning calls")
    try:
        return loaded.check() if hasattr(loaded, "check") else None
    except Exception as error:
        raise ConfigError(f"agent.class={name!r}: {error}") from None


def check_fields(settings: Settings, where: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows without a field that ``agent.env`` or ``memory.scope`` names, or with one that no variable holds.

    Args:
        where: says whose they are.
    """
    for number, row in enumerate(rows):
        try:
            agent_variables(row, settings.agent.env)
        except ConfigError as error:
            raise ConfigError(f"{where}, row {number}: {error}") from None
        scope_of(row, settings.memory.scope)


def check_rows(settings: Settings, where: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Refuse rows as `check_fields`, and those that do not fit a text game of this package."""
    check_fields(settings, where, rows)
    if (episode := getattr(imported(settings.agent.name, "agent.class"), "episode", None)) is None:
        return
    for number, row in enumerate(rows):
        try:
            episode(**row)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}, row {number}: {error}") from None


def check_first_call(settings: Settings, task: Mapping[str, Any], model: str, *, sees: bool) -> None:
    """Refuse an agent whose first call offers tools to a model without readable tool calls, or has images.

    The agent is started, with a task and a scripted model, only for such a model, or one that ``sees`` images: the
    server of any other refuses images itself.

    Args:
        model: a folder or name of the hub that has its chat template.
    """
    problem = tool_support(settings.model, model).problem
    if not (problem or sees):
        return
    from empo2.recipe.retrofit.findings import image_calls, offered_tools

    calls = first_calls(settings, task)
    if problem and (tools := offered_tools(calls)):
        raise ConfigError(f"model.path={settings.model.path!r}: the agent offers {', '.join(tools)}; {problem}")
    if problem := image_calls(calls):
        raise ConfigError(f"agent.class={settings.agent.name!r}: {problem}")


def first_calls(settings: Settings, task: Mapping[str, Any]) -> "list[Call]":
    """Start the agent, with a task and a scripted model, until its first call is answered; return its calls."""
    from empo2.recipe.retrofit.recorder import record

    return record(settings, dict(task), (), _CALL_SECONDS, first_call_only=True).calls
