"""Torch computes in one thread: on a busy machine two spend most of their time waiting for each other."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)
