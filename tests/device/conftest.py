"""What the device tests share."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def two_devices():
    """Skip where the environment asked for one device only."""
    import torch

    if torch.tpu.device_count() < 2:
        pytest.skip("needs TORCHTPU_CPU_DEVICES=2")
