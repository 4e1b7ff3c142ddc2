"""The process that holds libtpu: reads StableHLO programs as JSON lines and answers whether each compiles.

It runs as a script, not as part of the package: it needs JAX and libtpu, and importing the package would load PyTorch.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir


@functools.cache
def _device(topology: str) -> Any:
    """The first device of a topology; its client compiles and cannot run anything."""
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[0]


def _compile(text: str, topology: str) -> dict[str, Any]:
    """Compile one program for one device of a topology."""
    start = time.perf_counter()
    try:
        device = _device(topology)
        with mlir.make_ir_context():
            module = ir.Module.parse(text)
            executable = device.client.compile(module, _jax.DeviceList((device,)), xla_client.CompileOptions())
        answer = {"status": "ok", "message": "", "code_bytes": executable.get_compiled_memory_stats()}
        answer["code_bytes"] = answer["code_bytes"].generated_code_size_in_bytes
    except (jax.errors.JaxRuntimeError, RuntimeError, ValueError, ir.MLIRError) as error:
        answer = {"status": "fail", "message": str(error), "code_bytes": 0}
    return {**answer, "seconds": round(time.perf_counter() - start, 3)}


def main() -> None:
    """Answer until standard input ends; whatever libtpu prints on standard output goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(_compile(request["text"], request["topology"])) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
