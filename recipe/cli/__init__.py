"""The command line: one file a verb family."""

from .main import main

__all__ = ["main"]
