"""Register the kernels with PyTorch's dispatcher.

An overload is registered when it has a lowering, or derives from an operator that has one; a boxed fallback takes
every other overload
that reaches the device. Registering matters for operators whose own composite kernels would otherwise win over the
fallback and split
them into several programs (``add.Tensor`` into ``empty`` and ``add.out``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from torchtpu.eager.fakes import META_KERNELS, register_fakes
from torchtpu.eager.fallback import run_on_cpu
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.eager.host import HOST_KERNELS
from torchtpu.eager.kernels import make_kernel
from torchtpu.eager.preconditions import require_one_device
from torchtpu.eager.schema import derive
from torchtpu.eager.sparse import SPARSE_KERNELS
from torchtpu.eager.sparse_compressed import COMPRESSED_KERNELS
from torchtpu.eager.special import SPECIAL_KERNELS
from torchtpu.lowering.apply import short_name
from torchtpu.lowering.registry import find

__all__ = ["register"]

# Metadata only, in C++ or by PyTorch itself: never a program.
_NOT_PROGRAMS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "empty_quantized"),
    *("detach", "alias", "lift", "lift_fresh", "contiguous", "_to_copy", "to", "resize_", "set_", "resize_as_"),
    *(
        "as_strided_",
        "detach_",
        "resolve_conj",
        "resolve_neg",
        "_conj",
        "_neg_view",
        # these share memory, which PyTorch relies on: kron.out writes through _unsafe_view
        *("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"),
        "rename",
        "clone_preserve_strides",
    ),
}


def register() -> list[torch.library.Library]:
    """Register all kernels; the returned libraries must be kept alive."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (HOST_KERNELS | SPECIAL_KERNELS).items():
        hide_from_dynamo(kernel)
        library.impl(name, kernel, "PrivateUse1")
    for op in _programs():
        library.impl(short_name(op).removesuffix(".default"), _lazy_kernel(op), "PrivateUse1")
    for name, kernel in META_KERNELS.items():
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "Meta"):
            library.impl(name, kernel, "Meta")
    register_fakes()
    hide_from_dynamo(_fallback)
    catch_all = torch.library.Library("_", "IMPL")
    catch_all.fallback(_fallback, "PrivateUse1")
    for key, kernels in (("SparsePrivateUse1", SPARSE_KERNELS), ("SparseCsrPrivateUse1", COMPRESSED_KERNELS)):
        for name, kernel in kernels.items():
            library.impl(name, _on_one_device(name, kernel), key)
        catch_all.fallback(_sparse_fallback, key)
    return [library, catch_all]


def _programs() -> list[OpOverload]:
    """Every aten overload that runs as one program and that PyTorch would not route well by itself."""
    taken = set(HOST_KERNELS) | set(SPECIAL_KERNELS)
    found = []
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        full = f"{base}.{overload}" if overload else base
        if namespace != "aten" or base in _NOT_PROGRAMS or full in taken:
            continue
        packet = getattr(torch.ops.aten, base, None)
        if packet is None or (overload or "default") not in packet.overloads():
            continue
        op = getattr(packet, overload or "default")
        if _is_view(op) or torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd"):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "PrivateUse1"):
            continue
        if op._schema.is_mutable:
            derived = derive(op)
            # ``transpose_`` and its like change the geometry of a tensor and no value; PyTorch does that itself.
            if derived is not None and _is_view(derived.functional):
                continue
            if derived is not None and find(short_name(derived.functional)) is not None:
                found.append(op)
        elif find(short_name(op)) is not None:
            found.append(op)
    return found


def _is_view(op: OpOverload) -> bool:
    return any(a.alias_info is not None and not a.alias_info.is_write for a in op._schema.arguments)


def _lazy_kernel(op: OpOverload) -> Callable[..., Any]:
    """A kernel made at its first call: most of the hundreds are never called."""
    kernel: Callable[..., Any] | None = None

    def first(*args: Any, **kwargs: Any) -> Any:
        nonlocal kernel
        if kernel is None:
            kernel = make_kernel(op)
        return kernel(*args, **kwargs)

    hide_from_dynamo(first)
    return first


_others: dict[OpOverload, Callable[..., Any]] = {}


def _fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Whatever nobody registered: decomposed into one program if PyTorch knows how, else on the CPU."""
    kernel = _others.get(op)
    if kernel is None:
        kernel = _others[op] = make_kernel(op)
    return kernel(*args, **kwargs)


def _on_one_device(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of sparse tensors, after the check that those of programs make themselves."""
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")

    def checked(*args: Any, **kwargs: Any) -> Any:
        require_one_device(op, args, kwargs)
        return kernel(*args, **kwargs)

    return checked


def _sparse_fallback(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What neither PyTorch's own code nor a kernel does with sparse tensors: on the CPU, or refused as it refuses."""
    return run_on_cpu(op, args, kwargs)
