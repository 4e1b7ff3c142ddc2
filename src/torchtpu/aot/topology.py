"""Names of TPU topologies, and whether libtpu is there to compile for them."""

from __future__ import annotations

import importlib.util

__all__ = ["TOPOLOGIES", "libtpu_missing", "require_libtpu"]

TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
"""The smallest topology of one host for each generation that the project supports, by generation.

A name is a generation and the extent of the torus in chips. libtpu does not check that such a machine exists.
"""


def libtpu_missing() -> str | None:
    """Why nothing can be compiled for a TPU here, or None."""
    if importlib.util.find_spec("libtpu") is None:
        return "compiling for a TPU needs libtpu, which is not installed (pip install 'torchtpu[tpu]')"
    return None


def require_libtpu() -> None:
    """Raise if libtpu is not installed.

    Raises:
        ModuleNotFoundError: it is not; the message says how to install it.
    """
    reason = libtpu_missing()
    if reason is not None:
        raise ModuleNotFoundError(reason, name="libtpu")
