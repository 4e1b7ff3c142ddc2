"""The console script ``torchtpu``, outside the package: it can say what is wrong when `import torchtpu` fails."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys

__all__ = ["main", "versions"]

DISTRIBUTIONS = ("torchtpu", "torch", "jax", "jaxlib", "libtpu", "numpy", "transformers")


def versions() -> dict[str, str | None]:
    """Installed versions of what matters to the device; None for what is not installed. Imports none of it."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def main() -> int:
    """Run the command line; one line and exit status 1 if the package cannot be imported (no compiler, say)."""
    try:
        from torchtpu.cli import main as run
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"]:
            for name, version in versions().items():
                print(f"{name:<14}{version or 'not installed'}", file=sys.stderr)
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # the C++ extension is built at the first import, which takes half a minute
        return 130
    status = run()
    if status == 130:
        # A compile cannot be stopped and still runs in its thread; Python's orderly exit under it ends in an abort.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status
