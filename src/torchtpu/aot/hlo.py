"""What the TPU compiler made of a program, read from its optimised HLO: communication, copies and padding.

The compiler writes the text to ``*after_optimizations.txt`` when it is given the option ``xla_dump_to``; the text that
JAX makes from the executable does not exist for every module. Everything in it is of one device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torchtpu.aot.hlo_traffic import Traffic
from torchtpu.aot.hlo_types import ArrayType, arrays, parse_groups
from torchtpu.aot.scope import split_scope

__all__ = ["Collective", "Copy", "Hlo", "Memory", "Padding", "read_hlo"]

_HEADER = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\) -> .*\{$")
_PARTITIONS = re.compile(r"num_partitions=(\d+)")
_REPLICAS = re.compile(r"replica_count=(\d+)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r"%([^\s,()]+)")
_GROUPS = re.compile(
    r"replica_groups=(\{(?:\{[\d,]*\},?)*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?"
    r"|@?mesh[\[<][^\]>]*[\]>](?:,\s*device_ids=\([^{]*\))?\s*\{[^}]*\})"
)
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_PAIR = re.compile(r"\{(\d+),(\d+)\}")
_CHANNEL = re.compile(r"channel_id=(\d+)")
_CALLS = re.compile(
    r"(?:calls|body|condition|true_computation|false_computation)=%?([\w.\-]+)|(?:called_|branch_)computations=\{([^}]*)\}"
)
_BODY = re.compile(r"\bbody=%?([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONSTANT = re.compile(r"^(-?\d+)\)")
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
_COLLECTIVES = {kind + suffix: kind for kind in _KINDS for suffix in ("", "-start")} | {
    "collective-broadcast": "collective-broadcast"
}
_VIEWS = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}
_COPIES = {"copy", "copy-start", "transpose", "reshape", "bitcast-convert"}  # a reshape that moves nothing is a bitcast
_LARGE = 1 << 20
"""Bytes from which the padding of an array is listed."""


@dataclass(frozen=True)
class Collective:
    """A collective operation.

    Attributes:
        kind: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``, ``"all-to-all"``, ``"collective-permute"``,
            ``"ragged-all-to-all"`` or ``"collective-broadcast"``.
        name: of the instruction.
        bytes: payload of a device, of one execution: of the array that is reduced, exchanged or sent, of the whole
            array that is gathered, and of the whole that is reduced before it is scattered.
        dtype: of the elements.
        group_size: devices that take part together.
        groups: partitions by group; for a permutation pairs of source and target.
        executions: how often a step runs it.
        asynchronous: whether it may run beside computation.
        scope, phase: where it comes from; as in ``OpCost``.
        source: the instruction's ``op_name`` as the compiler has it.
    """

    kind: str
    name: str
    bytes: int
    dtype: str
    group_size: int
    groups: tuple[tuple[int, ...], ...] = field(repr=False)
    executions: int
    asynchronous: bool
    scope: str
    phase: str
    source: str = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, with the first group alone."""
        return {**asdict(self), "groups": [list(g) for g in self.groups[:1]]}


@dataclass(frozen=True)
class Copy:
    """An instruction that moves an array and computes nothing.

    Attributes:
        kind: ``"layout"``: to another order of dimensions or other tiles; ``"move"``: between HBM and vector memory;
            ``"copy"``: neither.
        opcode: ``copy``, ``transpose``, ``reshape`` or ``bitcast-convert``, by itself or as a fusion.
        bytes: read and written in one execution, with padding.
        to: type of the result.
    """

    kind: str
    name: str
    opcode: str
    bytes: int
    executions: int
    to: str
    scope: str
    phase: str


@dataclass(frozen=True)
class Padding:
    """A large array that takes more memory than its elements, for its tiles.

    Attributes:
        what: name of a parameter of the program, or the operation that makes it.
        type: element type, sizes and layout.
        bytes, padded_bytes: of its elements, and what it takes.
        count: instructions with results of this type.
    """

    what: str
    type: str
    bytes: int
    padded_bytes: int
    count: int


@dataclass(frozen=True)
class Memory:
    """Bytes that a scope reads from HBM and writes to it in a step, those of communication apart."""

    scope: str
    phase: str
    bytes: int


@dataclass
class Hlo:
    """What is in a module.

    Attributes:
        name: of the module.
        partitions: devices it is for.
        collectives: in the order of the text.
        layout_copies: copies of all kinds, in HBM and vector memory, those that move most first.
        padding: arrays from 1 MiB that are padded, those that waste most first.
        memory: traffic with HBM by scope and phase, as far as instructions say where they come from.
        loops: rounds of each loop, by the name of its body.
        assumptions: sentences on what the text does not say.
    """

    name: str = ""
    partitions: int = 1
    collectives: list[Collective] = field(default_factory=list)
    layout_copies: list[Copy] = field(default_factory=list)
    padding: list[Padding] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    loops: dict[str, int] = field(default_factory=dict)
    assumptions: list[str] = field(default_factory=list)


def read_hlo(source: Path | str | Iterable[str]) -> Hlo:
    """Read an optimised module.

    Args:
        source: the path of its text, or its lines.

    Raises:
        ValueError: there is no module in it.
    """
    if isinstance(source, Path | str):
        with open(source, encoding="utf-8", errors="replace") as lines:
            return _Reader().read(lines)
    return _Reader().read(source)


@dataclass
class _Computation:
    name: str
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # (opcode, name, op_name) of the caller by callee
    callees: list[str] = field(default_factory=list)
    trips: list[int] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    copies: list[dict[str, Any]] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    computes: bool = False  # anything but views and copies
    padded: list[tuple[str, ArrayType]] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)  # bytes to and from HBM by op_name
    sent: list[tuple[str, str]] = field(default_factory=list)  # async-start -> op_name of what it was given later


class _Reader:
    def __init__(self) -> None:
        self.hlo = Hlo()
        self.computations: dict[str, _Computation] = {}
        self.entry = ""
        self.loops: list[tuple[_Computation, int, str]] = []  # where a loop's body is called, and its condition
        self.traffic = Traffic()
        self.op_names: dict[str, str] = {}

    def read(self, lines: Iterable[str]) -> Hlo:
        current: _Computation | None = None
        for line in lines:
            if line.startswith("  ") and current is not None:
                self._instruction(current, line)
            elif line.startswith("HloModule"):
                self._module(line)
            elif (header := _HEADER.match(line)) is not None:
                current = self.computations[header[2]] = _Computation(header[2])
                self.traffic.begin(header[2])
                self.op_names = {}
                if header[1]:
                    self.entry = header[2]
            elif line.rstrip() == "}":  # a constant of several lines ends in "})"
                current = None
        if not self.hlo.name or not self.entry:
            raise ValueError("there is no HLO module in this text")
        self._collect()
        return self.hlo

    def _module(self, line: str) -> None:
        self.hlo.name = line.split()[1].rstrip(",")
        counts = [int(found[1]) for pattern in (_PARTITIONS, _REPLICAS) if (found := pattern.search(line))]
        self.hlo.partitions = max(1, *counts) if counts else 1

    def _instruction(self, at: _Computation, line: str) -> None:
        head, _, rest = line.strip().removeprefix("ROOT ").partition(" = ")
        kind, opcode, rest = _split(rest)
        name = head.lstrip("%")
        if not opcode:
            return
        moved = self.traffic.add(name, opcode, kind, rest, line.startswith("  ROOT "))
        if opcode == "constant":
            number = _CONSTANT.match(rest) if kind.startswith(("s32[]", "s64[]", "u32[]")) else None
            if number is not None:
                at.constants.append(int(number[1]))
            return
        found = _OP_NAME.search(rest)
        op_name = found[1] if found else ""
        if op_name:
            self.op_names[name] = op_name
        if moved:
            at.moved[op_name] = at.moved.get(op_name, 0) + moved
        if opcode in _COLLECTIVES:
            self._collective(at, name, opcode, kind, rest, op_name)
        elif opcode in _COPIES:
            self._copy(at, name, opcode, kind, rest, op_name)
        elif opcode == "async-update":
            started, given = (*_OPERAND.findall(rest[: rest.find(")")]), "", "")[:2]
            at.sent.append((started, self.op_names.get(given, "")))
        elif opcode not in _VIEWS and not opcode.endswith("-done"):
            at.computes = True
        if (opcode not in _COLLECTIVES and "=%" in rest) or "computations={" in rest:
            self._calls(at, name, opcode, rest, op_name, kind)
        if opcode == "parameter" or (opcode not in _VIEWS and not opcode.endswith(("-start", "-update", "while"))):
            self._padding(at, opcode, kind, op_name)

    def _calls(self, at: _Computation, name: str, opcode: str, rest: str, op_name: str, kind: str) -> None:
        if opcode == "while":
            body, condition, trips = _BODY.search(rest), _CONDITION.search(rest), _TRIPS.search(rest)
            if body is None or condition is None:
                return
            at.callees.append(body[1])
            at.trips.append(int(trips[1]) if trips else -1)
            at.calls.append((opcode, name, op_name))
            self.loops.append((at, len(at.trips) - 1, condition[1]))
            return
        for one, several in _CALLS.findall(rest):
            for callee in [one] if one else _OPERAND.findall(several):
                at.callees.append(callee)
                at.trips.append(1)
                at.calls.append((opcode, name, op_name))
        if opcode == "conditional":
            self._assume("every branch of a conditional is taken to run")
        if opcode == "fusion":  # it may turn out to be nothing but a copy
            operand = _OPERAND.search(rest)
            read = self.traffic.types.get(operand[1], "") if operand else ""
            at.copies.append(
                {"fusion": at.callees[-1] if at.callees else "", **_moved(name, "copy", read, kind, op_name)}
            )

    def _collective(self, at: _Computation, name: str, opcode: str, kind: str, rest: str, op_name: str) -> None:
        what = _COLLECTIVES[opcode]
        results = arrays(kind)
        pairs = _PAIRS.search(rest)
        groups: tuple[tuple[int, ...], ...]
        if pairs is not None:
            groups = tuple((int(a), int(b)) for a, b in _PAIR.findall(pairs[1]))
        else:
            found = _GROUPS.search(rest)
            groups = parse_groups(found[1] if found else "{}", self.hlo.partitions)
        size = max((len(g) for g in groups), default=1)
        if opcode.endswith("-start") and what in ("all-gather", "collective-permute"):
            results = [r for r in results if r.dtype != "u32" or r.shape]  # without the semaphores
            results = results[len(results) // 2 :]
        at.collectives.append(
            {
                "kind": what,
                "name": name,
                "bytes": sum(r.bytes for r in results) * (size if what == "reduce-scatter" else 1),
                "dtype": results[0].dtype if results else "",
                "group_size": size,
                "groups": groups,
                "asynchronous": opcode.endswith("-start"),
                "source": op_name or next((n for o in _OPERAND.findall(rest) if (n := self.op_names.get(o))), ""),
            }
        )

    def _copy(self, at: _Computation, name: str, opcode: str, kind: str, rest: str, op_name: str) -> None:
        operand = _OPERAND.search(rest)
        to = arrays(kind)
        if opcode == "copy-start":
            at.copies.append(_moved(name, "copy", _text(to[1:2]), _text(to[:1]), op_name))
        else:
            at.copies.append(
                _moved(name, opcode, self.traffic.types.get(operand[1], "") if operand else "", kind, op_name)
            )

    def _padding(self, at: _Computation, opcode: str, kind: str, op_name: str) -> None:
        if len(kind) > 4096:
            return
        for array in arrays(kind):
            if array.bytes >= _LARGE and array.space == 0 and array.padded_bytes > array.bytes:
                at.padded.append((op_name or opcode, array))

    def _assume(self, sentence: str) -> None:
        if sentence not in self.hlo.assumptions:
            self.hlo.assumptions.append(sentence)

    def _collect(self) -> None:
        for at, i, condition in self.loops:
            if at.trips[i] < 0:
                at.trips[i] = self._rounds(condition, at.callees[i])
            self.hlo.loops[at.callees[i]] = at.trips[i]
        paddings: dict[str, list[Any]] = {}
        memory: dict[tuple[str, str], int] = {}
        for computation, executions, inside, asynchronous, caller in self._reached():
            for x in computation.collectives:
                scope, phase = _scope(x["source"] or caller)
                if inside and computation.name.startswith("all-reduce-scatter"):
                    x["kind"] = "reduce-scatter"  # the fusion that keeps a part of what it reduces
                values = {**x, "asynchronous": x["asynchronous"] or asynchronous, "source": x["source"] or caller}
                self.hlo.collectives.append(Collective(**values, executions=executions, scope=scope, phase=phase))
            if inside:
                continue
            for x in computation.copies:
                self._add_copy(x, executions)
            for op_name, size in computation.moved.items():
                where = _scope(op_name or caller)
                memory[where] = memory.get(where, 0) + size * executions
            for what, array in computation.padded:
                found = paddings.setdefault(_text([array]), [what, array, 0])
                found[2] += 1
        self.hlo.memory = [Memory(*where, size) for where, size in memory.items()]
        self.hlo.layout_copies.sort(key=lambda x: -x.bytes * x.executions)
        self.hlo.padding = [Padding(w, t, a.bytes, a.padded_bytes, n) for t, (w, a, n) in paddings.items()]
        self.hlo.padding.sort(key=lambda x: x.bytes - x.padded_bytes)

    def _reached(self) -> Iterator[tuple[_Computation, int, bool, bool, str]]:
        """Computations that run: how often, whether inside a fusion, whether asynchronously, and who called them."""
        found: list[tuple[_Computation, int, bool, bool, str]] = []
        queue = [(self.entry, 1, False, False, "")]
        while queue:
            name, executions, inside, asynchronous, caller = queue.pop()
            computation = self.computations.get(name)
            if computation is None:
                continue
            found.append((computation, executions, inside, asynchronous, caller))
            sent = dict(computation.sent)
            for callee, trips, (opcode, own, op_name) in zip(
                computation.callees, computation.trips, computation.calls, strict=True
            ):
                started = opcode == "async-start"
                queue.append(
                    (
                        callee,
                        executions * trips,
                        inside or opcode == "fusion",
                        asynchronous or started,
                        op_name or sent.get(own, "") or (caller if opcode != "while" else ""),
                    )
                )
        order = {name: i for i, name in enumerate(self.computations)}
        return iter(sorted(found, key=lambda x: order[x[0].name]))

    def _rounds(self, condition: str, body: str) -> int:
        """The bound in a loop's condition: JAX's loops count up from 0."""
        at = self.computations.get(condition)
        bounds = list(at.constants) if at else []
        for callee in at.callees if at else ():
            bounds += self.computations[callee].constants if callee in self.computations else []
        positive = [n for n in bounds if n > 0]
        if not positive:
            self._assume(f"the loop {body} is taken to go round once: its condition has no bound")
            return 1
        return max(positive)

    def _add_copy(self, copy: dict[str, Any], executions: int) -> None:
        values = dict(copy)
        fusion = values.pop("fusion", None)
        if fusion is not None:
            inner = self.computations.get(fusion)
            if inner is None or inner.computes or not inner.copies or inner.callees:
                return
            values["opcode"] = inner.copies[-1]["opcode"]
            if values["opcode"] != "copy":
                values["kind"] = "layout"
        scope, phase = _scope(values.pop("source"))
        if values["bytes"]:
            self.hlo.layout_copies.append(Copy(**values, executions=executions, scope=scope, phase=phase))


def _split(text: str) -> tuple[str, str, str]:
    """The type, the opcode and what is behind its parenthesis."""
    end = text.find(" ")
    if text.startswith("("):
        depth = 0
        for i, char in enumerate(text):
            depth += (char == "(") - (char == ")")
            if depth == 0:
                end = i + 1
                break
    start = text.find("(", end)
    return (text[:end], text[end + 1 : start], text[start + 1 :]) if 0 < end < start else ("", "", "")


def _moved(name: str, opcode: str, source: str, target: str, op_name: str) -> dict[str, Any]:
    read, written = arrays(source)[:1], arrays(target)[:1]
    kind = "layout"
    if opcode == "copy" and read and written and read[0].shape == written[0].shape:
        before, after = read[0], written[0]
        if (before.order, before.tiling) == (after.order, after.tiling):
            kind = "copy" if before.space == after.space else "move"
    size = sum(a.padded_bytes for a in (*read, *written)) if read else 2 * sum(a.padded_bytes for a in written)
    return {"kind": kind, "name": name, "opcode": opcode, "bytes": size, "to": _text(written), "source": op_name}


def _text(types: list[ArrayType]) -> str:
    if not types:
        return ""
    a = types[0]
    space = f"S({a.space})" if a.space else ""
    order = ",".join(map(str, a.order))
    return f"{a.dtype}[{','.join(map(str, a.shape))}]{{{order}{':' if a.tiling or space else ''}{a.tiling}{space}}}"


def _scope(op_name: str) -> tuple[str, str]:
    """Scope and phase of an ``op_name``, whose last part is the operation."""
    return split_scope(op_name.rpartition("/")[0])
