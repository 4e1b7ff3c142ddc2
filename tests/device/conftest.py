"""The device tests run on two XLA:CPU devices, in a process that has not used JAX yet or already has two."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
os.environ.setdefault("TORCHTPU_CPU_DEVICES", "2")
sys.path.insert(0, str(Path(__file__).parent))

import torchtpu  # noqa: F401 - registers the device


@pytest.fixture
def two_devices():
    """Skip where the process was started with one device only."""
    import torch

    if torch.tpu.device_count() < 2:
        pytest.skip("needs TORCHTPU_CPU_DEVICES=2")
