"""For `make test`, which has two workers: one trains for as long as the other needs for everything else."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_train.py")
