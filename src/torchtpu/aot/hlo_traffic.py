"""Bytes that the instructions of an optimised module read from HBM and write to it.

An instruction outside a fusion reads its operands and writes its results, with the padding of their tiles, as far as
the compiler has them in HBM and not in vector memory. Of an operand that is only sliced or gathered from, what is taken
counts; of one that is updated in place, the update.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from torchtpu.aot.hlo_types import ArrayType, arrays

__all__ = ["Traffic"]

_OPERAND = re.compile(r"%([^\s,()]+)")
_CALLEE = re.compile(r"\bcalls=%?([\w.\-]+)")
_INDEX = re.compile(r"(\d+)\)")
_SLICES = {"dynamic-slice", "slice", "gather"}
_SAME = {"bitcast", "copy", "reshape", "transpose", "convert"}  # inside a fusion: another view of their operand
_NOTHING = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional", "call", "after-all"),
    *("partition-id", "replica-id", "iota", "async-update", "opt-barrier", "add-dependency", "domain"),
}
_COLLECTIVE = re.compile(r"(all-|reduce-scatter|collective-|ragged-all).*|send.*|recv.*")


@dataclass
class _Fused:
    """What a fused computation reads of each parameter, and writes; None where it is all of it."""

    reads: dict[int, int] = field(default_factory=dict)
    written: int | None = None
    view: bool = False  # nothing but another layout of its parameter


class Traffic:
    """Told the instructions of one computation after another, those it calls before it."""

    def __init__(self) -> None:
        self.types: dict[str, str] = {}
        self._fused: dict[str, _Fused] = {}
        self._open = _Fused()
        self._parameters: dict[str, int] = {}
        self._updates: dict[str, int] = {}

    def begin(self, computation: str) -> None:
        """A computation starts."""
        self.types, self._parameters, self._updates = {}, {}, {}
        self._open = self._fused[computation] = _Fused(view=True)

    def add(self, name: str, opcode: str, kind: str, rest: str, root: bool) -> int:
        """Bytes that an instruction reads and writes, if it is not inside a fusion.

        Args:
            name, opcode: of the instruction.
            kind: type of its result.
            rest: what is behind its opening parenthesis.
            root: whether it is the result of its computation.
        """
        self.types[name] = kind
        operands = _OPERAND.findall(rest.partition(")")[0])
        callee = self._callee(opcode, rest)
        self._inside(name, opcode, rest, operands, callee, root)
        if opcode in _NOTHING or opcode.endswith("-done") or _COLLECTIVE.fullmatch(opcode):
            return 0
        if opcode == "custom-call" and ("called_computations=" in rest or '"AllocateBuffer"' in rest):
            return 0  # a wrapper around what another computation does, or memory that is not written yet
        if opcode in ("copy-start", "async-start"):
            moved = arrays(kind)[:2]  # copy: target and source; an asynchronous slice: operands and result
            if opcode == "async-start" and operands:
                moved = [a for a in arrays(kind) if a.dtype != "u32" and a.shape][len(operands) :][:1]
                return sum(_in_hbm(x) for x in moved) + sum(x.padded_bytes for x in moved) * self._reads_hbm(
                    operands[0]
                )
            return sum(_in_hbm(x) for x in moved) if opcode == "copy-start" else 0
        written = sum(_in_hbm(a) for a in arrays(kind))
        if opcode in ("dynamic-update-slice", "scatter"):
            update = self._size(operands[1 if opcode == "dynamic-update-slice" else -1])
            return 2 * update if written else 0
        read = 0
        for i, operand in enumerate(operands):
            taken = sum(_in_hbm(a) for a in arrays(self.types.get(operand, "")))
            if opcode in _SLICES and i == 0:
                taken = min(taken, self._size(name))
            elif callee is not None and i in callee.reads:
                taken = min(taken, callee.reads[i])
            read += taken
        if callee is not None and callee.written is not None:
            written = min(written, callee.written)
        return read + written

    def _callee(self, opcode: str, rest: str) -> _Fused | None:
        found = _CALLEE.search(rest) if opcode == "fusion" else None
        return self._fused.get(found[1]) if found else None

    def _inside(
        self, name: str, opcode: str, rest: str, operands: list[str], callee: _Fused | None, root: bool
    ) -> None:
        """Note what a fusion that contains the instruction reads and writes for it."""
        here = self._open
        if opcode == "parameter":
            found = _INDEX.match(rest)
            if found is not None:
                self._parameters[name] = int(found[1])
                here.reads[int(found[1])] = 0
            return
        same = opcode in _SAME or (callee is not None and callee.view and len(operands) == 1)
        here.view &= same
        if same and operands and operands[0] in self._parameters and not root:
            self._parameters[name] = self._parameters[operands[0]]
            return
        for i, operand in enumerate(operands):
            at = self._parameters.get(operand)
            if at is None:
                continue
            taken = self._size(operand)
            if opcode in _SLICES and i == 0:
                taken = self._size(name)
            elif opcode in ("dynamic-update-slice", "scatter") and i == 0:
                taken = 0
            elif callee is not None:
                taken = callee.reads.get(i, taken)
            here.reads[at] += taken
        if opcode == "dynamic-update-slice":
            self._updates[name] = self._size(operands[1])
        elif callee is not None and callee.written is not None:
            self._updates[name] = callee.written
        elif same and operands and operands[0] in self._updates:
            self._updates[name] = self._updates[operands[0]]
        if root and name in self._updates:
            here.written = self._updates[name]
        elif root and opcode == "tuple" and any(o in self._updates for o in operands):
            here.written = sum(self._updates.get(o, self._size(o)) for o in operands)

    def _size(self, name: str) -> int:
        return sum(a.padded_bytes for a in arrays(self.types.get(name, "")))

    def _reads_hbm(self, name: str) -> bool:
        return any(a.space == 0 for a in arrays(self.types.get(name, "")))


def _in_hbm(array: ArrayType) -> int:
    return array.padded_bytes if array.space == 0 else 0
