"""The table of lowerings: aten overload -> a function on JAX arrays.

A lowering is a pure function. It takes what the aten schema names, in the schema's own argument names:

* a ``Tensor`` arrives as a JAX array (a tracer while a program is being traced),
* a ``Scalar`` or a ``float`` arrives as a weakly typed 0-d JAX array, because it is an operand of the program: a
learning
  rate that changes every step must not recompile. Name it in ``static=`` when it decides a shape, a dtype or a branch;
  then
  it arrives as a Python number. A number left out of the call takes the Python default of the lowering, as a constant,
* everything else (``int``, ``bool``, ``str``, sizes, ``torch.dtype``, ``None``) arrives as it is,
* a ``Generator``, a ``Device``, a ``Layout`` and ``pin_memory`` are dropped: leave them out of the signature.

It returns one JAX array, or a tuple or list of them, with exactly the shape and dtype of PyTorch's result; whatever
differs is a bug
and is raised as one when the program is traced.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Lowering", "find", "lowering", "overloads"]


@dataclass(frozen=True)
class Lowering:
    """One operator's meaning.

    Attributes:
        name: aten overload, such as ``"add.Tensor"``.
        function: the function on JAX arrays.
        static: names of ``Scalar``/``float`` arguments that are compile-time constants.
        dynamic: the result's shape depends on data: called on concrete arrays, outside any trace.
        random: takes a key from ``context.random_key()``.
        parameters: names the function accepts; ``None`` when it accepts any.
    """

    name: str
    function: Callable[..., Any]
    static: frozenset[str] = frozenset()
    dynamic: bool = False
    random: bool = False
    parameters: frozenset[str] | None = field(default=None, compare=False)


_table: dict[str, Lowering] = {}
_loaded = False


def lowering(
    *names: str, static: tuple[str, ...] = (), dynamic: bool = False, random: bool = False
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the lowering of the named aten overloads.

    Args:
        names: overloads, such as ``"add.Tensor"`` or ``"mm"`` (short for ``"mm.default"``).
        static: ``Scalar``/``float`` arguments that must be Python numbers.
        dynamic: the result's shape depends on values; the function gets concrete arrays and may use NumPy on the host.
        random: the function calls ``context.random_key()``.

    Raises:
        ValueError: an overload is registered twice.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function).parameters
        anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values())
        for name in names:
            full = name if "." in name else f"{name}.default"
            if full in _table:
                raise ValueError(f"aten.{full} has two lowerings: {_table[full].function} and {function}")
            _table[full] = Lowering(
                full, function, frozenset(static), dynamic, random, None if anything else frozenset(signature)
            )
        return function

    return register


def _load() -> None:
    """Import every family once; a family registers its operators when imported."""
    global _loaded
    if not _loaded:
        from torchtpu.lowering import families

        for module in pkgutil.iter_modules(families.__path__):
            importlib.import_module(f"{families.__name__}.{module.name}")
        _loaded = True


def find(name: str) -> Lowering | None:
    """The lowering of an aten overload, such as ``"add.Tensor"``, or None."""
    _load()
    return _table.get(name)


def overloads() -> list[str]:
    """Every aten overload with a lowering of its own, sorted."""
    _load()
    return sorted(_table)
