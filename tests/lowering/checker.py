"""Check lowerings against PyTorch CPU without the device: a dispatch mode that runs every aten call a second time
through JAX.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchtpu.lowering.apply import apply, decomposition, short_name
from torchtpu.lowering.context import OK, Trace, tracing
from torchtpu.lowering.dtypes import to_jax, to_torch
from torchtpu.lowering.registry import find

RANDOM = {"bernoulli", "native_dropout", "rand", "randn", "uniform", "normal", "multinomial"}
UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"}


def to_array(t: torch.Tensor) -> jax.Array:
    """A CPU tensor's value as a JAX array (bit patterns kept for types NumPy does not know)."""
    t = t.detach().resolve_conj().resolve_neg().contiguous()
    dtype = to_jax(t.dtype)
    if t.dtype in (torch.bfloat16,) or "float8" in str(t.dtype):
        bits = t.view(torch.int16 if t.element_size() == 2 else torch.uint8).numpy()
        return jax.numpy.asarray(bits.view(dtype))
    return jax.numpy.asarray(t.numpy(), dtype=dtype)


def to_tensor(a: Any) -> torch.Tensor:
    """A JAX array as a CPU tensor."""
    n = np.array(a, copy=True)
    dtype = to_torch(n.dtype)
    if dtype is torch.bfloat16 or "float8" in str(dtype):
        return torch.from_numpy(n.view(np.int16 if n.itemsize == 2 else np.uint8)).view(dtype)
    return torch.from_numpy(n)


@functools.cache
def _operand_arguments(op: torch._ops.OpOverload) -> dict[str, bool]:
    """Whether a Python number given for an argument is a run-time operand of the program."""
    entry = find(short_name(op))
    kinds = {"number", "float", "Tensor"}
    return {
        a.name: entry is not None
        and str(a.type).replace("Optional[", "").replace("List[", "").rstrip("]") in kinds
        and a.name not in entry.static
        for a in op._schema.arguments
    }


def run_lowering(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run an aten overload on CPU tensors through its lowering, jitted as the device does; returns CPU tensors."""
    operand = _operand_arguments(op)
    names = [a.name for a in op._schema.arguments][: len(args)] + list(kwargs)
    trees = [tree_flatten(v) for v in (*args, *kwargs.values())]
    slots: list[tuple[int, int]] = []
    values: list[Any] = []
    messages: list[Any] = []

    def traced(*operands: Any) -> Any:
        filled = [list(leaves) for leaves, _ in trees]
        for (i, j), value in zip(slots, operands, strict=True):
            filled[i][j] = value
        rebuilt = [tree_unflatten(leaves, spec) for leaves, (_, spec) in zip(filled, trees, strict=True)]
        trace = Trace(key=jax.random.key(0))
        with tracing(trace):
            out = apply(op, tuple(rebuilt[: len(args)]), dict(zip(kwargs, rebuilt[len(args) :], strict=True)))
        messages[:] = [(c.message, c.error) for c in trace.checks]
        return out, [c.value for c in trace.checks]

    with jax.enable_x64(True):
        for i, (name, (leaves, _)) in enumerate(zip(names, trees, strict=True)):
            for j, leaf in enumerate(leaves):
                if isinstance(leaf, torch.Tensor):
                    slots.append((i, j))
                    values.append(to_array(leaf))
                elif isinstance(leaf, bool | int | float | complex) and operand[name]:
                    slots.append((i, j))
                    values.append(leaf)
        entry = find(short_name(op))
        program = traced if entry is not None and entry.dynamic else jax.jit(traced)
        out, checks = program(*values)
        for (message, error), value in zip(messages, checks, strict=True):
            if int(value) != OK:
                raise error(message.format(value=int(value)))
        leaves_out, out_spec = jax.tree.flatten(out)
        return jax.tree.unflatten(
            out_spec, [to_tensor(x) if isinstance(x, jax.Array | np.ndarray) else x for x in leaves_out]
        )


def compare(op: torch._ops.OpOverload, actual: Any, expected: Any) -> None:
    """Same number of results, same shape and dtype, values within ``torch.testing``'s tolerances."""
    a = [x for x in torch.utils._pytree.tree_leaves(actual) if x is not None]
    e = [x for x in torch.utils._pytree.tree_leaves(expected) if x is not None]
    assert len(a) == len(e), f"{op}: {len(a)} results for {len(e)}"
    for x, y in zip(a, e, strict=True):
        if not isinstance(y, torch.Tensor):
            continue
        y = y.detach().resolve_conj().resolve_neg()
        assert x.dtype == y.dtype and x.shape == y.shape, f"{op}: {x.dtype}{list(x.shape)} for {y.dtype}{list(y.shape)}"
        torch.testing.assert_close(x, y.contiguous(), equal_nan=True, msg=lambda m, op=op: f"{op}: {m}")


def check(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> None:
    """Compare one functional operator's lowering with PyTorch CPU."""
    compare(op, run_lowering(op, *args, **kwargs), op(*args, **kwargs))


class CheckLowerings(TorchDispatchMode):
    """Under this mode every functional aten call on CPU tensors is repeated through its lowering and compared.

    ``failures`` collects (operator, error); ``seen`` the operators checked; ``missing`` those with no lowering or
    decomposition.
    """

    def __init__(self, only: set[str] | None = None) -> None:
        super().__init__()
        self.only, self.failures, self.seen, self.missing = only, [], set(), set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = short_name(op)
        base = name.split(".")[0]
        skip = (
            op._schema.is_mutable or base in RANDOM | UNINITIALISED or (self.only is not None and base not in self.only)
        )
        has = find(name) is not None or decomposition(op) is not None
        if not skip and not has:
            self.missing.add(name)
        expected = op(*args, **kwargs)
        if not skip and has:
            self.seen.add(name)
            try:
                compare(op, run_lowering(op, *args, **kwargs), expected)
            except Exception as error:
                self.failures.append((name, error, args, kwargs))
        return expected


def sweep(
    entry: str, dtypes: tuple[torch.dtype, ...] = (torch.float32,), limit: int = 10, backward: bool = True
) -> CheckLowerings:
    """Run op_db entries of that name (all variants) under ``CheckLowerings``, forward and backward, and return what was
    found.
    """
    from torch.testing._internal.common_methods_invocations import op_db

    mode = CheckLowerings()
    for info in (i for i in op_db if i.name == entry):
        for dtype in dtypes:
            if dtype not in info.dtypes:
                continue
            grad = backward and info.supports_autograd and dtype.is_floating_point
            for n, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=grad)):
                if n >= limit:
                    break
                with mode:
                    out = info(sample.input, *sample.args, **sample.kwargs)
                    outs = [
                        o
                        for o in torch.utils._pytree.tree_leaves(out)
                        if isinstance(o, torch.Tensor) and o.requires_grad
                    ]
                    if grad and outs:
                        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    return mode


if __name__ == "__main__":
    import sys

    for argument in sys.argv[1:]:
        found = sweep(argument, (torch.float32, torch.int64, torch.bool, torch.bfloat16))
        print(argument, "ok:", sorted(found.seen), "MISSING:", sorted(found.missing))
        for name, error, args, kwargs in found.failures[:6]:
            print(
                "  FAIL",
                name,
                str(error)[:400].replace("\n", " "),
                "| args:",
                str(args)[:160].replace("\n", " "),
                str(kwargs)[:100],
            )
