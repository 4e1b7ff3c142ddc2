"""A jaxpr as bodies of equations: calls are gone into, loops and conditionals are nodes with bodies of their own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.extend.core
import numpy as np

from torchtpu.aot.costs import kind, nbytes
from torchtpu.aot.kernels import Kernel, kernel_flops
from torchtpu.aot.scope import split_scope

__all__ = ["Level", "Node", "Value", "flatten"]

_CALLS = {
    **dict.fromkeys(("jit", "pjit", "remat2", "remat", "checkpoint", "custom_vjp_call_jaxpr"), "jaxpr"),
    **dict.fromkeys(("closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "xla_call"), "call_jaxpr"),
}
_KNOWN_UP_TO = 1 << 22  # elements of a constant whose value is kept


class Value:
    """An array in a body.

    Attributes:
        bytes: its size.
        producer: the node it comes from; None for an argument.
        root: the value of which it is another view; itself as a rule.
        free: whether it is computed where it is needed and takes no memory.
        known: its elements, if they are known when the program is traced.
    """

    __slots__ = ("bytes", "free", "known", "producer", "root")

    def __init__(self, aval: Any, producer: Node | None = None, known: Any = None) -> None:
        self.bytes = nbytes(aval)
        self.producer = producer
        self.root: Value = self
        self.known = known
        self.free = False


@dataclass(eq=False)
class Node:
    """An equation of a body, or a loop or conditional with bodies.

    Attributes:
        kind: as ``costs.kind`` has it, or ``"kernel"`` or ``"control"``.
        reads: bytes read of an argument, by position, where it is not all of it.
        writes: bytes written, where it is not all of the results.
        trips: how often a loop goes round.
        shards: devices that run the bodies side by side, each on its part.
        replicas: how many of them do the same, since no argument is split over them.
        alternatives: whether one of the bodies runs, rather than all.
        carried: number of values that a loop carries, and where they are among a body's arguments and results.
    """

    eqn: Any
    index: int
    kind: str
    scope: str
    phase: str
    inputs: list[Value]
    outputs: list[Value] = field(default_factory=list)
    reads: dict[int, int] = field(default_factory=dict)
    writes: int | None = None
    name: str = ""
    kernel_flops: float = 0.0
    kernel_bytes: tuple[int, int] | None = None
    transcendentals: float = 0.0
    bodies: list[Level] = field(default_factory=list)
    trips: int = 1
    shards: int = 1
    replicas: int = 1
    alternatives: bool = False
    carried: tuple[int, int] | None = None

    def wanted_of_body(self, body: Level, wanted: list[bool]) -> list[bool]:
        """Which results of a body are used, if these results of the node are."""
        if len(body.outputs) != len(wanted):
            return [True] * len(body.outputs)  # the condition of a loop
        if self.carried is None:
            return wanted
        number, at = self.carried
        needed = list(wanted)
        while True:  # what a result that is used depends on, in the round before
            arguments = body.needed(needed)
            before = [arguments[at + i] or needed[i] for i in range(number)]
            if before == needed[:number]:
                return needed
            needed[:number] = before

    def needed(self, wanted: list[bool]) -> list[bool]:
        """Which arguments are used, if these results are."""
        if self.kind != "control" or not self.bodies or self.eqn.primitive.name == "while":
            return [True] * len(self.inputs)
        found = [False] * len(self.inputs)
        first = len(self.inputs) - len(self.bodies[0].arguments)  # the index of a conditional comes before the rest
        for body in self.bodies:
            for i, used in enumerate(body.needed(self.wanted_of_body(body, wanted))):
                found[first + i] |= used
        return [True] * first + found[first:]


@dataclass(eq=False)
class Level:
    """A body: its nodes in order, and which values are its arguments and results."""

    arguments: list[Value]
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)

    def live(self, wanted: Sequence[bool]) -> tuple[list[Node], dict[int, list[bool]]]:
        """The nodes that some wanted result depends on, and which of the results of each are used."""
        used = {id(v) for v, w in zip(self.outputs, wanted, strict=True) if w}
        found, results = [], {}
        for node in reversed(self.nodes):
            mask = [id(v) in used for v in node.outputs]
            if not any(mask) and not node.eqn.effects:
                continue
            found.append(node)
            results[node.index] = mask
            used.update(id(v) for v, u in zip(node.inputs, node.needed(mask), strict=True) if u)
        return found[::-1], results

    def needed(self, wanted: Sequence[bool]) -> list[bool]:
        """Which arguments some wanted result depends on."""
        used = {id(v) for v, w in zip(self.outputs, wanted, strict=True) if w}
        live, results = self.live(wanted)
        for node in live:
            used.update(id(v) for v, u in zip(node.inputs, node.needed(results[node.index]), strict=True) if u)
        return [id(v) in used for v in self.arguments]


def flatten(program: Any, assume: Callable[[str], None]) -> Level:
    """A closed jaxpr as bodies.

    Args:
        program: ``jax.extend.core.ClosedJaxpr``.
        assume: told each assumption, as a sentence.
    """
    return _body(program, [None] * len(program.jaxpr.invars), "", "", assume)


def _body(program: Any, known: Sequence[Any], stack: str, within: str, assume: Callable[[str], None]) -> Level:
    jaxpr = getattr(program, "jaxpr", program)
    arguments = [Value(v.aval, known=k) for v, k in zip(jaxpr.invars, known, strict=True)]
    level = Level(arguments)
    walker = _Walker(level, assume)
    level.outputs = walker.run(jaxpr, getattr(program, "consts", ()), arguments, stack, within)
    return level


class _Walker:
    """Appends the equations of a jaxpr, and of those it calls, to a body."""

    def __init__(self, level: Level, assume: Callable[[str], None]) -> None:
        self.level, self.assume = level, assume

    def run(self, jaxpr: Any, consts: Sequence[Any], arguments: list[Value], stack: str, within: str) -> list[Value]:
        held = [Value(v.aval, known=_kept(c)) for v, c in zip(jaxpr.constvars, consts, strict=False)]
        held += [Value(v.aval) for v in jaxpr.constvars[len(held) :]]
        values: dict[Any, Value] = dict(zip([*jaxpr.invars, *jaxpr.constvars], [*arguments, *held], strict=True))

        def read(v: Any) -> Value:
            if not isinstance(v, jax.extend.core.Literal):
                return values[v]
            literal = Value(v.aval, known=_kept(v.val))
            literal.free = True
            return literal

        for eqn in jaxpr.eqns:
            here = "/".join(x for x in (stack, str(eqn.source_info.name_stack)) if x)
            inputs = [read(v) for v in eqn.invars]
            name = eqn.primitive.name
            if name in _CALLS and _CALLS[name] in eqn.params:
                inner = eqn.params[_CALLS[name]]
                called = str(eqn.params.get("name") or within)
                body, constants = getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())
                outputs = self.run(body, constants, inputs, here, called)
            else:
                outputs = self._node(eqn, inputs, here, within).outputs
            values.update(zip(eqn.outvars, outputs, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _node(self, eqn: Any, inputs: list[Value], stack: str, within: str) -> Node:
        name = eqn.primitive.name
        scope, phase = split_scope(stack)
        node = Node(eqn, len(self.level.nodes), kind(name), scope, phase, inputs)
        node.outputs = [Value(v.aval, node) for v in eqn.outvars]
        self.level.nodes.append(node)
        if name == "pallas_call":
            self._kernel(node, within)
        elif name in _CONTROL:
            node.kind = "control"
            _CONTROL[name](self, node, stack, within)
        elif inner := _jaxprs(eqn.params) if kind(name) == "fused" else []:
            node.kind = "control"
            self.assume(f"the programs inside {name} are counted once each")
            node.bodies = [self._inner(p, node, stack, within) for p in inner]
        else:
            _views(node)
        return node

    def _inner(self, program: Any, node: Node, stack: str, within: str, known: Sequence[Any] | None = None) -> Level:
        jaxpr = getattr(program, "jaxpr", program)
        return _body(program, known or [None] * len(jaxpr.invars), stack, within, self.assume)

    def _kernel(self, node: Node, within: str) -> None:
        eqn = node.eqn
        node.kind, node.name = "kernel", str(eqn.params.get("name") or within or "kernel")
        estimate = eqn.params.get("cost_estimate")
        if estimate is not None:
            node.kernel_flops, node.transcendentals = float(estimate.flops), float(estimate.transcendentals)
            written = sum(v.bytes for v in node.outputs)
            node.kernel_bytes = max(0, int(estimate.bytes_accessed) - written), written
            return
        known = {i: v.known for i, v in enumerate(node.inputs) if v.known is not None}
        types = [v.aval for v in eqn.invars], [v.aval for v in eqn.outvars]
        found = kernel_flops(Kernel(node.name, *types, known, dict(eqn.params.get("metadata") or {})))
        if found is None:
            self.assume(f"the FLOPs of the kernel {node.name} are not known and not counted")
            return
        node.kernel_flops = found[0]
        if found[1] is not None:
            self.assume(found[1])

    def _scan(self, node: Node, stack: str, within: str) -> None:
        p = node.eqn.params
        constants = [v.known for v in node.inputs[: p["num_consts"]]]
        known = constants + [None] * (len(node.inputs) - len(constants))
        node.trips, node.carried = p["length"], (p["num_carry"], p["num_consts"])
        node.bodies = [self._inner(p["jaxpr"], node, stack, within, known)]

    def _while(self, node: Node, stack: str, within: str) -> None:
        p = node.eqn.params
        tested, constants = p["cond_nconsts"], p["body_nconsts"]
        carried = node.inputs[tested + constants :]
        known = [v.known for v in node.inputs[tested : tested + constants]] + [None] * len(carried)
        trips = _trip_count(p, [v.known for v in node.inputs[:tested]], [v.known for v in carried])
        if trips is None:
            self.assume("a loop whose number of rounds depends on values is counted as one round")
        node.trips = 1 if trips is None else trips
        bodies = (
            [(p["body_jaxpr"], known)] if trips is not None else [(p["cond_jaxpr"], None), (p["body_jaxpr"], known)]
        )
        node.bodies = [self._inner(program, node, stack, within, k) for program, k in bodies]

    def _cond(self, node: Node, stack: str, within: str) -> None:
        known = [v.known for v in node.inputs[1:]]
        branches = node.eqn.params["branches"]
        chosen = _for_tpu(node.eqn.params.get("branches_platforms"))
        node.alternatives = chosen is None
        branches = branches if chosen is None else [branches[chosen]]
        node.bodies = [self._inner(b, node, stack, within, known) for b in branches]

    def _shard_map(self, node: Node, stack: str, within: str) -> None:
        p = node.eqn.params
        sizes = dict(p["mesh"].shape)
        node.shards = math.prod(sizes[axis] for axis in p["newly_manual_axes"])
        names = (n for spec in p["in_specs"] for part in spec for n in (part if isinstance(part, tuple) else (part,)))
        node.replicas = math.prod(sizes[axis] for axis in p["newly_manual_axes"] - set(names))
        whole = [v.aval.shape == a.aval.shape for v, a in zip(p["jaxpr"].invars, node.eqn.invars, strict=True)]
        known = [v.known if same else None for v, same in zip(node.inputs, whole, strict=True)]
        node.bodies = [self._inner(p["jaxpr"], node, stack, within, known)]


def _for_tpu(platforms: Sequence[Sequence[str] | None] | None) -> int | None:
    """Which branch of ``jax.lax.platform_dependent`` a TPU takes; None for a conditional on values."""
    if platforms is None:
        return None
    named = [i for i, p in enumerate(platforms) if p is not None and "tpu" in p]
    return next(iter(named), None if None not in platforms else platforms.index(None))


_CONTROL = {
    "scan": _Walker._scan,
    "while": _Walker._while,
    "cond": _Walker._cond,
    "shard_map": _Walker._shard_map,
}


def _views(node: Node) -> None:
    """Set what is a view of another value, what is free, and what is read or written in part."""
    name = node.eqn.primitive.name
    if node.kind == "alias":
        for i, output in enumerate(node.outputs):
            source = node.inputs[min(i, len(node.inputs) - 1)] if node.inputs else None
            if source is None:
                output.free = True
            else:
                output.root, output.known = source.root, source.known if output.bytes == source.bytes else None
    elif node.kind == "fused" and all(v.root.free for v in node.inputs):
        for output in node.outputs:
            output.free = True
    if name in ("slice", "dynamic_slice", "gather", "split"):
        node.reads = {0: sum(v.bytes for v in node.outputs)}
    elif name == "dynamic_update_slice":
        node.reads, node.writes = {0: 0}, node.inputs[1].bytes
    elif name.startswith("scatter"):
        node.writes = node.inputs[2].bytes
        node.reads = {0: 0 if name == "scatter" else node.writes}


def _kept(value: Any) -> np.ndarray | None:
    """A constant's elements, unless there are many or they are not there (a tracer, a type)."""
    if isinstance(value, int | float | bool | np.generic):
        return np.asarray(value)
    if isinstance(value, np.ndarray | jax.Array) and not isinstance(value, jax.core.Tracer):
        return np.asarray(value) if value.size <= _KNOWN_UP_TO and value.dtype != object else None
    return None


def _jaxprs(params: dict[str, Any]) -> list[Any]:
    kinds = (jax.extend.core.ClosedJaxpr, jax.extend.core.Jaxpr)
    values = [x for v in params.values() for x in (v if isinstance(v, tuple | list) else (v,))]
    return [x for x in values if isinstance(x, kinds)]


def _trip_count(params: dict[str, Any], constants: list[Any], start: list[Any]) -> int | None:
    """Rounds of a loop that counts up by a constant to a bound that is known, or None."""
    test, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
    if len(test.eqns) != 1 or test.eqns[0].primitive.name not in ("lt", "le"):
        return None
    counted, bound = test.eqns[0].invars
    if isinstance(counted, jax.extend.core.Literal) or counted not in test.invars[len(constants) :]:
        return None
    at = test.invars.index(counted) - len(constants)
    carried = body.invars[len(body.invars) - len(start) :]
    if isinstance(bound, jax.extend.core.Literal):
        limit = bound.val
    else:
        place = test.invars.index(bound) - len(constants) if bound in test.invars else None
        if place is None or (place >= 0 and body.outvars[place] is not carried[place]):
            return None
        limit = constants[place + len(constants)] if place < 0 else start[place]
    steps = [e for e in body.eqns if e.outvars[0] is body.outvars[at]]
    if start[at] is None or limit is None or len(steps) != 1 or steps[0].primitive.name != "add":
        return None
    added = [v for v in steps[0].invars if v is not carried[at]]
    if len(added) != 1 or not isinstance(added[0], jax.extend.core.Literal) or added[0].val <= 0:
        return None
    distance = int(limit) - int(start[at]) + (test.eqns[0].primitive.name == "le")
    return max(0, -(-distance // int(added[0].val)))
