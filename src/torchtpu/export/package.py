"""The file: an uncompressed zip archive of parts, and a manifest with the digest of each.

======================  ==============================================================================
``manifest.json``       format, versions, platforms, arguments, results, digests
``program.jax``         StableHLO for the platforms, as ``jax.export`` serialises it
``weights.safetensors`` parameters, buffers and constants by name
``executables/...``     optional: compiled programs; a pickle, read only from files that are trusted
======================  ==============================================================================
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

__all__ = [
    "FORMAT",
    "MANIFEST",
    "PROGRAM",
    "WEIGHTS",
    "ExportError",
    "Package",
    "PackageError",
    "require_extras",
    "write",
]

FORMAT = 1
"""Version of the format; a package of a newer one is refused."""

MANIFEST, PROGRAM, WEIGHTS = "manifest.json", "program.jax", "weights.safetensors"

_FIELDS = ("parts", "platforms", "calling_convention", "arguments", "inputs", "outputs", "dims", "draws", "checks")
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same program gives the same file


class ExportError(RuntimeError):
    """A model cannot be saved as a package; the message says which part of it and why."""


class PackageError(RuntimeError):
    """A package cannot be loaded: damaged, of another version, or for another platform."""


def require_extras() -> None:
    """Raise if a package that reading and writing needs is not installed.

    Raises:
        ModuleNotFoundError: the message says how to install it.
    """
    for name in ("flatbuffers", "safetensors"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"torchtpu.export needs {name}: pip install 'torchtpu[export]'", name=name
            ) from error


def write(path: str | os.PathLike[str], manifest: dict[str, Any], parts: dict[str, bytes]) -> None:
    """Write a package; the file appears whole or not at all.

    Args:
        path: the file, replaced if it is there.
        manifest: everything but ``format`` and ``parts``, which are added.
        parts: contents by name.
    """
    path = Path(path)
    digests = {name: {"sha256": hashlib.sha256(x).hexdigest(), "bytes": len(x)} for name, x in parts.items()}
    text = json.dumps({"format": FORMAT, **manifest, "parts": digests}, indent=1).encode()
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as file:
        try:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for name, content in {MANIFEST: text, **parts}.items():
                    archive.writestr(zipfile.ZipInfo(name, _EPOCH), content)
            file.flush()
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    """The process's mask for new files, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


class Package:
    """A package for reading: the file, or the folder that unzipping it makes.

    Attributes:
        manifest: what the package says of itself.

    Raises:
        FileNotFoundError: there is nothing at the path.
        PackageError: it is no package, is damaged, or is of a newer format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.exists():
            raise FileNotFoundError(f"no package at {self.path}")
        try:
            self.manifest: dict[str, Any] = json.loads(self._content(MANIFEST))
            version = self.manifest["format"]
            missing = [field for field in _FIELDS if field not in self.manifest]
            if type(version) is not int or (version <= FORMAT and missing):
                raise ValueError(f"the manifest has no {', '.join(missing) or 'whole number as its format'}")
        except (ValueError, KeyError, TypeError) as error:
            raise PackageError(f"{self.path} is not a package, or is damaged: {error}") from error
        if version > FORMAT:
            raise PackageError(
                f"{self.path} has format {version}; this torchtpu reads up to {FORMAT}: install the torchtpu that "
                f"wrote it ({self.manifest.get('versions', {}).get('torchtpu', 'a newer one')})"
            )

    def read(self, name: str) -> bytes:
        """One part.

        Raises:
            PackageError: it is missing, or is not what was written.
        """
        noted = self.manifest["parts"].get(name)
        if noted is None:
            raise PackageError(f"{self.path} has no part {name}")
        content = self._content(name)
        if hashlib.sha256(content).hexdigest() != noted["sha256"]:
            raise PackageError(f"{self.path} is damaged: {name} is not what was written (its sha256 differs)")
        return content

    def _content(self, name: str) -> bytes:
        try:
            if self.path.is_dir():
                return (self.path / name).read_bytes()
            with zipfile.ZipFile(self.path) as archive:
                return archive.read(name)
        except (KeyError, FileNotFoundError):
            raise PackageError(f"{self.path} is not a whole package: {name} is missing") from None
        except (zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise PackageError(f"{self.path} is not a package, or is damaged: {error}") from error
