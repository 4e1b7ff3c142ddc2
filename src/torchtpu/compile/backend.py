"""``torch.compile(backend="tpu")``: Dynamo captures, AOTAutograd differentiates and functionalises, each graph is one
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

from torchtpu.compile.graph import GraphProgram

__all__ = ["backend"]


def _compile(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    return make_boxed_func(GraphProgram(module))


_aot = aot_autograd(fw_compiler=_compile)


def backend(module: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a captured graph. Dynamo calls this; users write ``torch.compile(model, backend="tpu")``.

    Raises:
        TypeError: an option was given; there are none yet.
    """
    options.pop("mode", None)  # every mode means the same: XLA optimises whole programs
    if options:
        raise TypeError(f"the tpu backend takes no options, got {', '.join(options)}")
    # Tokens of operators with effects, such as assertions, stay inside the graph: they are no tensors of the device.
    with torch._functorch.config.patch(unlift_effect_tokens=True):
        return _aot(module, inputs)
