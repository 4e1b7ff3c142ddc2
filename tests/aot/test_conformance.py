"""The command that compiles the operator database for TPUs, on two entries."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from torchtpu.aot import TOPOLOGIES, libtpu_missing

pytestmark = pytest.mark.skipif(libtpu_missing() is not None, reason=libtpu_missing() or "")
ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> None:
    """Run ``python -m conformance.tpu``."""
    subprocess.run([sys.executable, "-m", "conformance.tpu", *arguments], cwd=ROOT, check=True, timeout=300)


def test_run_resumes_and_reports(tmp_path: Path) -> None:
    """Programs of the forward and backward pass compile; what has a data-dependent size is told apart."""
    select = ["--only", "^(mul|unique)$", "--dtypes", "float32", "--results", str(tmp_path)]
    for _ in range(2):  # the second time there is nothing left to do
        command("run", *select, "--topologies", TOPOLOGIES["v6e"])
    lines = (tmp_path / "entries.jsonl").read_text().splitlines()
    found = {(r["entry"], r["topology"]): r for r in map(json.loads, lines)}
    assert len(lines) == len(found) == 2
    assert found["mul", TOPOLOGIES["v6e"]]["status"] == "ok"
    assert found["mul", TOPOLOGIES["v6e"]]["programs"] >= 2
    assert found["unique", TOPOLOGIES["v6e"]]["status"] == "host"
    command("report", "--results", str(tmp_path), "--docs", str(tmp_path))
    report = (tmp_path / "tpu-compile.md").read_text()
    assert "## On the host\n\n- `unique` (float32; v6e):" in report
    assert "## Does not compile\n\nNothing." in report
