"""Whether an agent that offers tools has a model whose tool calls vLLM can read."""

from empo2.recipe.config import Settings
from empo2.recipe.errors import ConfigError
from empo2.recipe.launcher.tasks import Tasks
from empo2.recipe.launcher.tool_calls import ToolSupport, tool_support

_SECONDS = 60


def model_support(settings: Settings) -> ToolSupport:
    """Return what vLLM can do with the tool calls of the model of the settings.

    Raises:
        ConfigError: there is no such model.
    """
    from empo2.recipe.launcher.model_files import model_of

    return tool_support(settings.model, model_of(settings))


def check_tools(settings: Settings, tasks: Tasks, model: str) -> None:
    """Refuse a model without readable tool calls for an agent that needs them.

    Only for such a model the agent is started, with its first task and a scripted model, until its first call.

    Raises:
        ConfigError: the agent's first call offers tools, and vLLM would refuse it.
    """
    support = tool_support(settings.model, model)
    if not support.problem:
        return
    from empo2.recipe.retrofit.findings import offered_tools
    from empo2.recipe.retrofit.recorder import record

    trace = record(settings, tasks.train[0], ["1"], _SECONDS, first_call_only=True)
    if tools := offered_tools(trace.calls[:1]):
        raise ConfigError(f"model.path={settings.model.path!r}: the agent offers {', '.join(tools)}; {support.problem}")
