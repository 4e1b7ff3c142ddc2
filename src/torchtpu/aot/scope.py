"""Where in a model an operation comes from, read from the names that JAX keeps."""

from __future__ import annotations

import itertools
import re

__all__ = ["split_scope"]

_PARTS = re.compile(r"[^/()]+|[/()]")
_DROPPED = {"jit", "pjit", "xla_call", "core_call", "custom_jvp", "custom_vjp"}
"""Wrappers whose content is the name of a function, not a scope."""
_STRUCTURE = {
    *("checkpoint", "rematted_computation", "remat", "remat2", "while", "body", "cond", "closed_call", "scan"),
    *("shard_map", "pjit", "core_call", "custom_jvp_call", "custom_vjp_call", "pallas_call"),
}
_BRANCH = re.compile(r"branch_\d+_fun")


def split_scope(stack: str) -> tuple[str, str]:
    """The scope and the phase of a name stack such as ``"transpose(jvp(model))/layer/mlp"``.

    Args:
        stack: of an equation (``str(eqn.source_info.name_stack)``, with those of the equations around it in front), or
            ``op_name`` of an HLO instruction without the operation at its end.

    Returns:
        The names that ``jax.named_scope`` gave, joined by ``/``, and ``"forward"``, ``"backward"`` (inside the
        transpose of a function) or ``"recompute"`` (what ``jax.checkpoint`` computes again).
    """
    names: list[str] = []
    wrappers: list[str] = []
    parts = _PARTS.findall(stack)
    for part, following in itertools.zip_longest(parts, parts[1:]):
        if part == ")":
            if wrappers:
                wrappers.pop()
        elif following == "(":
            wrappers.append(part)
        elif part in ("/", "("):
            continue
        elif part not in _STRUCTURE and not _BRANCH.fullmatch(part) and not _DROPPED.intersection(wrappers):
            names.append(part)
    if "rematted_computation" in stack:
        return "/".join(names), "recompute"
    return "/".join(names), "backward" if "transpose(" in stack else "forward"
