"""Between tpu tensors and JAX arrays: what a storage holds, and tensors made around new values."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torchtpu import _C
from torchtpu.eager.views import physical_order, row_major
from torchtpu.lowering.dtypes import to_jax, to_torch
from torchtpu.runtime import devices, meshes

__all__ = [
    "array_of",
    "from_host",
    "host_array",
    "make_spec",
    "number_operand",
    "physical_shape",
    "prepare_storage",
    "to_host",
    "wrap_array",
]


@functools.lru_cache(maxsize=65536)
def make_spec(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, op: str | None = None) -> Any:
    """The C++ description of a tensor with a storage of its own, for ``_C.wrap``; its value has ``physical_shape``.
    ``op`` names its maker in out-of-memory errors.
    """
    return _C.make_spec(size, stride, physical_shape(size, stride), dtype, op)


@functools.lru_cache(maxsize=65536)
def physical_shape(size: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes of a dense tensor, slowest dimension first.

    Raises:
        ValueError: the tensor has gaps or overlaps.
    """
    order = physical_order(size, stride)
    if order is None:
        raise ValueError(f"not a dense tensor: size {size}, strides {stride}")
    return tuple(size[i] for i in order)


def wrap_array(array: jax.Array, device: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new contiguous tensor that holds ``array``, of the array's dtype (or of complex32 where that is given)."""
    size = tuple(array.shape)
    return _C.wrap(make_spec(size, row_major(size), dtype or to_torch(array.dtype)), array, device)


_numbers: dict[tuple[type, Any, int], jax.Array] = {}


def number_operand(value: Any, device: int) -> jax.Array:
    """A Python number as a weakly typed 0-d array on the device; recent ones are kept, so a constant costs a lookup."""
    # 0.0 and -0.0 are equal as keys and different as operands.
    key = (type(value), value if value or type(value) is not float else str(value), device)
    found = _numbers.get(key)
    if found is not None:
        return found
    with jax.enable_x64(True):
        made = jax.device_put(jnp.asarray(value), devices.device(device))
    if len(_numbers) > 4096:
        _numbers.clear()
    _numbers[key] = made
    return made


def _bits(dtype: torch.dtype) -> torch.dtype | None:
    """An integer type of the same width for the dtypes NumPy does not know."""
    if dtype in (torch.bfloat16,):
        return torch.int16
    return torch.uint8 if str(dtype).startswith("torch.float8") else None


def from_host(tensor: torch.Tensor, device: int) -> jax.Array:
    """The value of a contiguous CPU tensor that nobody else will write to.

    XLA:CPU uses the memory as it is, and a TPU reads it after this returns: whoever passes a tensor that can still
    change passes a clone.
    """
    with jax.enable_x64(True):
        return jax.device_put(host_array(tensor), devices.device(device))


def host_array(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a contiguous CPU tensor, in its memory, as the device holds them."""
    tensor = tensor.detach()
    if tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    bits, dtype = _bits(tensor.dtype), to_jax(tensor.dtype)
    return tensor.view(bits).numpy().view(dtype) if bits is not None else tensor.numpy()


def to_host(array: jax.Array) -> torch.Tensor:
    """A CPU tensor that shares the array's memory where it can, and must not be written to."""
    array = meshes.readable(array)
    devices.waiting(array)
    host = np.asarray(array)
    dtype = to_torch(host.dtype)
    bits = _bits(dtype)
    if bits is not None:
        host = host.view(np.int16 if bits is torch.int16 else np.uint8)
    if not host.flags.writeable:
        host = host.view()
        host.flags.writeable = False
    return _from_numpy(host) if bits is None else _from_numpy(host).view(dtype)


def _from_numpy(host: np.ndarray) -> torch.Tensor:
    # torch warns about read-only memory; the callers copy out of it.
    import warnings

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(host)


def array_of(tensor: torch.Tensor) -> jax.Array:
    """The tensor's elements as an array of its size; free when the tensor is its whole storage, in order."""
    value, shape, dtype = _C.get_value(tensor)
    size = tuple(tensor.shape)
    plain = (
        value is not None and dtype is tensor.dtype and shape == size and not tensor.is_conj() and not tensor.is_neg()
    )
    if plain and tensor.is_contiguous() and tensor.storage_offset() == 0:
        return force(value)
    copy = torch.ops.aten.clone.default(tensor, memory_format=torch.contiguous_format)
    value = force(_C.get_value(copy)[0])
    if tuple(value.shape) == size:
        return value
    with jax.enable_x64(True):  # where sizes grow, a storage is larger than the tensor at its front
        return value.reshape(-1)[: copy.numel()].reshape(size)


def force(value: Any) -> Any:
    """The array behind a storage's value; runs what has been recorded if it is not there yet."""
    from torchtpu.eager import trace

    return trace.force(value)


def prepare_storage(tensor: torch.Tensor) -> bool:
    """Make a storage's value fit a tensor that reads it: same dtype, enough elements. True if the value was rewritten.

    A storage is bytes; its value has one dtype at a time. Views of another dtype (``x.view(torch.int32)``,
    ``view_as_real``, a byte
    storage being loaded) rewrite the value to theirs, bit for bit, and every other view goes on seeing the same bytes.
    """
    value, shape, dtype = _C.get_value(tensor)
    if value is None:
        return False
    nbytes = _C.storage_of(tensor)[1]
    held = math.prod(shape) * dtype.itemsize
    reach = 0
    if tensor.numel():
        spans = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        reach = int(tensor.storage_offset()) + 1 + spans
    if dtype is tensor.dtype and reach * dtype.itemsize <= held:
        return False
    whole = nbytes // tensor.dtype.itemsize
    value = force(value)
    with jax.enable_x64(True):
        new = _reinterpret(value, dtype, tensor.dtype, whole)
    new_shape = tuple(new.shape)
    _C.set_value(tensor, new, new_shape, tensor.dtype)
    return True


def _reinterpret(value: jax.Array, old: torch.dtype, new: torch.dtype, elements: int) -> jax.Array:
    def run(x: jax.Array) -> jax.Array:
        raw = _to_bytes(x.reshape(-1), old)
        total = elements * new.itemsize
        raw = jnp.pad(raw, (0, total - raw.size)) if raw.size < total else raw[:total]
        return _from_bytes(raw, new)

    # Keep the folding where the element size stays the same: it is what later reads are planned on.
    if old.itemsize == new.itemsize and value.size == elements:
        return jax.jit(_convert, static_argnums=(1, 2))(value, old, new)
    return jax.jit(run)(value)


def _convert(x: jax.Array, old: torch.dtype, new: torch.dtype) -> jax.Array:
    """Bit cast between types of one width, bool and complex included."""
    return _from_bytes(_to_bytes(x.reshape(-1), old), new).reshape(x.shape)


def _to_bytes(x: jax.Array, dtype: torch.dtype) -> jax.Array:
    if dtype.is_complex:
        x = jnp.stack([x.real, x.imag], -1).astype(to_jax(dtype.to_real()))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(-1)


def _from_bytes(raw: jax.Array, dtype: torch.dtype) -> jax.Array:
    target = to_jax(dtype)
    if dtype is torch.bool:
        return raw != 0
    if dtype.is_complex:
        part = to_jax(dtype.to_real())
        pairs = jax.lax.bitcast_convert_type(raw.reshape(-1, 2, part.itemsize), part)
        wide = np.dtype(np.float64 if target == np.complex128 else np.float32)
        return jax.lax.complex(pairs[:, 0].astype(wide), pairs[:, 1].astype(wide))
    if target.itemsize == 1:
        return jax.lax.bitcast_convert_type(raw, target)
    return jax.lax.bitcast_convert_type(raw.reshape(-1, target.itemsize), target)
