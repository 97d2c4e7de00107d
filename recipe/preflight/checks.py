"""THE LIST of checks before a start. ``empo2 check`` prints what they find; the other commands are refused by it."""

from collections.abc import Callable, Iterable, Mapping

from empo2.recipe.errors import ConfigError
from empo2.recipe.preflight import machine_checks as machine
from empo2.recipe.preflight import settings_checks as settings
from empo2.recipe.preflight.finding import Finding
from empo2.recipe.preflight.start import Start

type Checks = Mapping[str, Callable[[Start], Iterable[Finding] | None]]

AGENT: Checks = {"agent": settings.agent, "state": settings.state, "calls": settings.calls, "traces": settings.traces}
TRAINER: Checks = {
    "environment": settings.environment,
    "model": settings.model,
    "tasks": settings.tasks,
    "verl": settings.options,
    "run": settings.run_folder,
    "advice": settings.advice,
}
# Of a training, in two parts: settings that are wrong everywhere, and what this machine lacks. HOST is for a trainer
# whose gateway runs already.
SETTINGS: Checks = {**AGENT, **TRAINER, "concurrency": settings.concurrency, "first call": settings.first_call}
HOST: Checks = {
    "nodes": machine.nodes,
    "GPUs": machine.gpus,
    "GPU memory": machine.gpu_memory,
    "compiler": machine.compiler,
    "host memory": machine.host_memory,
    "cores": machine.cores,
    "disk": machine.disk,
    "model files": machine.model_files,
    "shared memory": machine.shared_memory,
}
MACHINE: Checks = {**HOST, "memory file": machine.memory_file_system, "port": machine.port}
FETCHED: Checks = {"model": settings.hub_model}  # last, and not for `empo2 check`: files of the hub are fetched
PROMPT: Checks = {"first prompt": settings.first_prompt}  # for `empo2 check` alone: it starts the agent
SERVED: Checks = {
    "environment": settings.environment,
    "traces": settings.traces,
    "calls": settings.calls,
    "server": settings.served,
    "GPUs": machine.gpus,
    "compiler": machine.compiler,
    "port": machine.port,
}
PLAYED: Checks = {**SERVED, **AGENT, "concurrency": settings.concurrency_here}


def look(start: Start, checks: Checks) -> list[Finding]:
    """Return what checks find; a ConfigError is a finding of the first check that meets it."""
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check(start) or ()
        except ConfigError as error:
            if str(error) not in start.errors:
                found.append(Finding(name, "", str(error)))
            start.errors.add(str(error))
    return found


def require(start: Start, *checks: Checks) -> list[str]:
    """Refuse a start in which a check finds something wrong; return warnings of what may be.

    Raises:
        ConfigError: names all that is wrong in the first of the parts in which anything is.
    """
    found: list[Finding] = []
    for part in checks:
        found += look(start, part)
        if refused := [str(each) for each in found if each.refuses]:
            raise ConfigError(" | ".join(refused))
    return [f"{each}{' (estimated)' if each.weight == 'estimate' else ''}" for each in found if each.fix]
