"""What some tests can only do with packages that `make setup` does not install."""

import importlib.metadata

import pytest


def need(*packages: str, by: str = "make frameworks") -> None:
    """Skip the test, saying how to install them, unless all are there."""
    for package in packages:
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}: {by}")
