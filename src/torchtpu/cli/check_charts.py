"""Pictures of a check as inline SVG, without a script.

Positions across are in percent and those down in pixels, so that a picture takes the width of its column while its
text keeps its size. Colours are classes of the page's style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from torchtpu.aot.chips import Chip
from torchtpu.aot.report import Report
from torchtpu.cli import check_facts as facts

__all__ = ["bar", "memory", "roofline", "size_bar", "size_scale"]

_OVER = 2.5  # a bar longer than this many times the HBM is cut off
_PLOT, _AXIS = 320, 42  # pixels down: of the roofline's plot, and under it for its axis
_NUMBERED = 8
_STRIP = 80.0  # percent across: behind it are operators without HBM traffic, whose intensity has no bound


def svg(height: int, body: str, label: str, kind: str = "") -> str:
    """A picture that fills its column; ``label`` is what it says, for those who do not see it."""
    return (
        f'<svg class="{escape(f"chart {kind}".strip())}" width="100%" height="{height}" role="img" '
        f'aria-label="{escape(label)}">{body}</svg>'
    )


def rect(x: float, y: float, width: float, height: float, style: str, title: str = "") -> str:
    """A rectangle; x and width in percent."""
    said = f"<title>{escape(title)}</title>" if title else ""
    return (
        f'<rect class="{style}" x="{x:.3f}%" y="{y:g}" width="{max(width, 0):.3f}%" height="{height:g}">{said}</rect>'
    )


def line(x: float, y: float, to_x: float, to_y: float, style: str) -> str:
    """A line; x in percent."""
    return f'<line class="{style}" x1="{x:.3f}%" y1="{y:.1f}" x2="{to_x:.3f}%" y2="{to_y:.1f}"/>'


def words(x: float, y: float, content: str, anchor: str = "start", style: str = "") -> str:
    """Text; x in percent."""
    return f'<text class="{style}" x="{x:.3f}%" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def bar(parts: Iterable[tuple[str, str, float]], scale: float, label: str, height: int = 18) -> str:
    """One stacked bar.

    Args:
        parts: (class, title, value).
        scale: the value that fills the width.
        label: what the bar says.
        height: in pixels.
    """
    at, body = 0.0, []
    for style, title, value in parts:
        width = 100 * value / scale if scale else 0.0
        body.append(rect(at, 1, width, height - 2, f"part {style}", title))
        at += width
    return svg(height, "".join(body), label)


def memory(report: Report, styles: Mapping[str, str]) -> str:
    """HBM of a device by what it holds, against what there is.

    Args:
        report: with ``memory``.
        styles: class by name of the part.
    """
    assert report.memory is not None
    available, parts = report.memory.available, facts.memory_parts(report)
    total = sum(n for _, n in parts)
    scale = max(total, available)
    limit, top, height = 100 * available / scale, 24, 34
    body = [rect(0, top, limit, height, "room", f"{facts.size(max(0, available - total))} free")]
    at = 0.0
    for name, n in parts:
        width = 100 * n / scale
        body.append(rect(at, top, width, height, f"part {styles[name]}", f"{name}: {facts.size(n)}"))
        at += width
    if total > available:
        body.append(rect(limit, top, 100 - limit, height, "over", f"{facts.size(total - available)} too much"))
    body.append(line(limit, top - 6, limit, top + height + 6, "limit"))
    anchor = "end" if limit > 30 else "start"
    body.append(words(limit, 13, f"usable HBM {facts.size(available)}", anchor))
    body.append(words(0, top + height + 18, "0"))
    if total > available:
        body.append(words(100, top + height + 18, facts.size(total), "end", "bad"))
    said = ", ".join(f"{name} {facts.size(n)}" for name, n in parts)
    return svg(top + height + 24, "".join(body), f"HBM of a device: {said}; of {facts.size(available)}")


def size_scale(found: Sequence[facts.Size]) -> float:
    """Bytes that fill the width of the bars of topologies."""
    available = found[0].available
    return min(max(available, *(s.total for s in found)), _OVER * available) * 1.02


def size_bar(one: facts.Size, scale: float) -> str:
    """What a device of a topology holds, against its HBM; estimates are hatched."""
    style = ("fits" if one.fits else "misses") + ("" if one.exact else " guess")
    title = f"{one.topology}: {facts.size(one.total)} of {facts.size(one.available)}"
    width = min(100.0, 100 * one.total / scale)
    body = rect(0, 3, width, 16, f"part {style}", title)
    if not one.exact:
        body += f'<rect class="hatch" x="0" y="3" width="{width:.3f}%" height="16" fill="url(#hatch)"/>'
    if one.total > scale:  # cut off
        body += line(98.2, 0, 97.2, 22, "cut") + line(99.2, 0, 98.2, 22, "cut")
    limit = 100 * one.available / scale
    return svg(22, body + line(limit, 0, limit, 22, "limit"), title)


def roofline(chip: Chip, found: Sequence[facts.Group]) -> tuple[str, list[facts.Group]]:
    """Operators by FLOPs for each byte of HBM traffic and by FLOP/s, under the roof of the chip.

    Args:
        chip: whose peaks make the roof.
        found: operators, the longest first; those without products are left out.

    Returns:
        The picture, and the operators that it numbers, from 1.
    """
    points = [g for g in found if g.flops > 0 and g.compute_seconds > 0]
    peak, slope = chip.flops["bf16"], chip.hbm_bandwidth
    ridge = peak / slope
    intensities = [g.flops / g.hbm_bytes for g in points if g.hbm_bytes]
    low = math.floor(math.log10(max(min([*intensities, ridge / 20]), ridge / 1e4)) - 0.1)
    high = math.ceil(math.log10(min(max([*intensities, ridge * 20]), ridge * 1e4)))
    top = math.log10(peak) + 0.25
    bottom = min(math.log10(slope) + low, top - 2)

    def across(intensity: float) -> float:
        return _STRIP * min(1.0, max(0.0, (math.log10(intensity) - low) / (high - low)))

    def down(value: float) -> float:
        return _PLOT * min(1.0, max(0.0, (top - math.log10(value)) / (top - bottom)))

    grid = [rect(_STRIP, 0, 100 - _STRIP, _PLOT, "strip"), words(90, _PLOT + 16, "on chip", "middle")]
    grid.append(words(0, _PLOT + 34, "FLOPs for each byte of HBM traffic"))
    axis = []
    for e in range(low, high + 1):
        x = across(10**e)
        grid.append(line(x, 0, x, _PLOT, "grid"))
        if (high - low) <= 6 or (e - low) % 2 == 0:
            anchor = "start" if e == low else "end" if e == high else "middle"
            grid.append(words(x, _PLOT + 16, _power(e), anchor))
    for e in range(math.ceil(bottom), math.floor(top) + 1):
        y = down(10**e)
        grid.append(line(0, y, 100, y, "grid"))
        if y > 10 and y < _PLOT + 1:
            axis.append(f'<text x="82" y="{min(y + 4, _PLOT):.1f}" text-anchor="end">{_rate(e)}</text>')
    start = 10.0**low
    roof = [
        line(0, down(start * slope), across(ridge), down(peak), "roof"),
        line(across(ridge), down(peak), 100, down(peak), "roof"),
        line(across(ridge), down(peak), across(ridge), _PLOT, "ridge"),
        words(100, down(peak) - 8, f"peak {facts.amount(peak, 'FLOP/s')} (bf16)", "end"),
    ]
    side = "end" if across(ridge) > 50 else "start"
    roof.append(words(across(ridge) + (-1 if side == "end" else 1), _PLOT - 8, f"ridge {ridge:.0f} FLOP/byte", side))
    longest = sum(g.compute_seconds for g in found) or 1.0
    free = [number for number, g in enumerate(points, 1) if not g.hbm_bytes]
    inside = {
        n: _STRIP + (100 - _STRIP) * (i + 0.5) / min(len(free), _NUMBERED) for i, n in enumerate(free[:_NUMBERED])
    }
    inside |= dict.fromkeys(free[_NUMBERED:], 100.0 - 1)
    marks, labels = [], []
    at = [
        (across(g.flops / g.hbm_bytes) if g.hbm_bytes else inside[number], down(g.flops / g.compute_seconds))
        for number, g in enumerate(points, 1)
    ]
    taken = list(at)
    for number, (g, (x, y)) in enumerate(zip(points, at, strict=True), 1):
        share = g.compute_seconds / longest
        radius = 4 + 10 * math.sqrt(share)
        # The largest lie below, so that a small one can still be pointed at.
        marks.append(_point(g, x, y, radius, share))
        if number <= _NUMBERED:
            under = y + radius + 18
            while any(abs(x - other) < 6 and abs(under - 4 - height) < 15 for other, height in taken):
                under += 4
            taken.append((x, under - 4))
            labels.append(line(x, y + radius, x, under - 12, "lead"))
            labels.append(words(x, under, str(number), _anchor(x), "number"))
    drawn = svg(
        _PLOT + _AXIS,
        "".join([*grid, *roof, *labels, *marks]),
        f"Roofline: peak {facts.amount(peak, 'FLOP/s')}, ridge at {ridge:.0f} FLOP/byte, {len(points)} operators, "
        "the largest of which are in the table",
        "roofline",
    )
    scale = f'<svg class="chart scale" width="86" height="{_PLOT + _AXIS}" aria-hidden="true">{"".join(axis)}</svg>'
    return f'<div class="plot">{scale}{drawn}</div>', points[:_NUMBERED]


def _point(g: facts.Group, x: float, y: float, radius: float, share: float) -> str:
    intensity = f"{facts.plain(g.flops / g.hbm_bytes)} FLOP/byte" if g.hbm_bytes else "no HBM traffic of its own"
    title = (
        f"{g.module} {g.operator}".strip() + f": {facts.amount(g.flops / g.compute_seconds, 'FLOP/s')} at most, "
        f"{intensity}, {facts.percent(share)} of computing"
    )
    return (
        f'<circle class="point {g.bound.lower()}" cx="{x:.3f}%" cy="{y:.1f}" r="{radius:.1f}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _anchor(x: float) -> str:
    return "end" if x > 98 else "start" if x < 2 else "middle"


def _power(exponent: int) -> str:
    return (
        f"{10**exponent:g}"
        if -3 <= exponent < 3
        else facts.amount(10.0**exponent, "").replace(".00", "").replace(".0", "")
    )


def _rate(exponent: int) -> str:
    return facts.amount(10.0**exponent, "FLOP/s").replace(".00", "").replace(".0", "")
