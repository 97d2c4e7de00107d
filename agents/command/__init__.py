"""Any command line as an agent: ``empo2.agents.command:CommandAgent``."""

from .agent import CommandAgent, CommandFailed, parse

__all__ = ["CommandAgent", "CommandFailed", "parse"]
