"""Random chains of view and in-place operators: every alias must see what CPU tensors see, with the same sizes and
strides.
"""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

import torchtpu  # noqa: F401

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def dim_of(t: torch.Tensor, pick: int) -> int:
    return pick % t.dim()


def transpose(t, a, b, c):
    return t.transpose(dim_of(t, a), dim_of(t, b))


def permute(t, a, b, c):
    order = list(range(t.dim()))
    return t.permute(order[a % t.dim() :] + order[: a % t.dim()])


def select(t, a, b, c):
    d = dim_of(t, a)
    return t.select(d, b % t.shape[d]) if t.shape[d] else t


def narrow(t, a, b, c):
    d = dim_of(t, a)
    start = b % t.shape[d] if t.shape[d] else 0
    return t[(slice(None),) * d + (slice(start, start + 1 + c),)]


def step(t, a, b, c):
    d = dim_of(t, a)
    return t[(slice(None),) * d + (slice(b % 2, None, 1 + c % 3),)]


def unsqueeze(t, a, b, c):
    return t.unsqueeze(a % (t.dim() + 1))


def squeeze(t, a, b, c):
    return t.squeeze()


def expand(t, a, b, c):
    return t.unsqueeze(0).expand(2, *t.shape) if t.dim() < 4 else t


def flat_view(t, a, b, c):
    return t.view(-1) if t.is_contiguous() else t


def split_view(t, a, b, c):
    d = dim_of(t, a)
    return t.unflatten(d, (2, -1)) if t.shape[d] % 2 == 0 and t.shape[d] else t


def unfold(t, a, b, c):
    d = dim_of(t, a)
    return t.unfold(d, 2, 1 + b % 2) if t.shape[d] >= 2 else t


def diagonal(t, a, b, c):
    return t.diagonal(b % 3 - 1, 0, 1) if t.dim() >= 2 else t


def strided(t, a, b, c):
    n = t.untyped_storage().nbytes() // t.element_size()
    return torch.as_strided(t, (2, 2), (1 + b % 2, 1), min(a % 3, n - 4)) if n >= 6 else t


def movedim(t, a, b, c):
    return t.movedim(dim_of(t, a), dim_of(t, b))


def chunk(t, a, b, c):
    return t.chunk(2, dim_of(t, a))[-1]


def unbind(t, a, b, c):
    d = dim_of(t, a)
    return t.unbind(d)[0] if t.shape[d] else t


def bits(t, a, b, c):
    other = {torch.float32: torch.int32, torch.int32: torch.float32}.get(t.dtype)
    return t.view(other) if other is not None else t


def as_bytes(t, a, b, c):
    return t.view(torch.int16) if t.dtype is torch.float32 and t.dim() and t.stride(-1) == 1 else t


def pairs(t, a, b, c):
    if t.is_complex():
        return torch.view_as_real(t.resolve_conj())
    suits = (
        t.dtype is torch.float32 and t.dim() and t.shape[-1] == 2 and t.stride(-1) == 1 and t.storage_offset() % 2 == 0
    )
    return torch.view_as_complex(t) if suits and all(s % 2 == 0 for s in t.stride()[:-1]) else t


VIEWS = [
    *(
        transpose,
        permute,
        select,
        narrow,
        step,
        unsqueeze,
        squeeze,
        expand,
        flat_view,
        split_view,
        unfold,
        diagonal,
        strided,
    ),
    *(movedim, chunk, unbind, bits, as_bytes, pairs),
]


def number(t, a):
    """A value to write; as bits of a float32 it is a normal number, since XLA:CPU takes subnormal ones for zero."""
    if t.dtype is torch.int32:
        return 0x3F000000 + (a % 7 << 16)
    if t.dtype is torch.int16:
        return 0x3F00 + a % 7
    return a % 7 + 0.5


def add_(t, a, b, c):
    t.add_(number(t, a) if t.is_floating_point() or t.is_complex() else 0)


def mul_(t, a, b, c):
    t.mul_(number(t, a) / 4 if t.is_floating_point() or t.is_complex() else 1)


def fill_(t, a, b, c):
    t.fill_(number(t, b))


def zero_(t, a, b, c):
    t.zero_()


def copy_reversed(t, a, b, c):
    t.copy_(t.flip(0).clone() if t.dim() else t.clone())


def add_self(t, a, b, c):
    if t.is_floating_point() or t.is_complex():
        t.add_(t)


def add_transposed(t, a, b, c):
    if t.dim() >= 2 and t.shape[0] == t.shape[1] and t.is_floating_point():
        t.add_(t.transpose(0, 1))


def masked_fill_(t, a, b, c):
    t.masked_fill_(t == 0, number(t, c))


def set_item(t, a, b, c):
    if t.dim() and t.shape[0]:
        t[b % t.shape[0]] = number(t, c)


def out_of_place(t, a, b, c):
    if t.is_floating_point() or t.is_complex():
        torch.add(t, 1, out=t)


WRITES = [add_, mul_, fill_, zero_, copy_reversed, add_self, add_transposed, masked_fill_, set_item, out_of_place]


def repeats(t: torch.Tensor) -> bool:
    """Whether some element of memory appears more than once in the tensor."""
    places = torch.arange(t.untyped_storage().nbytes() // t.element_size()).as_strided(
        t.shape, t.stride(), t.storage_offset()
    )
    return places.unique().numel() < t.numel()


def same(cpu: torch.Tensor, tpu: torch.Tensor) -> None:
    assert (cpu.shape, cpu.stride(), cpu.storage_offset(), cpu.dtype) == (
        tpu.shape,
        tpu.stride(),
        tpu.storage_offset(),
        tpu.dtype,
    )
    torch.testing.assert_close(tpu.cpu(), cpu, rtol=1e-5, atol=1e-5, equal_nan=True)


STEP = st.tuples(
    st.booleans(), st.integers(0, 99), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)
)


@settings(
    max_examples=int(os.environ.get("TORCHTPU_VIEW_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize="TORCHTPU_VIEW_EXAMPLES" not in os.environ,
)
@given(
    sizes=SIZES,
    layout=st.sampled_from(["contiguous", "channels_last", "permuted"]),
    steps=st.lists(STEP, min_size=3, max_size=8),
)
def test_chains(mode, sizes, layout, steps):
    base = torch.arange(float(torch.Size(sizes).numel())).reshape(sizes)
    if layout == "channels_last" and len(sizes) == 4:
        base = base.contiguous(memory_format=torch.channels_last)
    if layout == "permuted":
        base = base.t() if base.dim() == 2 else base.transpose(0, -1)
    base = base.clone()
    cpu, tpu = [base], [base.to("tpu")]
    same(cpu[0], tpu[0])
    for write, operation, which, a, b, c in steps:
        i = which % len(cpu)
        if cpu[i].dim() == 0 and not write:
            continue
        function = WRITES[operation % len(WRITES)] if write else VIEWS[operation % len(VIEWS)]
        if write and repeats(cpu[i]) and 0 not in cpu[i].stride():
            function = (fill_, zero_)[
                a % 2
            ]  # anything else depends on the order of elements, which PyTorch leaves open
        note(f"{function.__name__} on {i}: {tuple(cpu[i].shape)} {cpu[i].stride()} {cpu[i].dtype}, {a} {b} {c}")
        if write:
            before = cpu[0].clone()
            try:
                function(cpu[i], a, b, c)
            except (RuntimeError, IndexError) as error:
                with pytest.raises(type(error)):
                    function(tpu[i], a, b, c)
                if not torch.equal(before, cpu[0]):
                    return  # CPU had written a part before it noticed
                continue
            function(tpu[i], a, b, c)
        else:
            try:
                view = function(cpu[i], a, b, c)
            except (RuntimeError, IndexError) as error:
                with pytest.raises(type(error)):
                    function(tpu[i], a, b, c)
                continue
            cpu.append(view)
            tpu.append(function(tpu[i], a, b, c))
            assert tpu[-1]._is_view() == view._is_view()
        for x, y in zip(cpu, tpu, strict=True):
            same(x, y)
