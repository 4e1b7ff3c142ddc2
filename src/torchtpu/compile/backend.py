"""``torch.compile(backend="tpu")``: Dynamo captures, AOTAutograd differentiates and functionalises, each graph is one
program.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from torchtpu.compile.attention import simplify_attention
from torchtpu.compile.gathering import partition
from torchtpu.compile.graph import GraphProgram
from torchtpu.compile.padding import Buckets
from torchtpu.compile.segments import SegmentedProgram, has_collectives

__all__ = ["backend"]


def _compiler(buckets: Buckets) -> Callable[..., Any]:
    def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if has_collectives(module):
            return make_boxed_func(SegmentedProgram(module, lambda part: GraphProgram(part, buckets)))
        return make_boxed_func(GraphProgram(module, buckets))

    return aot_autograd(fw_compiler=compile_graph, partition_fn=partition)


def backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a captured graph. Dynamo calls this; users write ``torch.compile(model)``.

    ``options={"buckets": ...}`` says which sizes programs are compiled for where a size changes: see ``Buckets``.
    Every ``mode`` means the same, since XLA optimises whole programs. ``options`` of PyTorch's own compiler
    ("triton.cudagraphs" and so on) have no meaning here and are named in a warning.

    Raises:
        TypeError: an option that neither compiler knows.
        ValueError: buckets that are none.
    """
    options.pop("mode", None)
    given = dict(options.pop("options", None) or {})
    buckets = Buckets(given.pop("buckets", None))
    if options:
        raise TypeError(f"the tpu backend takes mode= and options=, got {', '.join(options)}")
    if given:
        from torch._inductor import config

        known = config.get_config_copy()
        unknown = [name for name in given if name.replace("-", "_") not in known]
        if unknown:
            raise TypeError(f"torch.compile on tpu: unknown option {', '.join(unknown)}")
        warnings.warn(f"torch.compile on tpu has no use for the option {', '.join(given)}", stacklevel=2)
    simplify_attention(module)
    # Tokens of operators with effects, such as assertions, stay inside the graph: they are no tensors of the device.
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        return _compiler(buckets)(module, inputs)
