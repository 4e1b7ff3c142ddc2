"""The random operators of a graph draw the numbers that they would draw one by one: each takes its draw from the
generator in program order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._higher_order_ops.effects import with_effects
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from torchtpu.compile.control_flow import run_operator
from torchtpu.eager.program import key_of
from torchtpu.lowering.apply import apply, short_name
from torchtpu.lowering.context import Trace
from torchtpu.lowering.registry import find

__all__ = ["Draws", "takes_draws"]


def takes_draws(node: torch.fx.Node) -> bool:
    """Whether a node of a graph may draw from the generator."""
    target = node.args[0] if node.target is run_and_save_rng_state else node.target
    entry = find(short_name(target)) if isinstance(target, OpOverload) else None
    return entry is not None and entry.random


class Draws:
    """Runs the operators of a graph being traced and hands out their draws.

    Args:
        trace: the program being traced.
        seed: (seed, offset) of the generator as four words, where the graph begins; None if nothing draws.
        apply: runs an aten operator.

    Attributes:
        count: draws taken so far, by which the generator advances when the program runs.
    """

    def __init__(self, trace: Trace, seed: jax.Array | None, apply: Callable[..., Any] = apply) -> None:
        self.trace, self.seed, self.count, self.apply = trace, seed, 0, apply

    def run(self, target: OpOverload | HigherOrderOperator, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operator. Activation checkpointing wraps those that it repeats: the first time the generator's state is
        a result, the second time it is an argument, and nothing is taken from the generator.
        """
        if isinstance(target, OpOverload):
            self.trace.begin_operator(self.reserve)
            return self.apply(target, tuple(args), kwargs)
        if target is run_and_save_rng_state:
            state = jax.lax.bitcast_convert_type(self._words(), jnp.uint8).reshape(-1)
            return state, self.run(args[0], args[1:], kwargs)
        if target is run_with_rng_state:
            words = jax.lax.bitcast_convert_type(args[0].reshape(4, 4), jnp.uint32)
            self.trace.begin_operator(lambda: key_of(words))
            return apply(args[1], tuple(args[2:]), kwargs)
        if target is with_effects:  # the token keeps operators in order, which a program does by itself
            result = self.run(args[1], args[2:], kwargs)
            return args[0], *(result if isinstance(result, tuple) else (result,))
        return run_operator(target, args, kwargs)

    def reserve(self) -> jax.Array:
        """The key of an operator that draws."""
        key = key_of(self._words())
        self.count += 1
        return key

    def _words(self) -> jax.Array:
        """(seed, offset) after the draws taken so far; the offset has 64 bits."""
        assert self.seed is not None  # a graph in which something draws is given one
        offset = jax.lax.bitcast_convert_type(self.seed[2:], jnp.uint64) + self.count
        return jnp.concatenate([self.seed[:2], jax.lax.bitcast_convert_type(offset, jnp.uint32)])
