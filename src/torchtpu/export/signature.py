"""The nesting of a program's arguments and results, as plain data that a package can hold.

A tree is ``"*"`` for a leaf, ``{"tuple": [...]}``, ``{"list": [...]}``, ``{"dict": [[key, tree], ...]}``,
``{"namedtuple": [name, [[field, tree], ...]]}`` or ``{"fields": [name, [[field, tree], ...]]}``. The last stands for
a class that only the model's code knows, such as an output of Transformers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch.utils._pytree import TreeSpec

__all__ = ["LEAF", "Fields", "bind", "build", "describe_tree", "leaf_paths", "leaves"]

LEAF = "*"


class Fields(dict[str, Any]):
    """A result of a class that is not there any more: its fields by name, by attribute and by position."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the result has no field {name!r}, only {', '.join(self)}") from None

    def __getitem__(self, key: Any) -> Any:
        return list(self.values())[key] if isinstance(key, int | slice) else super().__getitem__(key)


def describe_tree(spec: TreeSpec, *, results: bool) -> Any:
    """A tree from PyTorch's description of it.

    Args:
        spec: what ``torch.export`` noted.
        results: whether classes that PyTorch does not know may be replaced by ``Fields``; arguments may not.

    Raises:
        TypeError: a class or a key that a package cannot hold; the message names it.
    """
    if spec.is_leaf():
        return LEAF
    children = [describe_tree(x, results=results) for x in spec.children()]
    kind, context = spec.type, spec.context
    if kind in (tuple, list):
        return {kind.__name__: children}
    if kind in (dict, OrderedDict, defaultdict):
        keys = context[1] if kind is defaultdict else context
        strange = [k for k in keys if not isinstance(k, str | int)]
        if strange:
            raise TypeError(f"keys of a dict must be strings or whole numbers in a package, got {strange[0]!r}")
        return {"dict": [[k, x] for k, x in zip(keys, children, strict=True)]}
    if kind is namedtuple:
        return {"namedtuple": [context.__name__, [[k, x] for k, x in zip(context._fields, children, strict=True)]]}
    named = isinstance(context, list | tuple) and len(context) == len(children)
    if results and named and all(isinstance(k, str) for k in context):
        return {"fields": [kind.__name__, [[k, x] for k, x in zip(context, children, strict=True)]]}
    what = "returns" if results else "takes"
    raise TypeError(
        f"the program {what} a {kind.__name__}, which a package cannot hold: use tensors, numbers and tuples, lists "
        "and dicts of them"
    )


def _items(tree: Any) -> tuple[str, list[tuple[Any, Any]]]:
    """The kind of a node, and its (key or position, child)."""
    ((kind, content),) = tree.items()
    if kind in ("tuple", "list"):
        return kind, list(enumerate(content))
    return kind, [(k, x) for k, x in (content if kind == "dict" else content[1])]


def leaf_paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where each leaf is, as keys and positions from the root."""
    if tree == LEAF:
        yield path
        return
    for key, child in _items(tree)[1]:
        yield from leaf_paths(child, (*path, key))


def leaves(tree: Any, value: Any, name: str) -> Iterator[Any]:
    """The leaves of a value that has the shape of a tree.

    Raises:
        TypeError: it has another; the message says where, beginning with ``name``.
    """
    if tree == LEAF:
        yield value
        return
    kind, items = _items(tree)
    keys = [k for k, _ in items]
    if kind == "dict":
        if not isinstance(value, Mapping) or set(value) != set(keys):
            got = f"keys {sorted(map(str, value))}" if isinstance(value, Mapping) else type(value).__name__
            raise TypeError(f"{name} must be a dict with the keys {sorted(map(str, keys))}, got {got}")
    else:
        expected = {"list": list, "tuple": tuple}.get(kind, Sequence)
        if not isinstance(value, expected) or len(value) != len(keys):
            got = f"{type(value).__name__} of {len(value)}" if isinstance(value, Sequence) else type(value).__name__
            raise TypeError(f"{name} must be a {kind} of {len(keys)}, got {got}")
    for i, (key, child) in enumerate(items):
        at = f"{name}.{key}" if kind == "namedtuple" else f"{name}[{key!r}]"
        yield from leaves(child, value[key if kind == "dict" else i], at)


def build(tree: Any, next_leaf: Callable[[], Any]) -> Any:
    """A value of the shape of a tree, its leaves taken one by one."""
    if tree == LEAF:
        return next_leaf()
    kind, items = _items(tree)
    made = {key: build(child, next_leaf) for key, child in items}
    if kind in ("tuple", "list"):
        return tuple(made.values()) if kind == "tuple" else list(made.values())
    if kind == "namedtuple":
        return namedtuple(tree[kind][0], list(made))(**made)
    return Fields(made) if kind == "fields" else made


def bind(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Arguments in order of their names, as a call of a Python function sorts them.

    Raises:
        TypeError: too many, an unknown name, one given twice, or one missing.
    """
    if len(args) > len(names):
        raise TypeError(f"the program takes {len(names)} arguments ({', '.join(names)}), got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name, value in kwargs.items():
        if name not in names:
            raise TypeError(f"the program has no argument {name!r}; it takes {', '.join(names) or 'none'}")
        if name in given:
            raise TypeError(f"argument {name!r} is given twice")
        given[name] = value
    missing = [name for name in names if name not in given]
    if missing:
        raise TypeError(f"missing {', '.join(missing)}: the program takes {', '.join(names)}")
    return [given[name] for name in names]
