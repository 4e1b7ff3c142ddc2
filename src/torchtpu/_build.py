"""Build the C++ extension against the installed torch, once, and keep it in a cache.

PyTorch's C++ interface is not binary compatible between versions, so the extension is compiled on the user's machine
at first use. A cached extension is found by torch version, Python tag and a hash of the sources, and loads in
milliseconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch

SOURCES = Path(__file__).parent / "csrc"
MODULE = "torchtpu._C"
OLDEST, TOO_NEW = (2, 13), (2, 16)
FLAGS = ["-O2", "-fvisibility=hidden", "-Wall", "-Wno-unused-function"]

# Runs in a process of its own: cpp_extension loads what it built, and only the published file may be loaded here.
_BUILD_PROGRAM = """
import json, sys
from torch.utils import cpp_extension
job = json.loads(sys.argv[1])
cpp_extension.load(
    "_C", job["sources"], extra_cflags=job["flags"], build_directory=job["folder"], is_python_module=False
)
"""


class BuildError(ImportError):
    """The C++ extension could not be built; the message says what to install."""


def load_extension() -> ModuleType:
    """The extension module, built first if the cache does not hold it.

    Returns:
        The module ``torchtpu._C``.

    Raises:
        BuildError: if torch is not supported, or a compiler is missing or fails.
    """
    if MODULE in sys.modules:
        return sys.modules[MODULE]
    check_torch(torch.__version__)
    path = cached_path()
    if not path.exists():
        build(path)
    loader = importlib.machinery.ExtensionFileLoader(MODULE, str(path))
    spec = importlib.util.spec_from_file_location(MODULE, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[MODULE] = module
    return module


def check_torch(version: str) -> None:
    """Raise unless this version of torch is one the sources are written for."""
    release = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if not OLDEST <= release < TOO_NEW:
        raise BuildError(
            f"torchtpu supports torch {OLDEST[0]}.{OLDEST[1]} to {TOO_NEW[0]}.{TOO_NEW[1] - 1}, and torch {version} is "
            f"installed: pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{TOO_NEW[0]}.{TOO_NEW[1]}'"
        )


def cache_dir() -> Path:
    """``TORCHTPU_CACHE_DIR``, or torchtpu's folder in the user's cache."""
    chosen = os.environ.get("TORCHTPU_CACHE_DIR")
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "torchtpu"


def cached_path() -> Path:
    """Where the extension for this torch, this Python and these sources is, or will be."""
    digest = hashlib.sha256(" ".join([torch.__version__, str(torch.version.git_version), *FLAGS]).encode())
    for source in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    name = f"torch-{torch.__version__}-{sys.implementation.cache_tag}-{digest.hexdigest()[:16]}"
    return cache_dir() / name / "_C.so"


def build(path: Path) -> None:
    """Compile the sources and publish the extension at `path`; of several processes, one builds and the others wait."""
    environment = _toolchain()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / "lock"):
            if path.exists():
                return
            print(
                f"torchtpu: building the C++ extension for torch {torch.__version__} (once, about 30 s) ...",
                file=sys.stderr,
                flush=True,
            )
            with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
                _compile(Path(folder), environment)
                os.replace(Path(folder) / "_C.so", path)
    except OSError as error:
        raise BuildError(
            f"torchtpu cannot keep its C++ extension in {cache_dir()} ({error}): set TORCHTPU_CACHE_DIR "
            "to a writable folder"
        ) from error


def _toolchain() -> dict[str, str]:
    """Environment for the build. Raises BuildError if something needed is missing."""
    environment = dict(os.environ)
    # pip puts ninja next to the interpreter, which need not be on PATH.
    environment["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), environment.get("PATH", os.defpath)])
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    compiler = environment.get("CXX", "c++")
    if shutil.which(compiler.split()[0], path=environment["PATH"]) is None:
        raise BuildError(
            f"torchtpu builds a C++ extension at first use and found no C++ compiler ({compiler}): install one "
            "(Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++; macOS: xcode-select --install), "
            "or set CXX"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        raise BuildError(
            "torchtpu builds a C++ extension at first use and found no Python headers: install them "
            "(Debian, Ubuntu: apt-get install python3-dev; Fedora: dnf install python3-devel)"
        )
    if shutil.which("ninja", path=environment["PATH"]) is None:
        raise BuildError("torchtpu builds a C++ extension at first use and found no ninja: pip install ninja")
    return environment


def _compile(folder: Path, environment: dict[str, str]) -> None:
    job = {"sources": _units(folder), "flags": [*FLAGS, f"-I{SOURCES}"], "folder": str(folder)}
    done = subprocess.run(
        [sys.executable, "-c", _BUILD_PROGRAM, json.dumps(job)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    )
    if done.returncode == 0 and (folder / "_C.so").exists():
        return
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if re.search(r"\berror\b|No module named|not found", line)] or lines[-10:]
    raise BuildError(
        f"torchtpu's C++ extension does not build for torch {torch.__version__}:\n  " + "\n  ".join(wrong[:10])
    )


def _units(folder: Path) -> list[str]:
    """Gather the sources in two files: reading torch's headers takes most of the time, and so happens only twice."""
    names = [path.name for path in sorted(SOURCES.glob("*.cpp"))]
    first = [name for name in names if name in ("autocast.cpp", "views.cpp", "generator.cpp")]
    units = []
    for i, members in enumerate([first, [name for name in names if name not in first]]):
        unit = folder / f"unit{i}.cpp"
        unit.write_text("".join(f'#include "{name}"\n' for name in members))
        units.append(str(unit))
    return units


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes. The kernel drops it when its holder dies: nobody waits for a dead process."""
    import fcntl

    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
