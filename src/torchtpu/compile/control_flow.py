"""PyTorch's control flow operators as XLA's: ``cond``, ``while_loop``, ``scan``, ``map``, and subgraphs called by name.

A body is a graph of its own. What it checks at run time (an index out of range) leaves it as extra results, so that the
error is the same as outside a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch._ops import OpOverload

from torchtpu.lowering.apply import NoLowering, apply, run_graph
from torchtpu.lowering.context import OK, Check, Trace, current, tracing

__all__ = ["Body", "first_failure", "run_operator"]

Graph = torch.fx.GraphModule


class Body:
    """A subgraph as a function of arrays.

    Args:
        module: the subgraph.

    Attributes:
        checks: the messages and error types of its run-time checks, once it has been traced.
    """

    def __init__(self, module: Graph) -> None:
        self.module = module
        self.checks: list[tuple[str, type[Exception]]] = []

    def __call__(self, *args: Any) -> tuple[list[Any], list[jax.Array]]:
        """Its results, and the values of its checks."""
        trace = Trace(_no_draws)
        with tracing(trace):
            results = run_graph(self.module.graph, list(args), run_operator)
        self.checks = [(c.message, c.error) for c in trace.checks]
        results = results if isinstance(results, tuple | list) else [results]
        return [jnp.asarray(r) for r in results], [c.value for c in trace.checks]

    def learn(self, *args: Any) -> None:
        """Trace it for its checks alone."""
        jax.eval_shape(self, *args)

    def report(self, values: Sequence[jax.Array]) -> None:
        """Hand the values of its checks to the program around it."""
        current().checks += [Check(v, m, e) for v, (m, e) in zip(values, self.checks, strict=True)]


def _no_draws() -> jax.Array:
    raise NotImplementedError(
        "random numbers inside the body of cond, while_loop, scan or map are not supported on tpu: draw them before"
    )


def _cond(pred: Any, true: Graph, false: Graph, operands: Sequence[Any] = ()) -> Any:
    taken, other = Body(true), Body(false)
    if not isinstance(pred, jax.Array):
        results, values = (taken if pred else other)(*operands)
        (taken if pred else other).report(values)
        return results
    taken.learn(*operands)
    other.learn(*operands)
    passed = ([jnp.int64(OK)] * len(taken.checks), [jnp.int64(OK)] * len(other.checks))

    def yes(*args: Any) -> Any:
        results, values = taken(*args)
        return results, values, passed[1]

    def no(*args: Any) -> Any:
        results, values = other(*args)
        return results, passed[0], values

    results, first, second = jax.lax.cond(pred.reshape(()), yes, no, *operands)
    taken.report(first)
    other.report(second)
    return results


def _while_loop(condition: Graph, body: Graph, carried: Sequence[Any], additional: Sequence[Any] = ()) -> Any:
    test, step = Body(condition), Body(body)
    state = [jnp.asarray(x) for x in carried]
    step.learn(*state, *additional)

    def advance(loop: Any) -> Any:
        state, seen = loop
        results, values = step(*state, *additional)
        kept = [jnp.where(s == OK, v, s) for s, v in zip(seen, values, strict=True)]
        return [r.astype(s.dtype) for r, s in zip(results, state, strict=True)], kept

    start = state, [jnp.int64(OK)] * len(step.checks)
    results, seen = jax.lax.while_loop(lambda loop: test(*loop[0], *additional)[0][0].reshape(()), advance, start)
    step.report(seen)
    return results


def _scan(combine: Graph, init: Sequence[Any], xs: Sequence[Any], additional: Sequence[Any] = ()) -> Any:
    step = Body(combine)

    def advance(carry: Any, x: Any) -> Any:
        results, values = step(*carry, *x, *additional)
        carried = [r.astype(c.dtype) for r, c in zip(results, carry, strict=False)]
        return carried, (results[len(carry) :], values)

    carry, (stacked, values) = jax.lax.scan(advance, list(init), list(xs))
    step.report([first_failure(v) for v in values])
    return [*carry, *stacked]


def _map(body: Graph, xs: Sequence[Any], additional: Sequence[Any] = ()) -> Any:
    return _scan(body, [], xs, additional)


def first_failure(values: jax.Array) -> jax.Array:
    """Of a check's values over all iterations the first that failed."""
    values = values.reshape(-1)
    return values[jnp.argmax(values != OK)]


def _call(body: Graph, *rest: Any) -> Any:
    """``invoke_subgraph(body, identifier, *operands)``: a region that PyTorch traces once and calls often."""
    called = Body(body)
    results, values = called(*(x for x in rest if not isinstance(x, str)))
    called.report(values)
    return results


_HIGHER_ORDER: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "map_impl": _map,
    "invoke_subgraph": _call,
}


def run_operator(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run any operator of a graph on arrays, those that take graphs among them.

    Raises:
        NoLowering: there is no form of it here.
    """
    if isinstance(target, OpOverload):
        return apply(target, tuple(args), kwargs)
    from torchtpu.compile.flex_attention import FLEX_ATTENTION

    function = (_HIGHER_ORDER | FLEX_ATTENTION).get(target.name())
    if function is None:
        raise NoLowering(f"{target.name()} has no lowering on tpu")
    return function(*args, **kwargs)
