"""What the text and the page of ``torchtpu check`` both say of a report: verdict, memory, sizes, time by module."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torchtpu.aot.report import Report
from torchtpu.aot.topology import Topology

__all__ = [
    "ESTIMATES",
    "PHASES",
    "RESOURCES",
    "Group",
    "Size",
    "Traffic",
    "Verdict",
    "alike",
    "amount",
    "assumptions",
    "clean",
    "collectives",
    "comparable",
    "count",
    "devices",
    "flops",
    "groups",
    "machine",
    "memory_parts",
    "needed",
    "percent",
    "phases",
    "place",
    "plain",
    "rate",
    "recommendations",
    "seconds",
    "share",
    "size",
    "sizes",
    "smallest",
    "throughput",
    "verdict",
    "work",
]

ESTIMATES = (
    "~ marks an estimate, worked out from published peaks and the compiled program and not measured; without it, a "
    "figure is counted or is the compiler's."
)
PHASES = ("forward", "recompute", "backward", "optimizer", "communication")
"""Parts of a step in the order of time; a phase of the compiled program, or the optimizer, or a collective."""
RESOURCES = {
    "MXU": "the matrix unit; most of the time goes into products",
    "HBM": "memory bandwidth; most of the time goes into operators that wait for memory",
    "ICI": "the links between chips; collectives take longer than computing",
}
"""What may bound a step."""

_GIB = 2**30


def size(nbytes: float) -> str:
    """Bytes in a binary unit, such as ``"3.74 GiB"``."""
    for unit, scale in (("TiB", 2**40), ("GiB", _GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(nbytes) >= (1024 if unit == "TiB" else 1) * scale * (0.1 if unit == "GiB" else 1):
            return f"{_digits(nbytes / scale)} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float) -> str:
    """A time in s, ms, us or ns."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value * 1e9)} ns"


def amount(value: float, unit: str) -> str:
    """A number in a decimal multiple of a unit, such as ``"3.9 TFLOP"``."""
    for prefix, scale in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{_digits(value / scale)} {prefix}{unit}"
    return f"{_digits(value)} {unit}"


def flops(value: float) -> str:
    """Operations, such as ``"3.9 TFLOP"``; a dash for none."""
    return amount(value, "FLOP") if value else "-"


def count(value: int) -> str:
    """A number of parameters, such as ``"8.03B"``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= scale:
            return f"{_digits(value / scale)}{unit}"
    return str(value)


def percent(part: float) -> str:
    """A part of 1, such as ``"12%"``; below 10% with one digit more."""
    if part and part < 0.0005:
        return "<0.1%"
    return f"{100 * part:.0f}%" if part >= 0.0995 or not part else f"{100 * part:.1f}%"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent; a dash if the whole is nothing."""
    return percent(part / whole) if whole else "-"


def rate(value: float, unit: str) -> str:
    """How many in a second, to three digits, such as ``"17,700 tokens/s"``."""
    rounded = float(f"{value:.3g}")
    return f"{rounded:,.0f} {unit}/s" if rounded >= 100 else f"{rounded:g} {unit}/s"


def plain(value: float) -> str:
    """A number to three digits, without an exponent."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 99.95 else _digits(value)


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def clean(words: str) -> str:
    """Without what would move the cursor or colour a terminal; ends of lines stay."""
    return "".join(c if c.isprintable() or c == "\n" else " " for c in words)


def work(report: Report, batch: bool = True) -> str:
    """What is run, such as ``"training step, batch 64 x 4096 tokens, bfloat16"``, or without the batch."""
    what = {"train": "training step", "infer": "inference", "decode": "decoding one token"}.get(
        report.kind, report.kind
    )
    several = f"batch {report.batch}" if batch else ""
    if report.unit == "tokens":
        long = f"{report.sequence} tokens" if report.kind != "decode" else f"a context of {report.sequence} tokens"
        return f"{what}, {several}{' x ' if several else ''}{long}, {report.dtype}"
    return ", ".join(part for part in (what, several, report.dtype) if part)


def devices(number: int) -> str:
    """A number of devices in words."""
    return f"{number} device{'s' * (number != 1)}"


def machine(report: Report) -> str:
    """The machine in words."""
    chips = f"{report.chips} chip{'s' * (report.chips != 1)}"
    return chips if report.chips == report.devices else f"{chips}, {devices(report.devices)}"


@dataclass(frozen=True)
class Verdict:
    """Whether it compiles and fits.

    Attributes:
        word: for a table: ``"ok"``, ``"does not fit"``, ``"refused"``, ``"no lowering"``, ``"crashed"`` or
            ``"timed out"``.
        good: whether both are so.
        compiles, fits: None where it is not known.
        sentence: the fact.
        advice: what to do, as sentences; empty if nothing is to be done.
    """

    word: str
    good: bool
    compiles: bool | None
    fits: bool | None
    sentence: str
    advice: tuple[str, ...] = ()


def verdict(report: Report, reports: Sequence[Report] = ()) -> Verdict:
    """Whether a report's model compiles and fits, and if not, what to do.

    Args:
        report: it.
        reports: others, which may know topologies that it fits.
    """
    where = report.topology
    if report.status == "ok":
        return Verdict("ok", True, True, True, f"compiles for {where} and fits.")
    if report.status == "memory":
        total, memory = needed(report), report.memory
        if total is not None and memory is not None:
            over = total - memory.available
            room = size(memory.available)
            what = f"needs {size(total)} of HBM on each device, {size(over)} more than the {room} there is."
        else:
            what = "needs more HBM than a device has."
        compiles = memory.compiled if memory is not None else None
        said = f"compiles for {where}, but " if compiles else f"does not fit {where}: it "
        return Verdict("does not fit", False, compiles, False, said + what, _memory_advice(report, reports))
    if report.status == "lower":
        return Verdict(
            "no lowering",
            False,
            False,
            None,
            "uses an operator that has no form for TPUs.",
            (
                "Compute it from other operators, or move it out of the step onto the host; the message names it.",
                "Without torchtpu check, eager mode runs such an operator on the CPU.",
            ),
        )
    if report.status == "crash":
        used = report.timing.compiler_bytes
        held = f" It held {size(used)} of this machine's memory." if used else ""
        return Verdict(
            "crashed",
            False,
            False,
            None,
            f"made the compiler's process end while it compiled for {where}.{held}",
            (
                "If this machine ran out of memory, check on one with more, or with a smaller --batch or --seq.",
                "Otherwise it is a fault of the compiler: another plan (--shard) or another version of libtpu often "
                "passes; report the message with the versions below.",
            ),
        )
    if report.status == "timeout":
        return Verdict(
            "timed out",
            False,
            None,
            None,
            f"was still being compiled for {where} when the time allowed was over.",
            (
                "Allow more time (--timeout), or check on a machine that does less else.",
                "If it is slow with a short sequence too, the model has layers that are not alike: layers that are "
                "compile once.",
            ),
        )
    return Verdict(
        "refused",
        False,
        False,
        None,
        f"is refused by the compiler for {where}.",
        (
            "The message names the operation; the module it is in says what to change.",
            "Another plan (--shard) may pass; if none does, report the message with the versions below.",
        ),
    )


def _memory_advice(report: Report, reports: Sequence[Report]) -> tuple[str, ...]:
    found = smallest(sizes(report, reports))
    generation = report.topology.split(":")[0]
    advice = []
    if found is not None and found.exact:
        advice.append(f"Use {found.topology} ({devices(found.devices)}, {found.plan}), which was compiled and fits.")
    elif found is not None:
        holds = "is estimated to fit" if found.whole else "has room for what the plan places, temporaries not counted"
        advice.append(f"Check {found.topology} ({devices(found.devices)}, {found.plan}), which {holds}.")
    else:
        advice.append(f"No size of {generation} that was looked at is estimated to fit: take chips with more HBM.")
    memory = report.memory
    if memory is not None and memory.parameters + memory.optimizer > memory.available / 2:
        advice.append("Divide parameters and optimizer over more devices: a larger fsdp, tp or ep (--shard).")
    if memory is None or not memory.compiled or memory.temporaries > memory.available / 4:
        advice.append("Take a smaller batch (--batch) or a shorter sequence (--seq): temporaries shrink with them.")
    return tuple(advice)


def needed(report: Report) -> int | None:
    """Bytes of HBM of a device that the step needs, or None where only a part of them is known.

    When the compiler gives up for want of memory it says how much it would have used, or its temporaries alone.
    """
    memory = report.memory
    if memory is None:
        return None
    return memory.total if memory.compiled or memory.temporaries else None


def memory_parts(report: Report) -> list[tuple[str, int]]:
    """What the HBM of a device holds, as (name, bytes), without what is 0."""
    memory = report.memory
    if memory is None:
        return []
    parts = [
        ("parameters", memory.parameters),
        ("optimizer", memory.optimizer),
        ("buffers", memory.buffers),
        ("inputs and outputs", memory.inputs + memory.outputs),
        ("temporaries", memory.temporaries),
        ("code", memory.code),
    ]
    total = needed(report)
    rest = (total or 0) - sum(n for _, n in parts)
    if rest > 0:  # tiles of the arguments, or all that the compiler did not lay out
        parts.append(("padding of arguments" if memory.compiled else "temporaries and the rest", rest))
    return [(name, n) for name, n in parts if n > 0]


@dataclass(frozen=True)
class Size:
    """A topology and what a device of it would hold.

    Attributes:
        topology, devices, plan: as in ``Fit``.
        total: bytes.
        available: HBM for a program on a device.
        fits: whether the first is within the second.
        exact: whether it was compiled; otherwise it is an estimate.
        whole: whether temporaries are in the total.
    """

    topology: str
    devices: int
    plan: str
    total: int
    available: int
    fits: bool
    exact: bool
    whole: bool = True

    @property
    def answer(self) -> str:
        """Whether it fits, in words."""
        if self.fits and not self.whole:
            return "~may fit"
        return f"{'' if self.exact else '~'}{'fits' if self.fits else 'does not fit'}"

    @property
    def shown(self) -> str:
        """The total in words."""
        return f"{'' if self.exact else '~'}{'' if self.whole else 'more than '}{size(self.total)}"


def sizes(report: Report, reports: Sequence[Report] = ()) -> list[Size]:
    """Topologies of the report's generation, from the smallest: those estimated, and those that were compiled.

    Args:
        report: the one with the estimates.
        reports: others, whose topology is taken from them where they are of the same step.
    """
    generation = report.topology.split(":")[0]
    found: dict[str, Size] = {}
    memory, most = report.memory, needed(report)
    known = most is not None and memory is not None
    for f in report.fits:
        available = Topology.parse(f.topology).chip.usable_hbm_bytes
        total = f.state_bytes + f.temporary_bytes
        fits = f.fits and total <= available
        found[f.topology] = Size(f.topology, f.devices, f.plan, total, available, fits, False, known)
    for r in (*(r for r in reports if comparable(r, report)), report):
        if r.topology.split(":")[0] == generation and r.memory is not None and r.status in ("ok", "memory"):
            whole = needed(r)
            exact = Size(
                r.topology,
                r.devices,
                r.plan_name,
                r.memory.total if whole is None else whole,
                r.memory.available,
                r.status == "ok",
                True,
                whole is not None,
            )
            found[r.topology] = exact
    # Where temporaries are not known, what is no larger than a machine that was too small is too small as well.
    failed = max((s.devices for s in found.values() if s.exact and not s.fits), default=0)
    for name, s in found.items():
        if not s.whole and s.devices <= failed:
            found[name] = replace(s, fits=False)
    return sorted(found.values(), key=lambda s: s.devices)


def smallest(found: Iterable[Size]) -> Size | None:
    """The smallest that fits."""
    return next((s for s in found if s.fits), None)


def alike(reports: Sequence[Report]) -> bool:
    """Whether reports are of the same model and kind of step; batches may differ, as they do by default."""
    return len({(r.model, r.kind, r.sequence, r.dtype) for r in reports}) == 1


def comparable(one: Report, other: Report) -> bool:
    """Whether two reports are of the same step, on whatever machine."""
    same = ("model", "kind", "batch", "sequence", "dtype")
    return all(getattr(one, name) == getattr(other, name) for name in same)


@dataclass
class Group:
    """Time of operators that are alike, over layers, on a device.

    Attributes:
        module: dotted name; ``*`` for numbers of layers where several are in the group.
        operator: its name, or empty.
        members: modules in the group.
        by_phase: seconds by phase.
        mxu_seconds, hbm_seconds, flops, hbm_bytes: as in ``ScopeTime``.
    """

    module: str
    operator: str
    members: set[str] = field(default_factory=set)
    by_phase: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    mxu_seconds: float = 0.0
    hbm_seconds: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all phases."""
        return sum(self.by_phase.values())

    @property
    def compute_seconds(self) -> float:
        """Without communication."""
        return self.seconds - self.by_phase.get("communication", 0.0)

    @property
    def bound(self) -> str:
        """What takes most of it: ``"MXU"``, ``"HBM"`` or ``"ICI"``."""
        if self.by_phase.get("communication", 0.0) > self.compute_seconds:
            return "ICI"
        return "HBM" if self.hbm_seconds > self.mxu_seconds else "MXU"


_NUMBER = re.compile(r"(?<=\.)\d+(-\d+)?(?=\.|$)")
_SUFFIX = re.compile(r"(_\d+)+$")


def place(report: Report, scope: str) -> tuple[str, str]:
    """The module and the operator of a scope; either may be empty."""
    parts = scope.split("/")
    if len(parts) > 1 and parts[0] in {name for name, _ in report.loops}:
        parts = parts[1:]
    if not parts[0]:
        return "", ""
    return parts[0], parts[1] if len(parts) > 1 else ""


def groups(report: Report, *, operators: bool, communication: bool) -> list[Group]:
    """The step's time by module, over layers, the longest first.

    Args:
        report: it; no groups if it has no prediction.
        operators: keep operators of a module apart.
        communication: count collectives to the module they are for.
    """
    prediction = report.prediction
    if prediction is None:
        return []
    found: dict[tuple[str, str], Group] = {}

    def group(scope: str) -> Group:
        module, operator = place(report, scope)
        operator = _SUFFIX.sub("", operator) if operators else ""
        key = _NUMBER.sub("*", module), operator
        one = found.setdefault(key, Group(module or "(outside modules)", operator))
        one.members.add(module)
        if len(one.members) > 1:
            one.module = key[0]
        return one

    for s in prediction.scopes:
        one = group(s.scope)
        one.by_phase["optimizer" if s.scope == "optimizer" else s.phase] += s.seconds
        one.mxu_seconds += s.mxu_seconds
        one.hbm_seconds += s.hbm_seconds
        one.flops += s.flops
        one.hbm_bytes += s.hbm_bytes
    if communication:
        for c in prediction.collectives:
            group(c.scope).by_phase["communication"] += c.seconds
    return sorted((g for g in found.values() if g.seconds > 0), key=lambda g: -g.seconds)


@dataclass
class Traffic:
    """Collectives that are alike, over layers.

    Attributes:
        kind, phase, group_size, over: as in ``CollectiveTime``.
        module: as in ``Group``.
        executions: of all of them in a step.
        bytes: payload of a device in a step.
        seconds: of all executions.
        asynchronous: whether all of them may run beside computation.
    """

    kind: str
    module: str
    phase: str
    group_size: int
    over: str
    executions: int = 0
    bytes: int = 0
    seconds: float = 0.0
    asynchronous: bool = True


def collectives(report: Report) -> list[Traffic]:
    """The step's communication by kind, module and phase, the longest first."""
    found: dict[tuple[str, str, str, int, str], Traffic] = {}
    for c in report.prediction.collectives if report.prediction is not None else ():
        module = place(report, c.scope)[0]
        key = c.kind, _NUMBER.sub("*", module), c.phase, c.group_size, c.over
        one = found.setdefault(key, Traffic(c.kind, module or "(outside modules)", c.phase, c.group_size, c.over))
        if module and module != one.module:
            one.module = key[1]
        one.executions += c.executions
        one.bytes += c.bytes * c.executions
        one.seconds += c.seconds
        one.asynchronous &= c.asynchronous
    return sorted(found.values(), key=lambda t: -t.seconds)


def phases(report: Report) -> dict[str, float]:
    """Seconds of the step by phase, one after another."""
    total = dict.fromkeys(PHASES, 0.0)
    for g in groups(report, operators=False, communication=True):
        for phase, value in g.by_phase.items():
            total[phase] = total.get(phase, 0.0) + value
    return {phase: value for phase, value in total.items() if value > 0}


def throughput(report: Report) -> tuple[float, float] | None:
    """Units in a second of all devices, if everything is serial and if all of it overlaps."""
    p = report.prediction
    if p is None or not p.serial_seconds or not p.overlapped_seconds or not report.units:
        return None
    return report.units / p.serial_seconds, report.units / p.overlapped_seconds


def recommendations(reports: Sequence[Report]) -> list[str]:
    """What several topologies for the same step come to, in sentences."""
    good = [r for r in reports if r.status == "ok"]
    if not good:
        return ["No topology that was compiled fits."]
    least = min(good, key=lambda r: r.chips)
    said = [f"Smallest that compiles and fits: {least.topology} ({machine(least)}, {least.plan_name})."]
    timed = [(r, both) for r in good if (both := throughput(r)) is not None]
    if len(timed) > 1:
        fast, (serial, _) = max(timed, key=lambda x: x[1][0])
        thrifty, (least_serial, _) = max(timed, key=lambda x: x[1][0] / x[0].chips)
        each = rate(least_serial / thrifty.chips, thrifty.unit)
        said.append(f"Fastest: {fast.topology}, ~{rate(serial, fast.unit)} without overlap.")
        said.append(f"Most from each chip: {thrifty.topology}, ~{each}.")
    return said


def assumptions(reports: Sequence[Report]) -> list[str]:
    """What the figures rest on, each once; those that are not of all reports with their topologies."""
    where: dict[str, list[str]] = {}
    for r in reports:
        for a in r.assumptions:
            where.setdefault(a, []).append(r.topology)
    return [a if len(names) == len(reports) else f"{', '.join(names)}: {a}" for a, names in where.items()]
