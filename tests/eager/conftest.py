"""Every test of the engine runs in both modes: each operator a program, and operators recorded and fused."""

import pytest
import torch

import torchtpu  # noqa: F401


@pytest.fixture(params=["strict", "fused"], autouse=True)
def mode(request: pytest.FixtureRequest):
    """The mode that the test runs in."""
    with torch.tpu.set_eager_mode(request.param):
        yield request.param
