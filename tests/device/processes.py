"""Run a program in a process of its own: what a process does once can only be tested so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"


def run(program: str, *, check: bool = True, **environment: str | None) -> subprocess.CompletedProcess[str]:
    """Run a Python program with the package on its path and without autoload.

    Args:
        program: the source text.
        check: fail the test if the program fails.
        environment: variables to set, or to unset (None).
    """
    env = {**os.environ, "PYTHONPATH": str(SOURCE), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "TORCHTPU_PLATFORM": "cpu"}
    for name, value in environment.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    if check:
        assert done.returncode == 0, done.stdout + done.stderr
    return done
