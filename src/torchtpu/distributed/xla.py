"""Collectives as XLA programs over the devices of a group: one per collective, shape, dtype and group.

A value of a rank is one shard of a global array with a leading dimension of ranks; the result is the shard that this
process can address. Nothing passes through the host's memory. The ranks must run the same programs in the same order,
which is what c10d asks of them anyway; programs of different groups may interleave.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from torchtpu.distributed import pending
from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, check_splits
from torchtpu.distributed.host import HostTransport
from torchtpu.distributed.reductions import Op, Reduction, working_dtype
from torchtpu.distributed.watch import Call
from torchtpu.eager.arrays import wrap_array
from torchtpu.lowering.dtypes import to_jax, to_torch
from torchtpu.runtime import devices

__all__ = ["XlaTransport"]

_AXIS = "ranks"


def _with_64_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace and make arrays with PyTorch's types."""

    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        with jax.enable_x64(True):
            return function(*args)

    return wrapped


class XlaTransport:
    """The collectives of one group on JAX arrays; the methods are those of ``HostTransport``.

    Args:
        host: for messages between two ranks, and to compare what the ranks call (``TORCHTPU_COLLECTIVES_CHECK=1``).
        rank, size: this rank in the group, and the number of ranks.
        ranks: global ranks of the members.
    """

    one_order = True

    def __init__(self, host: Any, rank: int, size: int, ranks: Sequence[int]) -> None:
        self.host: HostTransport = host
        self.rank, self.size = rank, size
        platform = devices.platform()
        first: dict[int, Any] = {}
        for device in jax.devices(platform):
            first.setdefault(device.process_index, device)
        missing = [r for r in ranks if r not in first]
        if missing:
            raise CollectiveError(f"the JAX runtime has no device of rank {', '.join(map(str, missing))}")
        self.mesh = Mesh(np.array([first[r] for r in ranks]), (_AXIS,))
        self.sharding = NamedSharding(self.mesh, PartitionSpec(_AXIS))
        self.device = first[ranks[rank]]
        self.checks = _checks(platform)
        self.asynchronous = not self.checks
        self.marker: jax.Array | None = None  # ready when the last program that was enqueued has run

    def begin(self, call: Call, timeout: float) -> None:
        """Compare what the ranks call, if that has been asked for."""
        self.deadline = time.monotonic() + timeout
        if self.checks:
            self.host.begin(call, timeout)
            self.host.barrier()

    @_with_64_bits
    def load(self, arrays: Sequence[jax.Array], sizes: Sequence[Sequence[int]]) -> list[jax.Array]:
        """The arrays themselves, in their tensors' sizes."""
        return [a.reshape(tuple(s)) for a, s in zip(arrays, sizes, strict=True)]

    def tensor(self, value: jax.Array, device: int) -> torch.Tensor:
        """A tpu tensor that holds an array; it is waited for where the ranks compare their calls."""
        if self.checks:
            _wait(value, self.deadline)
        devices.note(device, value)
        return wrap_array(value, device, to_torch(value.dtype))

    def _run(self, body: Callable[..., Any], key: tuple[Any, ...], *values: jax.Array) -> Any:
        """Run a program on this rank's values; its result is this rank's."""
        program = _program(self.mesh, body, key)
        result, marker = program(*map(self._global, values))
        self.marker = marker.addressable_data(0)
        return jax.tree.map(lambda a: a.addressable_data(0), result)

    def _global(self, value: jax.Array) -> jax.Array:
        value = jax.device_put(value, self.device)
        shape = (self.size * value.shape[0], *value.shape[1:]) if value.ndim else ()
        return jax.make_array_from_single_device_arrays(shape, self.sharding, [value])

    # ---- collectives ------------------------------------------------------------------------------------------------

    @_with_64_bits
    def all_reduce(self, x: jax.Array, reduction: Reduction) -> jax.Array:
        dtype = to_torch(x.dtype)
        reduction.check(dtype)
        factor = _factor(reduction, x)
        return self._run(_all_reduce, (reduction.op, self.size), _row(x), *factor).reshape(x.shape)

    @_with_64_bits
    def reduce(self, x: jax.Array, reduction: Reduction, root: int) -> jax.Array:
        return self.all_reduce(x, reduction)

    @_with_64_bits
    def all_gather(self, x: jax.Array) -> jax.Array:
        return self._run(_all_gather, (), _row(x)).reshape(self.size, *x.shape)

    @_with_64_bits
    def all_gather_rows(self, x: jax.Array) -> list[jax.Array]:
        return [row.reshape(x.shape) for row in self._run(_all_gather_rows, (self.size,), _row(x))]

    @_with_64_bits
    def all_gather_uneven(self, x: jax.Array, shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
        sizes = [int(np.prod(s)) for s in shapes]
        longest = max(sizes)
        found = self._run(_all_gather, (), _padded(_row(x), longest)).reshape(self.size, longest)
        return [found[r, :n].reshape(tuple(s)) for r, (n, s) in enumerate(zip(sizes, shapes, strict=True))]

    @_with_64_bits
    def broadcast(self, x: jax.Array, root: int) -> jax.Array:
        return self._run(_broadcast, (root,), _row(x)).reshape(x.shape)

    @_with_64_bits
    def reduce_scatter(self, x: jax.Array, reduction: Reduction) -> jax.Array:
        reduction.check(to_torch(x.dtype))
        factor = _factor(reduction, x)
        rows = x.reshape(self.size, -1)
        return self._run(_reduce_scatter, (reduction.op, self.size), rows, *factor).reshape(-1)

    @_with_64_bits
    def reduce_scatter_uneven(self, parts: Sequence[jax.Array], reduction: Reduction) -> jax.Array:
        longest = max(p.size for p in parts)
        rows = jnp.concatenate([_padded(_row(p), longest) for p in parts])
        mine = parts[self.rank]
        return self.reduce_scatter(rows, reduction).reshape(-1)[: mine.size].reshape(mine.shape)

    @_with_64_bits
    def all_to_all(self, x: jax.Array) -> jax.Array:
        return self._run(_all_to_all, (), x.reshape(self.size, -1)).reshape(x.shape)

    @_with_64_bits
    def all_to_all_uneven(self, parts: Sequence[jax.Array], shapes: Sequence[Sequence[int]]) -> list[jax.Array]:
        """Every part is padded to the longest of all ranks; they tell each other first what each sends."""
        sizes = [int(np.prod(s)) for s in shapes]
        mine = jax.device_put(np.array([[*(p.size for p in parts), *sizes]], np.int32), self.device)
        table = np.asarray(self._run(_all_gather, (), mine)).reshape(self.size, 2 * self.size)
        check_splits(table.tolist())
        longest = int(table.max())
        if longest == 0:
            return [p.reshape(tuple(s)) for p, s in zip(parts, shapes, strict=True)]
        rows = jnp.concatenate([_padded(_row(p), longest) for p in parts])
        found = self._run(_all_to_all, (), rows)
        return [found[r, :n].reshape(tuple(s)) for r, (n, s) in enumerate(zip(sizes, shapes, strict=True))]

    @_with_64_bits
    def scatter(self, x: jax.Array | None, like: jax.Array, root: int) -> jax.Array:
        rows = jnp.zeros((self.size, like.size), like.dtype) if x is None else x.reshape(self.size, -1)
        return self._run(_scatter, (root,), rows).reshape(like.shape)

    @_with_64_bits
    def gather(self, x: jax.Array, root: int) -> list[jax.Array]:
        rows = self.all_gather_rows(x)
        return rows if self.rank == root else []

    @_with_64_bits
    def barrier(self) -> None:
        one = jax.device_put(np.ones((1, 1), np.int32), self.device)
        _wait(self._run(_all_reduce, (Op.SUM, self.size), one), self.deadline)


def _checks(platform: str) -> bool:
    """``TORCHTPU_COLLECTIVES_CHECK``: compare what the ranks call before each collective, at the price of a message
    between the hosts. By default on XLA:CPU alone: there programs that do not fit each other abort the process.
    """
    return os.environ.get("TORCHTPU_COLLECTIVES_CHECK", "1" if platform == "cpu" else "0") != "0"


def _wait(value: Any, deadline: float) -> None:
    """Wait for an array while Ctrl-C is heard and a time limit is kept to."""
    pause = 1e-5
    while not value.is_ready():
        pending.raise_failed()
        if time.monotonic() > deadline:
            raise CollectiveTimeout("it did not finish in time")
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    try:
        value.block_until_ready()
    except Exception as error:
        raise CollectiveError(str(error).splitlines()[0]) from error


def _row(x: jax.Array) -> jax.Array:
    return x.reshape(1, -1)


def _padded(row: jax.Array, length: int) -> jax.Array:
    return jnp.pad(row, ((0, 0), (0, length - row.shape[1]))) if row.shape[1] < length else row


def _factor(reduction: Reduction, x: jax.Array) -> tuple[jax.Array, ...]:
    """PREMUL_SUM's factor as an operand: another factor is not another program."""
    if reduction.op is not Op.PREMUL_SUM:
        return ()
    kind = np.complex128 if np.iscomplexobj(x) else np.float64
    return (jax.device_put(np.full((1, 1), reduction.factor, kind), x.device),)


@functools.lru_cache(maxsize=4096)
def _program(mesh: Mesh, body: Callable[..., Any], key: tuple[Any, ...]) -> Callable[..., Any]:
    """A program over a group's devices, compiled for each shape and dtype it meets: what the body gives, and a byte by
    which one can see that it has run, without keeping the rest.
    """
    spec = PartitionSpec(_AXIS)

    def marked(*rows: jax.Array) -> tuple[Any, jax.Array]:
        return body(*key, *rows), jnp.zeros(1, jnp.int8)

    return jax.jit(jax.shard_map(marked, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


# ---- the programs: each sees one rank's rows ------------------------------------------------------------------------


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(to_jax(working_dtype(to_torch(x.dtype))))


def _premultiplied(x: jax.Array, factor: Sequence[jax.Array]) -> jax.Array:
    return (x * factor[0].astype(x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.float64)).astype(x.dtype)


def _reduced_rows(rows: jax.Array, op: Op) -> jax.Array:
    """The reduction of the rows that XLA has no collective for."""
    function = {Op.PRODUCT: lax.mul, Op.BAND: lax.bitwise_and, Op.BOR: lax.bitwise_or, Op.BXOR: lax.bitwise_xor}[op]
    return functools.reduce(function, [rows[i] for i in range(rows.shape[0])])


def _averaged(total: jax.Array, ranks: int) -> jax.Array:
    if jnp.issubdtype(total.dtype, jnp.inexact):
        return total / ranks
    return lax.div(total, jnp.asarray(ranks, total.dtype))


def _all_reduce(op: Op, ranks: int, x: jax.Array, *factor: jax.Array) -> jax.Array:
    wide = _premultiplied(_wide(x), factor) if factor else _wide(x)
    if op is Op.MAX or (op is Op.SUM and x.dtype == jnp.bool_):
        total = lax.pmax(wide, _AXIS)
    elif op is Op.MIN:
        total = lax.pmin(wide, _AXIS)
    elif op in (Op.SUM, Op.AVG, Op.PREMUL_SUM):
        total = lax.psum(wide, _AXIS)
    else:
        total = _reduced_rows(lax.all_gather(wide, _AXIS), op)
    return (_averaged(total, ranks) if op is Op.AVG else total).astype(x.dtype)


def _reduce_scatter(op: Op, ranks: int, rows: jax.Array, *factor: jax.Array) -> jax.Array:
    wide = _premultiplied(_wide(rows), factor) if factor else _wide(rows)
    if op in (Op.SUM, Op.AVG, Op.PREMUL_SUM) and rows.dtype != jnp.bool_:
        total = lax.psum_scatter(wide, _AXIS, scatter_dimension=0, tiled=True)
        return (_averaged(total, ranks) if op is Op.AVG else total).astype(rows.dtype)
    received = lax.all_to_all(wide, _AXIS, split_axis=0, concat_axis=0, tiled=True)
    if op is Op.MAX or op is Op.SUM:
        total = received.max(0)
    elif op is Op.MIN:
        total = received.min(0)
    else:
        total = _reduced_rows(received, op)
    return total[None].astype(rows.dtype)


def _all_gather(x: jax.Array) -> jax.Array:
    return _from_bits(lax.all_gather(_bits(x), _AXIS, tiled=True), x.dtype)


def _all_gather_rows(ranks: int, x: jax.Array) -> list[jax.Array]:
    return jnp.split(_all_gather(x), ranks)


def _all_to_all(rows: jax.Array) -> jax.Array:
    return _from_bits(lax.all_to_all(_bits(rows), _AXIS, split_axis=0, concat_axis=0, tiled=True), rows.dtype)


def _broadcast(root: int, x: jax.Array) -> jax.Array:
    bits = _bits(x)
    return _from_bits(lax.psum(_only(root, bits), _AXIS), x.dtype)


def _scatter(root: int, rows: jax.Array) -> jax.Array:
    bits = _only(root, _bits(rows))
    return _from_bits(lax.psum_scatter(bits, _AXIS, scatter_dimension=0, tiled=True), rows.dtype)


def _only(root: int, bits: jax.Array) -> jax.Array:
    """The root's bits, and zeros on the other ranks: their sum is the root's."""
    return jnp.where(lax.axis_index(_AXIS) == root, bits, jnp.zeros_like(bits))


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def _bits(x: jax.Array) -> jax.Array:
    """What moves: integers of the same width, so that no value is changed on the way (NaN, -0.0). Widths below four
    bytes travel as 32 bits where the device's collectives add them.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.concatenate([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, _UNSIGNED[x.dtype.itemsize])


def _from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    if dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        part = jnp.float32 if dtype == jnp.complex64 else jnp.float64
        real, imaginary = jnp.split(lax.bitcast_convert_type(bits, part), 2, axis=-1)
        return lax.complex(real, imaginary)
    return lax.bitcast_convert_type(bits, dtype)
