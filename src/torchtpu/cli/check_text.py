"""What ``torchtpu check`` prints: whether the model compiles, fits, how fast it could go, and what wastes the chip."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torchtpu.aot.report import Finding, Report
from torchtpu.cli import check_facts as facts

__all__ = ["WIDTH", "coloured", "text"]

WIDTH = 100
"""Columns at most."""

_BAR = 72
_SHOWN = 10  # operators and collectives that are listed
_MESSAGE = 24  # lines of an error that are shown
_CODES = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36"}
_LETTERS = {
    "parameters": ("P", "cyan"),
    "optimizer": ("O", "green"),
    "buffers": ("B", "green"),
    "inputs and outputs": ("I", "dim"),
    "temporaries": ("T", "yellow"),
    "code": ("C", "dim"),
    "padding of arguments": ("+", "dim"),
    "temporaries and the rest": ("T", "yellow"),
}


def coloured() -> bool:
    """Whether standard output is a terminal that is to have colours: https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def text(reports: Report | Sequence[Report], *, colour: bool | None = None) -> str:
    """Reports for a terminal, of at most ``WIDTH`` columns, the most important first.

    Args:
        reports: one, or several that are compared before each is shown.
        colour: use colours; by default as ``coloured`` says.

    Raises:
        ValueError: there is no report.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    if not several:
        raise ValueError("there is no report to show")
    writer = _Writer(coloured() if colour is None else colour)
    lines: list[str] = []
    if len(several) > 1:
        lines += [*writer.comparison(several), ""]
    for report in several:
        lines += [*writer.report(report, several), ""]
    lines += writer.ending(several)
    return "\n".join(line.rstrip() for line in lines)


@dataclass
class _Writer:
    colour: bool

    def paint(self, words: str, *styles: str) -> str:
        """Colour words, if colours are wanted."""
        if not self.colour or not styles:
            return words
        return f"\033[{';'.join(_CODES[s] for s in styles)}m{words}\033[0m"

    def heading(self, words: str) -> str:
        return self.paint(words.upper(), "bold")

    def comparison(self, reports: Sequence[Report]) -> Iterator[str]:
        alike, first = facts.alike(reports), reports[0]
        batches = len({r.batch for r in reports}) > 1
        name = f"{first.model}, {facts.work(first, not batches)}" if alike else f"{len(reports)} checks"
        yield from (self.paint(line, "bold") for line in _wrapped(name, ""))
        yield ""
        units = {r.unit for r in reports}
        head = [
            "topology",
            "chips",
            "plan",
            "result",
            "HBM",
            "step",
            f"{units.pop()}/s" if len(units) == 1 else "a second",
        ]
        head += ["MFU", "bound"]
        rows = [self._compared(r) for r in reports]
        for wanted, column, values in (
            (batches, "batch", [r.batch for r in reports]),
            (not alike, "model", [r.model for r in reports]),
        ):
            if wanted:
                head.insert(0, column)
                rows = [[str(value), *row] for value, row in zip(values, rows, strict=True)]
        numbers = {"batch", "chips", "HBM", "step", "MFU"}
        yield from self.table(head, rows, right=[h in numbers or h.endswith(("second", "/s")) for h in head])
        if alike:
            yield ""
            for sentence in facts.recommendations(reports):
                yield from _wrapped(sentence, "  ")

    def _compared(self, report: Report) -> list[str]:
        p, memory, total, both = report.prediction, report.memory, facts.needed(report), facts.throughput(report)
        return [
            report.topology,
            str(report.chips),
            report.plan_name or "custom",
            facts.verdict(report).word,
            facts.share(total, memory.available) if memory is not None and total is not None else "-",
            f"~{facts.seconds(p.serial_seconds)}" if p is not None else "-",
            f"~{facts.plain(both[0])}" if both is not None else "-",
            f"~{facts.percent(p.mfu_serial)}" if p is not None else "-",
            p.bound if p is not None else "-",
        ]

    def report(self, report: Report, reports: Sequence[Report]) -> Iterator[str]:
        yield from self._title(report)
        yield from self._compiles(report, reports)
        if report.memory is not None:
            yield from self._fits(report, reports)
        if report.prediction is not None:
            yield from self._fast(report)
        if report.findings or report.prediction is not None:
            yield from self._wastes(report.findings)
        if report.tried:
            yield from self._tried(report)

    def _title(self, report: Report) -> Iterator[str]:
        name = f"{report.model} on {report.topology}"
        yield self.paint(_short(_clean(name), WIDTH), "bold")
        published = f" (published: {facts.count(report.published)})" if report.published else ""
        yield from _wrapped(f"{facts.work(report)}; {facts.count(report.parameters)} parameters{published}", "")
        mesh = " x ".join(f"{a} {n}" for a, n in report.plan.get("mesh", {}).items())
        yield from _wrapped(f"{facts.machine(report)}; plan {report.plan_name or 'custom'} (mesh {mesh})", "")

    def _compiles(self, report: Report, reports: Sequence[Report]) -> Iterator[str]:
        judged = facts.verdict(report, reports)
        words = {True: ("yes", "green"), False: ("no", "red"), None: ("not known", "yellow")}
        answer, style = words[judged.compiles]
        yield ""
        yield f"{self.heading('Does it compile?')}  {self.paint(answer, 'bold', style)}"
        yield from _wrapped(f"{report.model} {judged.sentence}", "  ")
        if judged.compiles and report.loops:
            loops = ", ".join(f"{name} ({n} layers)" for name, n in report.loops)
            yield from _wrapped(f"Layers that are alike are compiled once: {loops}.", "  ")
        if report.saved:
            yield from _wrapped(f"The executable is in {report.saved}.", "  ")
        message = report.message if report.status not in ("ok", "memory") else ""
        if message:
            yield ""
            yield from (self.paint(line, "red") for line in _message(message))
        if judged.advice:
            yield ""
            yield from self.advice(judged.advice)

    def advice(self, sentences: Iterable[str]) -> Iterator[str]:
        yield f"  {self.paint('What to do', 'bold')}"
        for sentence in sentences:
            yield from _wrapped(sentence, "    ", "  - ")

    def _fits(self, report: Report, reports: Sequence[Report]) -> Iterator[str]:
        memory, total = report.memory, facts.needed(report)
        assert memory is not None
        judged = facts.verdict(report)
        words = {True: ("yes", "green"), False: ("no", "red"), None: ("not known", "yellow")}
        answer, style = words[judged.fits]
        yield ""
        yield f"{self.heading('Does it fit?')}  {self.paint(answer, 'bold', style)}"
        if total is None:
            held = memory.parameters + memory.optimizer + memory.buffers + memory.inputs
            said = f"It was not compiled, so temporaries are not known; what the plan places takes {facts.size(held)}"
        else:
            said = f"Each device needs {facts.size(total)}"
        share = facts.share((memory.total if total is None else total), memory.available)
        yield from _wrapped(f"{said} of {facts.size(memory.available)} HBM ({share}).", "  ")
        yield ""
        yield self._bar(report)
        parts = facts.memory_parts(report)
        legend = [f"{_LETTERS[n][0]} {n} {facts.size(b)}" for n, b in parts]
        wide = max(map(len, legend), default=0) + 3
        each = max(1, (WIDTH - 2) // wide) if wide else 1
        for start in range(0, len(legend), each):
            yield "  " + "".join(item.ljust(wide) for item in legend[start : start + each])
        found = facts.sizes(report, reports)
        if found:
            yield ""
            yield from self._sizes(found)

    def _bar(self, report: Report) -> str:
        """Memory in letters up to the HBM's end, and what is over it behind that."""
        memory = report.memory
        assert memory is not None
        parts = facts.memory_parts(report)
        total = sum(n for _, n in parts)
        scale = max(total, memory.available) / _BAR
        limit = round(memory.available / scale)
        cells: list[tuple[str, str]] = []
        done = 0
        for name, n in parts:
            done += n
            cells += [_LETTERS[name]] * (round(done / scale) - len(cells))
        inside = "".join(self.paint(letter, style) for letter, style in cells[:limit])
        beyond = self.paint("".join(letter for letter, _ in cells[limit:]), "red") if cells[limit:] else ""
        room = self.paint("." * max(0, limit - len(cells)), "dim")
        end = facts.size(memory.available)
        return f"  [{inside}{room}|{beyond}{']' if beyond else ''} {end if not beyond else ''}"

    def _sizes(self, found: Sequence[facts.Size]) -> Iterator[str]:
        least = facts.smallest(found)
        if least is None:
            yield "  No size of this generation that was looked at fits."
        elif least.exact:
            yield from _wrapped(
                f"Smallest topology that fits: {least.topology} ({facts.devices(least.devices)}).", "  "
            )
        else:
            said = f"Smallest topology that fits: ~{least.topology} ({facts.devices(least.devices)})"
            yield from _wrapped(f"{said}{'' if least.whole else ', temporaries not counted'}.", "  ")
        rows = []
        for s in found:
            blocks = min(24, round(16 * s.total / s.available))
            bar = "#" * min(blocks, 16) + ("|" + "#" * (blocks - 16) if blocks > 16 else "." * (16 - blocks) + "|")
            rows.append([s.topology, str(s.devices), s.plan, s.shown, bar, s.answer])
        head = ["topology", "devices", "plan", "of a device", f"HBM to |, {facts.size(found[0].available)}", ""]
        yield from self.table(head, rows, right=[False, True, False, True, False, False])

    def _fast(self, report: Report) -> Iterator[str]:
        p = report.prediction
        assert p is not None
        yield ""
        yield f"{self.heading('How fast could it go?')}  {self.paint('estimate', 'yellow')}"
        both = facts.throughput(report)
        rows = [
            ["step", f"~{facts.seconds(p.overlapped_seconds)}", f"~{facts.seconds(p.serial_seconds)}"],
            ["MFU", f"~{facts.percent(p.mfu_overlapped)}", f"~{facts.percent(p.mfu_serial)}"],
        ]
        if both is not None:
            serial, overlapped = both
            rows.insert(
                1, ["throughput", f"~{facts.rate(overlapped, report.unit)}", f"~{facts.rate(serial, report.unit)}"]
            )
        yield from self.table(["", "perfect overlap", "one after another"], rows, right=[False, True, True])
        yield ""
        yield from _wrapped(f"Bound by {p.bound}, {facts.RESOURCES[p.bound]}.", "  ")
        for name, value in (("MXU", p.mxu_seconds), ("HBM", p.hbm_seconds), ("ICI", p.ici_seconds)):
            yield f"    {name} {facts.seconds(value):>8}  {_blocks(value, p.serial_seconds, 40)}"
        parts = ", ".join(f"{name} {facts.seconds(t)}" for name, t in facts.phases(report).items())
        if parts:
            yield from _wrapped(f"One after another: {parts}.", "  ")
        yield from self._operators(report)
        yield from self._collectives(report)

    def _operators(self, report: Report) -> Iterator[str]:
        p = report.prediction
        assert p is not None
        found = facts.groups(report, operators=True, communication=False)
        if not found:
            return
        yield ""
        yield "  Operators that take the most time (of a device, over layers; share of the step one after another)"
        rows = [
            [
                _short(_clean(f"{g.module} {g.operator}".strip()), 46),
                facts.share(g.seconds, p.serial_seconds),
                f"~{facts.seconds(g.seconds)}",
                facts.flops(g.flops),
                facts.size(g.hbm_bytes) if g.hbm_bytes else "-",
                g.bound,
            ]
            for g in found[:_SHOWN]
        ]
        if len(found) > _SHOWN:
            rest = sum(g.seconds for g in found[_SHOWN:])
            more = facts.flops(sum(g.flops for g in found[_SHOWN:]))
            moved = facts.size(sum(g.hbm_bytes for g in found[_SHOWN:]))
            share = facts.share(rest, p.serial_seconds)
            rows.append([f"{len(found) - _SHOWN} more", share, f"~{facts.seconds(rest)}", more, moved, ""])
        head = ["operator", "share", "time", "FLOPs", "HBM traffic", "bound"]
        yield from self.table(head, rows, right=[False, True, True, True, True, False])

    def _collectives(self, report: Report) -> Iterator[str]:
        p = report.prediction
        assert p is not None
        yield ""
        found = facts.collectives(report)
        if not found:
            yield "  No communication between devices."
            return
        yield "  Collectives that take the most time (of a device, over layers)"
        rows = [
            [
                t.kind,
                t.module,
                t.phase,
                facts.size(t.bytes),
                str(t.executions),
                str(t.group_size),
                f"~{facts.seconds(t.seconds)}",
                facts.share(t.seconds, p.serial_seconds),
            ]
            for t in found[:_SHOWN]
        ]
        if len(found) > _SHOWN:
            rest = sum(t.seconds for t in found[_SHOWN:])
            runs = sum(t.executions for t in found[_SHOWN:])
            row = [f"{len(found) - _SHOWN} more", "", "", facts.size(sum(t.bytes for t in found[_SHOWN:])), str(runs)]
            rows.append([*row, "", f"~{facts.seconds(rest)}", facts.share(rest, p.serial_seconds)])
        head = ["collective", "for", "phase", "bytes", "runs", "devices", "time", "share"]
        yield from self.table(head, rows, right=[False, False, False, True, True, True, True, True])

    def _wastes(self, findings: Sequence[Finding]) -> Iterator[str]:
        yield ""
        yield self.heading("What wastes the chip?") + ("" if findings else "  nothing that the check looks for")
        for number, f in enumerate(findings, 1):
            yield ""
            cost = f", ~{facts.percent(f.cost)}" if f.cost is not None else ""
            many = f", {f.count} places" if f.count > 1 else ""
            yield from _wrapped(f"{f.what} [{f.kind}{cost}{many}]", "     ", f"  {number}. ")
            where = "  ".join(x for x in (f.line, f.module and f"in {f.module}") if x)
            if where:
                yield from (self.paint(line, "dim") for line in _wrapped(where, "     "))
            if f.code.strip():
                yield self.paint(f"       {_short(_clean(f.code.strip()), WIDTH - 7)}", "cyan")
            if f.advice:
                yield from _wrapped(f.advice, "     ", "     -> ")

    def _tried(self, report: Report) -> Iterator[str]:
        yield ""
        yield self.heading("Plans that were tried")
        rows = [
            [plan, status, facts.size(n) if n else "-", f"~{facts.seconds(t)}" if t else "-"]
            for plan, status, n, t in report.tried
        ]
        head = ["plan", "result", "HBM of a device", "step, one after another"]
        yield from self.table(head, rows, right=[False, False, True, True])

    def ending(self, reports: Sequence[Report]) -> Iterator[str]:
        """What the figures rest on, how long the checks took, and versions."""
        sentences = facts.assumptions(reports)
        yield self.heading("What this rests on")
        yield from _wrapped(facts.ESTIMATES, "  ")
        for sentence in sentences:
            yield from _wrapped(sentence, "    ", "  - ")
        yield ""
        yield self.heading("This check")
        for r in reports:
            t = r.timing
            parts = (("build", t.build), ("trace", t.trace), ("lower", t.lower), ("compile", t.compile))
            times = ", ".join(f"{name} {facts.seconds(s)}" for name, s in (*parts, ("analyse", t.analyse)) if s)
            held = f"; the compiler held {facts.size(t.compiler_bytes)}" if t.compiler_bytes else ""
            yield from _wrapped(f"{r.topology}: {times or 'no times'}{held}", "  ")
        for versions in dict.fromkeys(tuple(r.versions.items()) for r in reports):
            yield from _wrapped(", ".join(f"{name} {version or 'absent'}" for name, version in versions), "  ")

    def table(self, head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool]) -> Iterator[str]:
        """Aligned columns; words are shortened until a line fits, numbers are not."""
        cells = [[_clean(c) for c in row] + [""] * (len(head) - len(row)) for row in (head, *rows)]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        free = [i for i, r in enumerate(right) if not r]
        while sum(widths) + 2 * len(widths) > WIDTH:
            widest = max(free, key=lambda i: widths[i])
            if widths[widest] <= 8:
                break
            widths[widest] -= 1
        for number, row in enumerate(cells):
            shown = [_short(c, w) for c, w in zip(row, widths, strict=True)]
            line = "  ".join(c.rjust(w) if r else c.ljust(w) for c, w, r in zip(shown, widths, right, strict=True))
            yield self.paint(f"  {line.rstrip()}", "dim") if number == 0 else f"  {line}"


def _blocks(value: float, whole: float, width: int) -> str:
    filled = min(width, round(width * value / whole)) if whole else 0
    return f"{'#' * filled}{'.' * (width - filled)} {facts.share(value, whole) if whole else ''}"


def _clean(words: str) -> str:
    return facts.clean(words.replace("\n", " "))


def _short(words: str, width: int) -> str:
    """Without its middle if it is too long: the end of a module's name says most."""
    if len(words) <= width:
        return words
    keep = max(0, width - 2)
    return f"{words[: keep // 3]}..{words[len(words) - (keep - keep // 3) :]}"[:width]


def _wrapped(words: str, indent: str, first: str | None = None) -> list[str]:
    start = indent if first is None else first
    return textwrap.wrap(_clean(words), WIDTH, initial_indent=start, subsequent_indent=indent) or [start]


def _message(message: str) -> Iterator[str]:
    lines = [piece for line in message.splitlines() for piece in _wrapped(line, "  | ")]
    yield from lines[:_MESSAGE]
    if len(lines) > _MESSAGE:
        yield f"  | ... {len(lines) - _MESSAGE} more lines, which the JSON and the page have in full"
