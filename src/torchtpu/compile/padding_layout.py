"""Where the elements of a padded array are.

A size that changes from call to call is a symbol. A program is compiled for a *bucket* of each symbol, and the size of
a call, its *count*, is an operand. Every dimension of every array is a product of atoms: integers, and expressions of
symbols. Along an atom the first ``count`` of ``extent`` places are elements and the rest is padding, which may hold
anything. So what is padding is known however dimensions are merged, split and permuted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import sympy
import torch
from torch.utils._sympy import functions

__all__ = ["Atom", "Dim", "Frame", "NotUnderstood", "Padded", "evaluate", "factors", "is_padded", "normal", "product"]

Atom = Any  # an int or a sympy expression
Dim = tuple[Atom, ...]


class NotUnderstood(Exception):
    """What the padding of a result is cannot be told; the graph is compiled for exact sizes instead."""


def evaluate(expr: Any, values: dict[sympy.Symbol, Any]) -> Any:
    """An expression of sizes, where ``values`` gives each symbol an int or a traced scalar."""
    if isinstance(expr, int | float) or expr.is_Integer:
        return expr if isinstance(expr, float) else int(expr)
    if expr.is_Float:
        return float(expr)
    if expr.is_Symbol:
        if expr not in values:
            raise NotUnderstood(f"the size {expr} is not that of an input")
        return values[expr]
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return evaluate(expr.base, values) ** int(expr.exp)
    terms = [evaluate(x, values) for x in expr.args]
    traced = any(isinstance(x, jax.Array) for x in terms)
    if isinstance(expr, sympy.Add):
        return sum(terms[1:], terms[0])
    if isinstance(expr, sympy.Mul):
        return math.prod(terms[1:], start=terms[0])
    if isinstance(expr, functions.FloorDiv | functions.CleanDiv):
        return terms[0] // terms[1]
    if isinstance(expr, functions.Mod | functions.PythonMod):
        return terms[0] % terms[1]
    if isinstance(expr, functions.Max | sympy.Max):
        return jnp.maximum(*terms) if traced else max(terms)
    if isinstance(expr, functions.Min | sympy.Min):
        return jnp.minimum(*terms) if traced else min(terms)
    if isinstance(expr, functions.ToFloat):
        return terms[0] * 1.0
    if isinstance(expr, functions.IntTrueDiv | functions.FloatTrueDiv):
        return terms[0] / terms[1]
    raise NotUnderstood(f"the size {expr} is not a sum or product")


def _grows(expr: Any) -> bool:
    """Whether an expression is nowhere smaller where the symbols are larger: its bucket has room for it."""
    if isinstance(expr, int) or expr.is_Integer or expr.is_Symbol:
        return True
    if isinstance(expr, sympy.Add):
        return all(x.is_Integer or _grows(x) for x in expr.args)
    if isinstance(expr, sympy.Mul):
        return all(_grows(x) and not (x.is_Integer and x < 0) for x in expr.args)
    if isinstance(expr, sympy.Pow):
        return bool(expr.exp.is_Integer and expr.exp > 0) and _grows(expr.base)
    if isinstance(expr, functions.FloorDiv | functions.CleanDiv):
        return _grows(expr.args[0]) and bool(expr.args[1].is_Integer and expr.args[1] > 0)
    if isinstance(expr, functions.Max | functions.Min | sympy.Max | sympy.Min):
        return all(_grows(x) for x in expr.args)
    return False


def expression(size: Any) -> Any:
    """The int or expression behind a size of a fake tensor."""
    if isinstance(size, torch.SymInt | torch.SymFloat):
        size = size.node.expr
    if isinstance(size, sympy.Expr):
        return int(size) if size.is_Integer else size
    return size


def factors(size: Any) -> Dim:
    """A dimension of an array that has no history: the atoms of its size, the integer last."""
    expr = expression(size)
    if isinstance(expr, int):
        return normal((expr,))
    if not _grows(expr):
        expr = sympy.factor(expr)
    whole, rest = expr.as_coeff_Mul()
    atoms: list[Atom] = []
    for x in sympy.Mul.make_args(rest):
        base, times = (x.base, int(x.exp)) if isinstance(x, sympy.Pow) and x.exp.is_Integer else (x, 1)
        if not _grows(base):
            raise NotUnderstood(f"the size {expr} does not grow with the sizes of the inputs")
        atoms += [base] * times
    return normal((*atoms, int(whole)))


def normal(atoms: Sequence[Atom]) -> Dim:
    """The same product with integers that follow each other merged, and ones left out."""
    merged: list[Atom] = []
    for a in atoms:
        if isinstance(a, int) and merged and isinstance(merged[-1], int):
            merged[-1] *= a
        elif not (isinstance(a, int) and a == 1):
            merged.append(a)
    return tuple(merged)


def product(atoms: Sequence[Atom]) -> Any:
    """The size that the atoms make."""
    return math.prod(atoms, start=sympy.Integer(1))


def is_padded(dim: Dim) -> bool:
    """Whether there may be padding along a dimension."""
    return any(not isinstance(a, int) for a in dim)


@dataclass
class Padded:
    """An array at bucket size, and what its dimensions are made of."""

    array: jax.Array
    dims: tuple[Dim, ...]

    @property
    def padded(self) -> bool:
        """Whether there may be padding anywhere."""
        return any(is_padded(d) for d in self.dims)

    def axes(self, axes: Sequence[int] | None = None) -> list[int]:
        """Those of the axes (default: all) along which there may be padding."""
        chosen = range(len(self.dims)) if axes is None else axes
        return [i for i in chosen if is_padded(self.dims[i])]


@dataclass
class Frame:
    """The sizes of one program being traced.

    Attributes:
        buckets: what each symbol is compiled for.
        counts: what each symbol is in a call: scalars that are operands of the program.
        implied: whether a relation of sizes follows from the guards.
    """

    buckets: dict[sympy.Symbol, int]
    counts: dict[sympy.Symbol, Any]
    implied: Callable[[Any], bool] = bool

    def same(self, a: Any, b: Any) -> bool:
        """Whether two sizes are equal in every call that Dynamo's guards let through."""
        return bool(a == b) or sympy.expand(a - b) == 0 or self.implied(sympy.Eq(a, b))

    def extent(self, dim: Dim) -> int:
        """Places along a dimension."""
        return math.prod(evaluate(a, self.buckets) for a in dim)

    def count(self, dim: Dim) -> Any:
        """Elements along a dimension, an int if there is no padding."""
        return math.prod([evaluate(a, self.counts) for a in dim])

    def shape(self, dims: Sequence[Dim]) -> tuple[int, ...]:
        """Places along each dimension."""
        return tuple(self.extent(d) for d in dims)

    def _index_type(self, *dims: Dim) -> Any:
        return jnp.int32 if max(self.extent(d) for d in dims) < 2**31 else jnp.int64

    def _split(self, position: jax.Array, dim: Dim, sizes: Sequence[Any]) -> list[Any]:
        """The index along each atom of flat positions, in a layout of the given sizes."""
        parts = []
        for n in reversed(sizes[1:]):
            parts.append(position % n)
            position = position // n
        return [position, *reversed(parts)]

    def _places(self, dim: Dim) -> tuple[list[Any], list[Any]]:
        """For each atom its index at every place of a dimension, and its count."""
        kind = self._index_type(dim)
        sizes = [self.extent((a,)) for a in dim]
        counts = [jnp.asarray(self.count((a,))).astype(kind) for a in dim]
        return self._split(jnp.arange(self.extent(dim), dtype=kind), dim, sizes), counts

    def valid(self, dim: Dim) -> jax.Array | None:
        """Which places along a dimension are elements; None if all are."""
        if not is_padded(dim):
            return None
        if _leads(dim):
            return jnp.arange(self.extent(dim), dtype=self._index_type(dim)) < self.count(dim)
        indices, counts = self._places(dim)
        found = jnp.ones(self.extent(dim), bool)
        for atom, i, n in zip(dim, indices, counts, strict=True):
            found = found if isinstance(atom, int) else found & (i < n)
        return found

    def mask(self, x: Padded, axes: Sequence[int] | None = None) -> jax.Array | None:
        """What are elements as far as the axes (default: all) tell, in a shape that broadcasts; None if all are."""
        found = None
        for i in x.axes(axes):
            valid = self.valid(x.dims[i])
            assert valid is not None
            one = valid.reshape([-1 if k == i else 1 for k in range(len(x.dims))])
            found = one if found is None else found & one
        return found

    def fill(self, x: Padded, value: Any, axes: Sequence[int] | None = None) -> jax.Array:
        """The array with ``value`` in the padding along the axes (default: all)."""
        mask = self.mask(x, axes)
        return x.array if mask is None else jnp.where(mask, x.array, jnp.asarray(value, x.array.dtype))

    def logical(self, dim: Dim, position: jax.Array) -> jax.Array:
        """The index of the element at a place along a dimension."""
        if _leads(dim):
            return position
        parts = self._split(position, dim, [self.extent((a,)) for a in dim])
        index = jnp.zeros_like(position)
        for atom, i in zip(dim, parts, strict=True):
            index = index * jnp.asarray(self.count((atom,))).astype(position.dtype) + i
        return index

    def _sources(self, old: Dim, new: Dim) -> jax.Array:
        """For each place of one layout the place of the same element in another."""
        kind = self._index_type(old, new)
        index = self.logical(new, jnp.arange(self.extent(new), dtype=kind))
        if _leads(old):
            return index
        counts = [jnp.asarray(self.count((a,))).astype(kind) for a in old]
        position = jnp.zeros_like(index)
        for atom, i in zip(old, self._split(index, old, counts), strict=True):
            position = position * self.extent((atom,)) + i
        return position

    def relayout(self, x: Padded, axis: int, dim: Dim) -> Padded:
        """The same elements in another layout of one dimension."""
        old = x.dims[axis]
        dims = (*x.dims[:axis], dim, *x.dims[axis + 1 :])
        if old == dim:
            return x
        if not self.same(product(old), product(dim)):
            raise NotUnderstood(f"sizes {product(old)} and {product(dim)} meet")
        return Padded(jnp.take(x.array, self._sources(old, dim), axis=axis, mode="clip"), dims)

    def leading(self, x: Padded, axis: int) -> Padded:
        """The same elements with all padding of a dimension at its end: a place is an index."""
        return self.relayout(x, axis, in_a_row(x.dims[axis]))

    def reshape(self, x: Padded, dims: Sequence[Dim]) -> Padded:
        """The same elements, row-major, in other dimensions: a reshape, or a gather where padding has to move."""
        old = list(normal([a for d in x.dims for a in d]))
        new = list(normal([a for d in dims for a in d]))
        shape = self.shape(dims)
        if old == new:
            return Padded(x.array.reshape(shape), tuple(dims))
        if not self.same(product(old), product(new)):
            raise NotUnderstood(f"an array of {product(old)} elements becomes one of {product(new)}")
        # What both end with moves as rows; what both begin with, separately.
        row = math.gcd(*(d[-1] if d and isinstance(d[-1], int) else 1 for d in (old, new)))
        if row > 1:
            old[-1], new[-1] = old[-1] // row, new[-1] // row
        first: list[Atom] = []
        while old and new and old[0] == new[0]:
            first.append(old.pop(0))
            new.pop(0)
        old_dim, new_dim = normal(old), normal(new)
        array = x.array.reshape(self.extent(tuple(first)), self.extent(old_dim), row)
        return Padded(jnp.take(array, self._sources(old_dim, new_dim), axis=1, mode="clip").reshape(shape), tuple(dims))

    def regroup(self, x: Padded, sizes: Sequence[Any]) -> Padded:
        """``view``: the dimensions are the old atoms, grouped anew, wherever that is possible."""
        dims = _regroup(normal([a for d in x.dims for a in d]), [expression(n) for n in sizes])
        return self.reshape(x, dims if dims is not None else [factors(n) for n in sizes])


def _leads(dim: Dim) -> bool:
    """Whether all padding of a dimension is at its end."""
    return all(isinstance(a, int) for a in dim[1:])


def in_a_row(dim: Dim) -> Dim:
    """The layout of a dimension that has all padding at its end."""
    if _leads(dim):
        return dim
    rest = [a for a in dim if not isinstance(a, int)]
    return normal((product(rest), math.prod(a for a in dim if isinstance(a, int))))


def _regroup(atoms: Dim, sizes: Sequence[Any]) -> list[Dim] | None:
    """The atoms dealt out to dimensions of the given sizes in order, integers split as needed; None if they do not
    fit.
    """
    left = list(atoms)
    dims = []
    for size in sizes:
        rest, dim = sympy.sympify(size), []
        while rest != 1:
            if not left:
                return None
            atom = left.pop(0)
            if isinstance(atom, int):
                common = math.gcd(atom, int(rest.as_content_primitive()[0]))
                if common == 1:
                    return None
                if common < atom:
                    left.insert(0, atom // common)
                atom = common
                rest = rest / common
            else:
                rest = sympy.cancel(rest / atom) if rest != atom else sympy.Integer(1)
                if sympy.denom(rest) != 1:
                    return None
            dim.append(atom)
        dims.append(normal(dim))
    return dims if not left else None
