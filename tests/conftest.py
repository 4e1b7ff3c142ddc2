"""Tests run on XLA:CPU unless the environment says otherwise, with two devices, in whatever order."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
os.environ.setdefault("TORCHTPU_CPU_DEVICES", "2")
os.environ.setdefault("TORCHTPU_CACHE_LIMIT", "0")  # tests count compiles
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_sessionstart() -> None:
    """Start the device before a test that uses JAX by itself does: the number of devices is fixed then."""
    import torch

    import torchtpu  # noqa: F401

    torch.tpu.init()


@pytest.fixture(autouse=True)
def state_of_one_test() -> Iterator[None]:
    """Operators that a test runs on the CPU on purpose do not count in the next, nor do sizes that it saw change."""
    yield
    import torch

    from torchtpu.eager import fallback, growth

    growth.forget()
    if torch.tpu.fallback_count():
        fallback.reset_fallbacks()
