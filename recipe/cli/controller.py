"""``empo2 controller``."""

import os
import signal
from typing import Annotated

import typer

from empo2.recipe import interruption
from empo2.recipe.cli.options import SettingsOptions, with_options
from empo2.recipe.errors import ConfigError

EXAMPLES = """\b
examples:
  EMPO2_KEY=... empo2 controller --gateway http://10.0.0.5:8080 --config empo2.yaml agent.concurrency=64
  EMPO2_KEY=... empo2 controller --gateway http://gateway:8080 --kubernetes agents

Of the settings, key=value, it reads agent.class, which it imports once to fork each agent from, agent.concurrency and
gateway.traces; what an agent is told of its task comes with the rollout. Each agent gets a key that opens its own
rollout only.
"""


@with_options
def controller(
    options: SettingsOptions,
    gateway: Annotated[
        str, typer.Option(metavar="URL", help="The gateway's address; its key is the variable EMPO2_KEY.")
    ],
    kubernetes: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE",
            help="Start agents as Jobs of this namespace, from verl.agentlightning.k8s.job_template_path of the run.",
        ),
    ] = None,
) -> None:
    """Start the controller alone, which starts the agents of a gateway: on this machine, or on Kubernetes."""
    from empo2.recipe.config import TRACES_VARIABLES, traces_endpoint
    from empo2.recipe.controller.run import check_gateway, run_on_kubernetes, run_on_this_machine
    from empo2.recipe.network import direct, raise_descriptor_limit
    from empo2.recipe.protocol import KEY

    settings = options.settings()
    url, key = gateway.rstrip("/"), os.environ.pop(KEY, "")  # agents inherit the environment
    os.environ |= direct(url)
    if endpoint := traces_endpoint(settings):
        os.environ[TRACES_VARIABLES[0]] = endpoint
    agent = settings.agent.name if kubernetes is None else ""  # or says that there is none
    if kubernetes is None and not settings.agent.concurrency:  # as in the file of a run that others play
        raise ConfigError("agent.concurrency=0: starts no agent here; say how many this machine plays at once")
    check_gateway(url, key)
    interruption.check()
    if kubernetes is None:
        raise_descriptor_limit()  # two for each agent
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup; else its terminal's end is its own
            signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
        run_on_this_machine(url, key, agent, settings.agent.concurrency)
    else:
        run_on_kubernetes(url, key, kubernetes)
