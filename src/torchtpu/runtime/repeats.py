"""Find repeated blocks in a traced program: a decoder's layers, and their backward passes.

A program is a list of equations, most of which call an operator's own equations. Blocks that repeat one after the
other (the same primitives with the same parameters on the same types, wired in the same way) are found by the distance
at which the list equals itself. Each becomes a piece that is compiled once and run as often as it occurs; what lies
between them are pieces that run once.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend import core

__all__ = ["Piece", "any_run", "enabled", "split"]

SMALLEST = 24
"""Equations of the smallest block worth a piece, those of what it calls included: running one costs some 20 us."""
FEWEST = 8
"""Occurrences of a block below which the program is compiled as a whole."""
_SHORTEST = 3
"""Equations of the shortest block, calls counted as one."""
_LAYOUT = ("reshape", "transpose", "squeeze", "broadcast_in_dim", "convert_element_type")
_CANDIDATES = 16
_OCCURRENCES = 8
_PAIRS = 64


@dataclass(frozen=True)
class Piece:
    """One occurrence of a part of a program.

    Attributes:
        function: what it computes; occurrences of a block share it.
        inputs: the program's variables it reads, in the order of its arguments, and constants.
        outputs: the program's variables it defines, in the order of its results.
    """

    function: core.ClosedJaxpr
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


def enabled() -> bool:
    """Whether programs are searched for repeated blocks: ``TORCHTPU_REPEATS``, 1 unless set to 0."""
    return os.environ.get("TORCHTPU_REPEATS", "1") != "0"


def any_run(tokens: Sequence[int]) -> bool:
    """Whether some block of a list of operators comes ``FEWEST`` times in a row; a quick look before tracing."""
    for period in _periods(list(tokens), 0, len(tokens)):
        length = 0
        for a, b in zip(tokens, tokens[period:], strict=False):
            length = length + 1 if a == b else 0
            if length >= period * (FEWEST - 1):
                return True
    return False


def split(closed: core.ClosedJaxpr) -> list[Piece] | None:
    """The program in pieces that run one after the other; None if nothing in it repeats often enough."""
    jaxpr = closed.jaxpr
    if jaxpr.effects or len(jaxpr.eqns) < _SHORTEST * FEWEST:
        return None
    jaxpr = jaxpr.replace(eqns=_settled(jaxpr))
    tokens = _tokens(jaxpr.eqns)
    runs = sorted(_runs(jaxpr.eqns, tokens, 0, len(tokens)))
    if not runs:
        return None
    uses = _uses(jaxpr)
    pieces: list[Piece] = []
    at = 0
    for start, period, repeats in runs:
        if at < start:
            pieces.append(_piece(jaxpr, uses, [(at, start)])[0])
        pieces += _piece(jaxpr, uses, [(start + r * period, start + (r + 1) * period) for r in range(repeats)])
        at = start + period * repeats
    if at < len(jaxpr.eqns):
        pieces.append(_piece(jaxpr, uses, [(at, len(jaxpr.eqns))])[0])
    return pieces


def _settled(jaxpr: Any) -> list[Any]:
    """The equations with each next to what it belongs to: what only prepares an operand for one equation (a weight's
    transpose) right before that, and what only makes a result of the program, or lays out a value for the backward
    pass, right after what it is made from.
    Otherwise there are as many of them before and after the blocks as there are blocks.
    """
    eqns = jaxpr.eqns
    made = {v: i for i, e in enumerate(eqns) for v in e.outvars}
    feeds = [{made[v] for v in e.invars if not isinstance(v, core.Literal) and v in made} for e in eqns]
    readers: list[set[int]] = [set() for _ in eqns]
    for i, before in enumerate(feeds):
        for j in before:
            readers[j].add(i)
    results = {made[v] for v in jaxpr.outvars if not isinstance(v, core.Literal) and v in made}
    early: list[bool] = []  # is made from one operand of the program, or from none
    for e, before in zip(eqns, feeds, strict=True):
        read = {v for v in e.invars if not isinstance(v, core.Literal)}
        early.append(len(read) <= 1 and all(early[j] for j in before))
    moving = [early[i] and len(readers[i]) == 1 and i not in results for i in range(len(eqns))]
    late = [False] * len(eqns)  # leads to results only, from one equation, or says how a value lies in memory
    for i in reversed(range(len(eqns))):
        if not early[i] and sum(not early[j] for j in feeds[i]) == 1:
            alone = not readers[i] or (len(readers[i]) == 1 and late[min(readers[i])])
            late[i] = alone or (len(feeds[i]) == 1 and eqns[i].primitive.name in _LAYOUT)
    places = [(i, 0) for i in range(len(eqns))]
    possible = list(range(len(eqns)))  # the place after which an equation may come at the earliest
    for i, before in enumerate(feeds):
        if late[i] or moving[i]:
            possible[i] = max((possible[j] for j in before), default=-1)
        if late[i]:
            places[i] = possible[i], 1
    for i in reversed(range(len(eqns))):
        if moving[i]:
            at, side = places[min(readers[i])]
            places[i] = at, side or -1
    return [eqns[i] for i in sorted(range(len(eqns)), key=lambda i: (*places[i], i))]


def _worth_it(block: Sequence[Any]) -> bool:
    """Whether a block is large enough to be a piece, and has a matrix product or a convolution: blocks without compile
    fast, and are better fused with each other than run one by one.
    """
    names = [name for e in block for name in _primitives(e)]
    products = {"dot_general", "conv_general_dilated", "ragged_dot_general"}
    return len(names) >= SMALLEST and not products.isdisjoint(names)


def _primitives(eqn: Any) -> Iterator[str]:
    """Names of the primitives that an equation runs, itself or in what it calls."""
    inner = [x for v in eqn.params.values() for x in (v if isinstance(v, tuple | list) else [v])]
    parts = [x.jaxpr if isinstance(x, core.ClosedJaxpr) else x for x in inner]
    called = [x for x in parts if isinstance(x, core.Jaxpr)]
    if not called:
        yield eqn.primitive.name
    for part in called:
        for e in part.eqns:
            yield from _primitives(e)


def _tokens(eqns: Sequence[Any]) -> list[int]:
    """A number for each equation; equal where primitive, parameters and types are. Constants may differ: they become
    operands of a block.
    """
    known: dict[Any, int] = {}
    texts: dict[int, str] = {}

    def text(value: Any) -> str:
        if isinstance(value, core.ClosedJaxpr | core.Jaxpr):
            if id(value) not in texts:
                texts[id(value)] = str(value)
            return texts[id(value)]
        if isinstance(value, tuple | list):
            return f"({','.join(map(text, value))})"
        return "" if callable(value) and not isinstance(value, type) else repr(value)

    found = []
    for e in eqns:
        operands = tuple([(isinstance(v, core.Literal), v.aval) for v in e.invars])
        if e.primitive.name == "jit":  # what it calls says everything
            parameters: Any = text(e.params["jaxpr"])
        else:
            parameters = tuple([(k, text(v)) for k, v in e.params.items()])
        key = e.primitive.name, operands, tuple([v.aval for v in e.outvars]), parameters
        found.append(known.setdefault(key, len(known)))
    return found


def _runs(eqns: Sequence[Any], tokens: list[int], low: int, high: int) -> list[tuple[int, int, int]]:
    """(start, period, repeats) of the blocks between two equations, the longest run first."""
    best: tuple[int, int, int] | None = None
    for period in _periods(tokens, low, high):
        i = low
        while i + period < high:
            length = 0
            while i + length + period < high and tokens[i + length] == tokens[i + length + period]:
                length += 1
            repeats = length // period + 1
            if repeats >= FEWEST:
                start, repeats = _wired_alike(eqns, i, period, repeats)
                longer = repeats >= FEWEST and (best is None or repeats * period > best[1] * best[2])
                if longer and _worth_it(eqns[start : start + period]):
                    best = start, period, repeats
            i += length + 1
    if best is None:
        return []
    start, period, repeats = best
    return [best, *_runs(eqns, tokens, low, start), *_runs(eqns, tokens, start + period * repeats, high)]


def _periods(tokens: list[int], low: int, high: int) -> list[int]:
    """The distances at which equal equations follow each other most often."""
    places: dict[int, list[int]] = {}
    for i in range(low, high):
        places.setdefault(tokens[i], []).append(i)
    distances: Counter[int] = Counter()
    for found in places.values():
        for k in range(1, _OCCURRENCES):  # an equation may occur several times in one block
            pairs = itertools.islice(zip(found, found[k:], strict=False), _PAIRS)
            distances.update(b - a for a, b in pairs if b - a >= _SHORTEST)
    return [d for d, _ in distances.most_common(_CANDIDATES)]


def _wired_alike(eqns: Sequence[Any], start: int, period: int, repeats: int) -> tuple[int, int]:
    """(start, number) of the longest stretch of occurrences whose equations feed each other in the same way."""
    patterns = []
    for r in range(repeats):
        base = start + r * period
        inside: dict[Any, tuple[int, int]] = {}
        pattern = []
        for j, e in enumerate(eqns[base : base + period]):
            pattern.append(tuple(None if isinstance(v, core.Literal) else inside.get(v) for v in e.invars))
            inside.update({v: (j, o) for o, v in enumerate(e.outvars)})
        patterns.append(pattern)
    best, first = (start, 0), 0
    for _, group in itertools.groupby(patterns):
        count = len(list(group))
        if count > best[1]:
            best = start + first * period, count
        first += count
    return best


def _uses(jaxpr: Any) -> dict[Any, int]:
    """By variable, the last equation that reads it; the program's results are read after the last."""
    uses: dict[Any, int] = {}
    for i, e in enumerate(jaxpr.eqns):
        for v in e.invars:
            if not isinstance(v, core.Literal):
                uses[v] = i
    for v in jaxpr.outvars:
        if not isinstance(v, core.Literal):
            uses[v] = len(jaxpr.eqns)
    return uses


def _piece(jaxpr: Any, uses: dict[Any, int], spans: list[tuple[int, int]]) -> list[Piece]:
    """The occurrences of one block: their common function, and what each reads and defines."""
    begin, end = spans[0]
    slots: list[tuple[int, int]] = []  # equation and operand that come from outside
    inside: set[Any] = set()
    for j, e in enumerate(jaxpr.eqns[begin:end]):
        slots += [(j, s) for s, v in enumerate(e.invars) if isinstance(v, core.Literal) or v not in inside]
        inside.update(e.outvars)
    arguments: dict[Any, tuple[Any, ...]] = {}
    at: dict[tuple[int, int], Any] = {}  # the argument of a slot
    for j, s in slots:
        read = tuple(jaxpr.eqns[b + j].invars[s] for b, _ in spans)
        same = tuple(f"{v.aval} {v.val!r}" if isinstance(v, core.Literal) else v for v in read)
        if isinstance(read[0], core.Literal) and len(set(same)) == 1:
            continue  # a constant of every occurrence
        arguments.setdefault(same, read)
        at[j, s] = same
    kept = [
        (j, o)
        for j, e in enumerate(jaxpr.eqns[begin:end])
        for o in range(len(e.outvars))
        if any(uses.get(jaxpr.eqns[b + j].outvars[o], -1) >= stop for b, stop in spans)
    ]
    invars = {same: core.Var(read[0].aval) for same, read in arguments.items()}
    rename = {slot: invars[same] for slot, same in at.items()}
    eqns = [
        e.replace(invars=[rename.get((j, s), v) for s, v in enumerate(e.invars)])
        for j, e in enumerate(jaxpr.eqns[begin:end])
    ]
    outvars = [jaxpr.eqns[begin + j].outvars[o] for j, o in kept]
    names = tuple(f"a{n}" for n in range(len(invars))), tuple(f"r{n}" for n in range(len(outvars)))
    debug_info = core.DebugInfo("jit", "piece", *names)
    block = core.Jaxpr((), list(invars.values()), outvars, eqns, debug_info=debug_info)
    function = core.ClosedJaxpr(block, ())
    return [
        Piece(
            function,
            tuple(read[n] for read in arguments.values()),
            tuple(jaxpr.eqns[b + j].outvars[o] for j, o in kept),
        )
        for n, (b, _) in enumerate(spans)
    ]
