"""Convolutions of one to three spatial dimensions, and their gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from torchtpu.lowering.precision import accumulator, matmul_precision
from torchtpu.lowering.promotion import cast
from torchtpu.lowering.registry import lowering


def _full(values, rank: int) -> list[int]:
    """One value for each spatial dimension; a single one stands for all."""
    values = [values] if isinstance(values, int) else list(values)
    return values * rank if len(values) == 1 else values


def _convolve(input, weight, stride, padding, dilation, transposed, output_padding, groups, preferred=None):
    """The convolution without bias, channels first; a transposed one dilates the input instead of striding."""
    rank = input.ndim - 2
    stride, padding, dilation, extra = (_full(v, rank) for v in (stride, padding, dilation, output_padding))
    kernel = weight.shape[2:]
    pads = [(p, p) for p in padding]
    input_dilation = [1] * rank
    if transposed:
        split = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
        weight = jnp.flip(split.swapaxes(1, 2), range(3, 3 + rank)).reshape(-1, split.shape[1], *kernel)
        reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        pads = [(r - p, r - p + e) for r, p, e in zip(reach, padding, extra, strict=True)]
        input_dilation, stride = stride, [1] * rank
    spatial = "DHW"[3 - rank :]
    return jax.lax.conv_general_dilated(
        input, weight, stride, pads, input_dilation, dilation, (f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"),
        feature_group_count=groups, precision=matmul_precision(), preferred_element_type=preferred,
    )  # fmt: skip


@lowering("convolution", "convolution_overrideable", "_convolution")
def convolution(
    input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
    benchmark=False, deterministic=False, cudnn_enabled=True, allow_tf32=True,
):  # fmt: skip
    if any(p < 0 for p in padding):
        raise RuntimeError("negative padding is not supported")
    wide = accumulator(input.dtype)
    y = _convolve(input, weight, stride, padding, dilation, transposed, output_padding, groups, wide)
    if bias is not None:
        y = y + cast(bias, wide).reshape(-1, *[1] * (y.ndim - 2))
    return cast(y, input.dtype)


@lowering("_convolution.deprecated")
def convolution_deprecated(
    input, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
    benchmark=False, deterministic=False, cudnn_enabled=True,
):  # fmt: skip
    return convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)


@lowering("convolution_backward")
def convolution_backward(
    grad_output, input, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    """The convolution is linear in input and in weight: its gradients are its transposes.

    Operands keep their dtype, since XLA's convolution accumulates 16-bit floats in float32 anyway.
    """
    sizes = (stride, padding, dilation, transposed, output_padding, groups)

    def gradient(of, value):
        _, transpose = jax.vjp(of, value)
        return transpose(grad_output)[0]

    wide = cast(grad_output, accumulator(grad_output.dtype))
    bias_axes = (0, *range(2, grad_output.ndim))
    return (
        gradient(lambda x: _convolve(x, weight, *sizes), input) if output_mask[0] else None,
        gradient(lambda w: _convolve(input, w, *sizes), weight) if output_mask[1] else None,
        cast(wide.sum(bias_axes, dtype=wide.dtype), grad_output.dtype) if output_mask[2] else None,
    )


@lowering("convolution_backward_overrideable")
def convolution_backward_overrideable(
    grad_output, input, weight, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    return convolution_backward(
        grad_output, input, weight, None, stride, padding, dilation, transposed, output_padding, groups, output_mask
    )


@lowering("conv_tbc")
def conv_tbc(self, weight, bias, pad=0):
    """Time, batch, channel: a 1-d convolution whose weight is (width, in, out)."""
    y = convolution(self.transpose(1, 2, 0), weight.transpose(2, 1, 0), bias, [1], [pad], [1], False, [0], 1)
    return y.transpose(2, 0, 1)


def _unbatched(rank, input, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    """A convolution whose input may lack the batch dimension."""
    batched = input.ndim == rank + 2
    x = input if batched else input[None]
    y = convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    return y if batched else y[0]


def _same(padding: str, weight, dilation) -> list[tuple[int, int]]:
    """(low, high) padding of ``padding="same"`` or ``"valid"``; the odd element goes to the high side."""
    if padding == "valid":
        return [(0, 0)] * (weight.ndim - 2)
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    return [(t // 2, t - t // 2) for t in total]


def _register(rank: int) -> None:
    def conv(input, weight, bias=None, stride=(1,), padding=(0,), dilation=(1,), groups=1):
        return _unbatched(rank, input, weight, bias, stride, padding, dilation, False, [0], groups)

    def conv_padding(input, weight, bias=None, stride=(1,), padding="valid", dilation=(1,), groups=1):
        pads = _same(padding, weight, _full(dilation, rank))
        low = [a for a, _ in pads]
        extra = [(0, 0)] * (input.ndim - rank) + [(0, b - a) for a, b in pads]
        padded = jnp.pad(input, extra) if any(b != a for a, b in pads) else input
        return _unbatched(rank, padded, weight, bias, stride, low, dilation, False, [0], groups)

    def conv_transpose(
        input, weight, bias=None, stride=(1,), padding=(0,), output_padding=(0,), groups=1, dilation=(1,)
    ):
        return _unbatched(rank, input, weight, bias, stride, padding, dilation, True, output_padding, groups)

    lowering(f"conv{rank}d")(conv)
    lowering(f"conv{rank}d.padding")(conv_padding)
    lowering(f"conv_transpose{rank}d" + ("" if rank == 1 else ".input"))(conv_transpose)


for _rank in (1, 2, 3):
    _register(_rank)
