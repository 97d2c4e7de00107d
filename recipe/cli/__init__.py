"""The command line: one module per family of commands."""

from .main import main

__all__ = ["main"]
