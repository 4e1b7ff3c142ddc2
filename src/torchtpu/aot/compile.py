"""Ask a child process whether a program compiles for a TPU topology.

libtpu ends its process on a failed internal check, so it never runs in this one. The child is started once, serves
many programs, and is replaced when it dies or does not answer in time.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from torchtpu.aot.topology import require_libtpu

__all__ = ["Compiler", "Result", "compile_for", "lower_for_tpu"]

TIMEOUT = 120.0
"""Seconds after which a compile is given up."""

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # the child compiles for TPUs and runs nothing
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # or a second process finds libtpu's lock file taken
    "TPU_SKIP_MDS_QUERY": "1",  # or libtpu asks a cloud's metadata server which chips it has
}


@dataclass(frozen=True)
class Result:
    """What became of a program.

    Attributes:
        status: ``"ok"``; ``"fail"``: the compiler refused it; ``"lower"``: JAX has no form of it for TPU;
            ``"crash"``: libtpu ended its process; ``"timeout"``.
        message: the error, in the compiler's words; empty when it compiled.
        seconds: time the compiler took.
        code_bytes: size of the TPU program.
        argument_bytes: HBM that the arguments take, of each device, as are all that follow.
        output_bytes: HBM that the results take.
        alias_bytes: HBM that arguments and results share because the arguments are donated.
        temporary_bytes: HBM for everything in between.
        peak_bytes: most HBM in use at one time.
        compiler_bytes: most memory that the compiler's process has taken on this machine.
        coordinates: of the chip of each device, in the order of the mesh.
    """

    status: str
    message: str = ""
    seconds: float = 0.0
    code_bytes: int = 0
    argument_bytes: int = 0
    output_bytes: int = 0
    alias_bytes: int = 0
    temporary_bytes: int = 0
    peak_bytes: int = 0
    compiler_bytes: int = 0
    coordinates: tuple[tuple[int, ...], ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it compiled."""
        return self.status == "ok"


class Compiler:
    """A child process with libtpu; use it as a context manager, from one thread.

    Args:
        timeout: seconds after which a compile is given up and the child replaced.

    Raises:
        ModuleNotFoundError: libtpu is not installed.
    """

    def __init__(self, timeout: float = TIMEOUT) -> None:
        require_libtpu()
        self.timeout = timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None

    def __enter__(self) -> Compiler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def compile(
        self,
        text: str,
        topology: str,
        *,
        mesh: Sequence[int] | None = None,
        boxes: bool = False,
        dump: str | None = None,
        save: str | None = None,
    ) -> Result:
        """Compile a StableHLO module.

        Args:
            text: the module.
            topology: such as ``"v6e:2x2"``.
            mesh: sizes of the axes of the mesh that the module is partitioned over, the slowest first; their product
                is the number of devices. None: a program of one device.
            boxes: whether the devices of an axis are to be a box on the torus, which suits all-to-all, rather than
                rings.
            dump: a folder for the compiler's own text of the optimised program.
            save: a file for the serialised executable.
        """
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        options = {"xla_dump_to": dump, "xla_dump_hlo_as_text": True} if dump else {}
        with tempfile.NamedTemporaryFile("w", suffix=".mlir") as program:
            program.write(text)
            program.flush()
            request: dict[str, Any] = {"program": program.name, "topology": topology, "mesh": mesh, "boxes": boxes}
            request |= {"options": options, "save": save}
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
            except BrokenPipeError:
                return Result("crash", self._last_words())
            try:
                ready, _, _ = select.select([process.stdout], [], [], self.timeout)
            except KeyboardInterrupt:
                self.close()  # the compiler does not answer while it works
                raise
            if not ready:
                self.close()
                return Result("timeout", f"not compiled after {self.timeout:.0f} s", self.timeout)
            line = process.stdout.readline()
        if not line:
            return Result("crash", self._last_words())
        answer = json.loads(line)
        return Result(**{**answer, "coordinates": tuple(map(tuple, answer.get("coordinates", ())))})

    def close(self) -> None:
        """End the child; the next compile starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        self._process = subprocess.Popen(
            # -P: the script's folder is not where the child looks for modules
            [sys.executable, "-P", str(Path(__file__).with_name("serve.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **_ENVIRONMENT},
        )
        return self._process

    def _last_words(self) -> str:
        """Why the child died, from its exit status and what it wrote; it is cleared away."""
        assert self._process is not None
        code = self._process.wait()
        self._log.seek(0)
        lines = [x.strip() for x in self._log.read().decode(errors="replace").splitlines()]
        telling = [x for x in lines if x.startswith("F") or "Check failed" in x or "Error" in x] or lines[-3:]
        self.close()
        return f"the compiler's process ended with status {code}: {' '.join(telling[-2:])[:600]}"


def lower_for_tpu(function: Callable[..., Any], avals: Sequence[Any]) -> str:
    """StableHLO of a function of arrays, in the form it takes on a TPU.

    Args:
        function: what ``jax.jit`` takes.
        avals: shapes and dtypes of its arguments (``jax.ShapeDtypeStruct``), 64-bit ones as they are.

    Raises:
        Exception: JAX has no rule for TPU (the kind depends on the primitive).
    """
    with jax.enable_x64(True):
        return jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",)).as_text()


_shared: Compiler | None = None


def compile_for(function: Callable[..., Any], avals: Sequence[Any], topology: str = "v6e:2x2") -> Result:
    """Whether a function compiles for a TPU, in a child process that all calls share.

    Raises:
        ModuleNotFoundError: libtpu is not installed.
    """
    global _shared
    if _shared is None:
        _shared = Compiler()
        atexit.register(_shared.close)
    try:
        text = lower_for_tpu(function, avals)
    except Exception as error:
        return Result("lower", f"{type(error).__name__}: {error}")
    return _shared.compile(text, topology)
