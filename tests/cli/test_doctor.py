"""`torchtpu doctor`: what it finds, and what it says when something is wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchtpu_cli
from torchtpu.cli import doctor, main


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The console script in a new process."""
    program = "import sys; sys.argv[0] = 'torchtpu'; import torchtpu_cli; sys.exit(torchtpu_cli.main())"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert torch.__version__ in out
    assert "largest difference from PyTorch CPU" in out
    assert "TORCHTPU_CPU_DEVICES" in out
    assert "BROKEN" not in out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["extension"]["loaded"] and Path(report["extension"]["path"]).exists()
    assert len(report["devices"]) == torch.tpu.device_count()
    assert report["check"]["difference"] <= report["check"]["tolerance"]
    assert report["versions"]["jax"]


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    right = doctor._work
    monkeypatch.setattr(doctor, "_work", lambda device: {k: v + (device != "cpu") for k, v in right(device).items()})
    assert main(["doctor"]) == 1
    assert "BROKEN: tpu:0 computes 64-bit integers with a difference of 1.0e+00" in capsys.readouterr().out


def test_wrong_variable() -> None:
    done = run("doctor", TORCHTPU_PLATFORM="cpu", TORCHTPU_CPU_DEVICES="many")
    assert done.returncode == 1
    assert "BROKEN: the device does not start: ValueError: TORCHTPU_CPU_DEVICES must be a number" in done.stdout
    assert "correct or unset the TORCHTPU_ variables" in done.stdout


def test_no_compiler(tmp_path: Path) -> None:
    done = run("doctor", CXX="no-such-compiler", TORCHTPU_CACHE_DIR=str(tmp_path), TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode == 1
    assert "found no C++ compiler (no-such-compiler): install one" in done.stderr
    assert torch.__version__.partition("+")[0] in done.stderr
    assert "Traceback" not in done.stderr


def test_versions_of_absent_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchtpu_cli, "DISTRIBUTIONS", ("torch", "no-such-distribution"))
    assert torchtpu_cli.versions()["no-such-distribution"] is None
