"""``torch.compile(backend="tpu")``: Dynamo captures, AOTAutograd differentiates and functionalises, each graph is one
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from torchtpu.compile.graph import GraphProgram
from torchtpu.compile.padding import Buckets

__all__ = ["backend"]


def _compiler(buckets: Buckets) -> Callable[..., Any]:
    def compile_graph(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return make_boxed_func(GraphProgram(module, buckets))

    return aot_autograd(fw_compiler=compile_graph)


def backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a captured graph. Dynamo calls this; users write ``torch.compile(model, backend="tpu")``.

    ``options={"buckets": ...}`` says which sizes programs are compiled for where a size changes: see ``Buckets``.

    Raises:
        TypeError: an option was given that there is not.
    """
    options.pop("mode", None)  # every mode means the same: XLA optimises whole programs
    chosen = dict(options.pop("options", None) or {})
    buckets = Buckets(chosen.pop("buckets", None))
    if unknown := [*options, *chosen]:
        raise TypeError(f"the tpu backend has one option, buckets; got {', '.join(unknown)}")
    return _compiler(buckets)(module, inputs)
