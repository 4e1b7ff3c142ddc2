"""Compiled programs on disk, so that a second process does not compile them again.

One file per program, in a folder named after everything that a compiled program depends on besides itself: versions
of torchtpu (its sources), torch, JAX and libtpu, the platform and the kind of chip, the host's processor, and the
flags of XLA. Files appear whole (written aside and renamed), are checked when read, and the least recently used go
when the folder outgrows its limit, so any number of processes can share it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pickle
import platform
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.experimental import serialize_executable

from torchtpu._build import cache_dir

__all__ = ["digest", "fingerprint", "limit", "load", "pack", "save", "unpack"]

_MAGIC = b"torchtpu program 1\n"
_DIGEST = 32
_SWEEP_EVERY = 64
_FLAGS = ("XLA_", "LIBTPU_", "JAX_", "TPU_")
_NOT_FLAGS = ("JAX_PLATFORMS", "TPU_VISIBLE_CHIPS", "XLA_PYTHON_CLIENT")

_saves = 0
_lapack_ready = False


def digest(*parts: bytes | str) -> str:
    """A key: the hash of its parts."""
    h = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        h.update(len(data).to_bytes(8, "little"))
        h.update(data)
    return h.hexdigest()


def limit() -> int:
    """Bytes that the cache may take (``TORCHTPU_CACHE_LIMIT``, in MiB; 0 turns it off).

    Raises:
        ValueError: the variable is not a number.
    """
    given = os.environ.get("TORCHTPU_CACHE_LIMIT", "2048")
    try:
        return int(float(given) * 2**20)
    except ValueError:
        raise ValueError(f"TORCHTPU_CACHE_LIMIT is a number of MiB, or 0 to keep no programs: got {given!r}") from None


@functools.cache
def fingerprint(device: jax.Device) -> str:
    """The hash of what decides how a program compiles, besides the program."""
    package = Path(__file__).parents[1]
    sources = [p.relative_to(package).as_posix().encode() + p.read_bytes() for p in sorted(package.rglob("*.py"))]
    facts = [torch.__version__, jax.__version__, device.platform, device.device_kind, device.client.platform_version]
    for name in ("jaxlib", "libtpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts.append(f"{name} {importlib.metadata.version(name)}")
    if device.platform == "cpu":
        facts += [platform.machine(), _processor(), str(os.cpu_count())]
    facts += [
        f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(_FLAGS) and not k.startswith(_NOT_FLAGS)
    ]
    return digest(*sources, *facts)


def _processor() -> str:
    """The instruction sets that XLA:CPU compiles for."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        lines = file.read().split("\n\n", 1)[0].splitlines()
        return "\n".join(x for x in lines if x.split("\t")[0] in ("model name", "flags", "Features", "CPU part"))
    return platform.processor()


def _folder(device: jax.Device) -> Path:
    return cache_dir() / "programs" / fingerprint(device)[:16]


def load(key: str, device: jax.Device, mesh: Sequence[jax.Device] | None = None) -> Any | None:
    """The compiled program kept under a key, ready to run on ``device``, or on a mesh that begins with it; None if
    there is none.

    A file that is damaged or that this JAX cannot load is removed, with a warning.
    """
    if not limit():
        return None
    path = _folder(device) / f"{key}.{device.id}"
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        body = data[len(_MAGIC) + _DIGEST :]
        if not data.startswith(_MAGIC) or hashlib.sha256(body).digest() != data[len(_MAGIC) : -len(body) or None]:
            raise ValueError("its checksum does not match")
        program = unpack(body, device, mesh)
    except Exception as error:
        warnings.warn(f"torchtpu discards the damaged cache file {path} ({error}) and compiles", stacklevel=2)
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now: it goes last
    return program


def save(key: str, device: jax.Device, program: Any, module: str) -> None:
    """Keep a compiled program under a key; ``module`` is its StableHLO text.

    Programs that call back into Python are not kept. A disk that is full or read-only costs a warning.
    """
    global _saves
    if not limit() or "python_cpu_callback" in module:
        return
    body = pack(program, module)
    folder = _folder(device)
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(_MAGIC + hashlib.sha256(body).digest() + body)
        os.replace(file.name, folder / f"{key}.{device.id}")
    except OSError as error:
        warnings.warn(f"torchtpu cannot keep compiled programs in {folder}: {error}", stacklevel=2)
        return
    _saves += 1
    if _saves % _SWEEP_EVERY == 1:
        _sweep(folder.parent)


def pack(program: Any, module: str) -> bytes:
    """A compiled program as bytes; ``module`` is its StableHLO text."""
    return pickle.dumps(("lapack" in module, *serialize_executable.serialize(program)))


def unpack(body: bytes, device: jax.Device, mesh: Sequence[jax.Device] | None = None) -> Any:
    """The program behind ``pack``'s bytes, ready to run on ``device`` or on a mesh that begins with it. They are a
    pickle: reading it runs whatever its author put there.
    """
    needs_lapack, executable, inputs, outputs = pickle.loads(body)
    if needs_lapack:
        _prepare_lapack()
    return serialize_executable.deserialize_and_load(executable, inputs, outputs, device.client, list(mesh or [device]))


def _sweep(root: Path) -> None:
    """Remove the least recently used programs, of other versions too, until the cache is within four fifths of its
    limit.
    """
    files = []
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):  # another process removed it
            status = path.stat()
            files.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in files)
    if total <= limit():
        return
    for _, size, path in sorted(files):
        with contextlib.suppress(OSError):
            path.unlink()
        total -= size
        if total <= limit() * 4 // 5:
            return


def _prepare_lapack() -> None:
    """XLA:CPU finds LAPACK through SciPy's, which JAX looks up when it lowers something that needs it."""
    global _lapack_ready
    if not _lapack_ready:
        jax.jit(jnp.linalg.cholesky).lower(jax.ShapeDtypeStruct((1, 1), jnp.float32))
        _lapack_ready = True
