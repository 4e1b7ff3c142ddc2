"""A Llama over eight emulated devices, in a process of its own: the number of devices is fixed when it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

JOB = Path(__file__).parent / "job.py"
SOURCE = Path(__file__).parents[2] / "src"


def run(*arguments: str) -> dict[str, Any]:
    """What the job found, as it prints it in its last line."""
    env = {**os.environ, "TORCHTPU_CPU_DEVICES": "8", "TORCHTPU_PLATFORM": "cpu", "PYTHONPATH": str(SOURCE)}
    # The test is of what XLA divides, not of the code that LLVM makes of it.
    env["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    done = subprocess.run([sys.executable, str(JOB), *arguments], env=env, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_training_and_memory() -> None:
    """Losses are those of one device. No device holds more than its share: of parameters, gradients and optimizer
    state, of activations, and of the one layer that is gathered.
    """
    pytest.importorskip("transformers")
    found = run("llama", "fsdp=8")
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)
    assert found["compiles"][-1] == 0
    assert found["whole"] <= 1  # one parameter is gathered, or one gradient summed, at a time
    for program in found["programs"]:
        assert program["peak"] <= 1.1 * program["ideal"], program


@pytest.mark.heavy
@pytest.mark.parametrize("plan", ["fsdp=8", "fsdp=4,tp=2", "dp=2,tp=4"])
def test_generate(plan: str) -> None:
    pytest.importorskip("transformers")
    found = run("generate", plan)
    assert found["tokens"] == found["alone"]


@pytest.mark.heavy
@pytest.mark.parametrize("plan", ["ep=4,fsdp=2", "ep=8"])
def test_experts(plan: str) -> None:
    pytest.importorskip("transformers")
    found = run("experts", plan)
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("plan", ["fsdp=4,tp=2", "dp=2,tp=4"])
def test_other_plans(plan: str) -> None:
    pytest.importorskip("transformers")
    found = run("llama", plan)
    assert found["losses"] == pytest.approx(found["alone"], rel=1e-5)
