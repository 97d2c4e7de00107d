"""The exceptions of this package: each message is one line that names the key, the value and the fix."""

import signal


class Empo2Error(Exception):
    """Base class; the command line prints its message and exits with ``exit_code``."""

    exit_code = 1


class ConfigError(Empo2Error):
    """A setting is unknown, ill-typed or impossible."""

    exit_code = 2


class ProcessError(Empo2Error):
    """A process of the run ended when it should not have."""


class Preempted(Empo2Error):
    """A training was told to end early, and has saved a checkpoint if it had done a step."""

    exit_code = 128 + signal.SIGTERM


class GatewayError(Empo2Error):
    """The gateway refuses what the trainer needs of it."""


class NoUsableRollouts(Empo2Error):
    """No rollout of a step can be trained on."""
