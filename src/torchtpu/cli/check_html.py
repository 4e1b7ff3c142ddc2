"""The page that ``torchtpu check`` writes: everything in one HTML file that loads nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from torchtpu.aot.report import Finding, Report
from torchtpu.aot.topology import Topology
from torchtpu.cli import check_charts as charts
from torchtpu.cli import check_facts as facts

__all__ = ["page"]

_DATA = Path(__file__).parent / "data"
_MODULES = 14  # rows of the picture of time by module
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
)
_PARTS = {
    "parameters": "parameters",
    "optimizer": "optimizer-state",
    "buffers": "buffers",
    "inputs and outputs": "inputs",
    "temporaries": "temporaries",
    "temporaries and the rest": "temporaries",
    "code": "code",
    "padding of arguments": "grey",
}
_HATCH = (
    '<svg width="0" height="0" style="position:absolute" aria-hidden="true"><defs><pattern id="hatch" width="6" '
    'height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><path d="M0 0V6"/></pattern></defs></svg>'
)
_BADGES = {True: ("yes", "&#10003; yes"), False: ("no", "&#10007; no"), None: ("unknown", "? not known")}


@dataclass(frozen=True)
class _Cell:
    """A cell of a table: what it shows, the number that it is sorted by, and HTML in front of it."""

    shown: str
    value: float | None = None
    before: str = ""


def page(reports: Report | Sequence[Report]) -> str:
    """Reports as one HTML page, which needs neither a network nor a script.

    Args:
        reports: one, or several that are compared first.

    Raises:
        ValueError: there is no report.
    """
    several = [reports] if isinstance(reports, Report) else list(reports)
    if not several:
        raise ValueError("there is no report to show")
    names = list(dict.fromkeys(r.model for r in several))
    where = several[0].topology if len(several) == 1 else f"{len(several)} topologies"
    title = facts.clean(f"{', '.join(names)} on {where}")
    body = [f"<h1>{escape(title)}</h1>"]
    if len(several) > 1:
        body.append(_comparison(several))
    body += [_report(r, several, number) for number, r in enumerate(several, 1)]
    body.append(_ending(several))
    data = json.dumps([r.to_json() for r in several], allow_nan=False, separators=(",", ":"))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>torchtpu check: {escape(title)}</title>\n<style>\n{_asset('check.css')}</style>\n</head>\n<body>\n"
        f"{_HATCH}\n<main>\n" + facts.clean("\n".join(body)) + "\n</main>\n"
        # "<" cannot end the element, or begin a comment, when it is escaped as JSON allows.
        f'<script type="application/json" id="torchtpu-check">{data.replace("<", chr(92) + "u003c")}</script>\n'
        f"<script>\n{_asset('check.js')}</script>\n</body>\n</html>\n"
    )


def _asset(name: str) -> str:
    return (_DATA / name).read_text(encoding="utf-8")


def _badge(answer: bool | None) -> str:
    style, words = _BADGES[answer]
    return f'<span class="badge {style}">{words}</span>'


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str | _Cell]], caption: str, *, sort: bool = False, marked: int = -1
) -> str:
    """A table; columns of numbers are those of cells with a value, and lie to the right."""
    several = [[c if isinstance(c, _Cell) else _Cell(c) for c in row] for row in rows]
    right = [any(row[i].value is not None for row in several) for i in range(len(head))]
    kinds = [kind for kind, holds in (("sortable", sort), ("many", len(head) > 5)) if holds]
    style = f' class="{" ".join(kinds)}"' if kinds else ""
    out = [f'<div class="scroll" tabindex="0"><table{style}><caption>{escape(caption)}</caption><thead><tr>']
    out += [f'<th scope="col"{" class=number" if r else ""}>{escape(h)}</th>' for h, r in zip(head, right, strict=True)]
    out.append("</tr></thead><tbody>")
    for number, row in enumerate(several):
        out.append('<tr class="chosen">' if number == marked else "<tr>")
        for i, c in enumerate(row):
            kind = "th" if i == 0 else "td"
            scope = ' scope="row"' if i == 0 else ""
            value = f' data-value="{c.value:.6g}"' if c.value is not None else ""
            place = " class=number" if right[i] else ""
            out.append(f"<{kind}{scope}{place}{value}>{c.before}{escape(c.shown)}</{kind}>")
        out.append("</tr>")
    return "".join([*out, "</tbody></table></div>"])


def _legend(items: Iterable[tuple[str, str]]) -> str:
    shown = "".join(f'<li><span class="swatch {style}"></span>{escape(name)}</li>' for name, style in items)
    return f'<ul class="legend">{shown}</ul>'


def _rows(rows: Iterable[tuple[str, str, str]], style: str = "") -> str:
    """Named bars, one under another: (name, SVG, value)."""
    cells = (
        f'<div class="row"><div class="name">{escape(name)}</div>{picture}'
        f'<div class="value">{escape(value)}</div></div>'
        for name, picture, value in rows
    )
    return f'<div class="rows {style}">{"".join(cells)}</div>'


def _details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def _comparison(reports: Sequence[Report]) -> str:
    alike, batches = facts.alike(reports), len({r.batch for r in reports}) > 1
    rows: list[list[str | _Cell]] = []
    for r in reports:
        judged, p, both, total = facts.verdict(r), r.prediction, facts.throughput(r), facts.needed(r)
        memory = f"{facts.size(total)} of {facts.size(r.memory.available)}" if r.memory and total is not None else "-"
        rows.append(
            [
                r.topology if alike else f"{r.model}, {r.topology}",
                _Cell(str(r.chips), r.chips),
                r.plan_name or "custom",
                _Cell(judged.word, before="&#10003; " if judged.good else "&#10007; "),
                _Cell(memory, total or 0),
                _Cell(f"~{facts.seconds(p.serial_seconds)}" if p else "-", p.serial_seconds if p else 0),
                _Cell(f"~{facts.rate(both[0], r.unit)}" if both else "-", both[0] if both else 0),
                _Cell(f"~{facts.percent(p.mfu_serial)}" if p else "-", p.mfu_serial if p else 0),
                p.bound if p else "-",
            ]
        )
    head = ["topology", "chips", "plan", "result", "HBM of a device", "step", "throughput", "MFU", "bound"]
    if batches:
        head.insert(1, "batch")
        rows = [[row[0], _Cell(str(r.batch), r.batch), *row[1:]] for r, row in zip(reports, rows, strict=True)]
    links = ", ".join(f'<a href="#check-{n}">{escape(r.topology)}</a>' for n, r in enumerate(reports, 1))
    said = [f'<p class="soft">{escape(facts.work(reports[0], not batches))}</p>'] if alike else []
    said += [f'<p class="lead">{escape(s)}</p>' for s in facts.recommendations(reports)] if alike else []
    caption = "Steps one after another, without overlap of computing and communication; ~ marks estimates"
    return "".join([*said, _table(head, rows, caption, sort=True), f"<p>In detail: {links}</p>"])


def _report(report: Report, reports: Sequence[Report], number: int) -> str:
    judged = facts.verdict(report, reports)
    out = [f'<section id="check-{number}">']
    if len(reports) > 1:
        out.append(f"<h2>{escape(f'{report.model} on {report.topology}')}</h2>")
    mesh = " x ".join(f"{a} {n}" for a, n in report.plan.get("mesh", {}).items())
    source = f", by {report.published_source}" if report.published_source else ""
    published = f" (published: {facts.count(report.published)}{source})" if report.published else ""
    about = f"{facts.work(report)}. {facts.count(report.parameters)} parameters{published}. {facts.machine(report)}, "
    about += f"plan {report.plan_name or 'custom'} (mesh {mesh})."
    out.append(f'<p class="soft">{escape(about[0].upper() + about[1:])}</p>')
    out.append(_tiles(report, judged))
    out.append(f"<h3>Does it compile? {_badge(judged.compiles)}</h3>")
    out.append(f'<p class="lead">{escape(f"{report.model} {judged.sentence}")}</p>')
    if judged.compiles and report.loops:
        loops = ", ".join(f"{name} ({n} layers)" for name, n in report.loops)
        out.append(f"<p>{escape(f'Layers that are alike are compiled once: {loops}.')}</p>")
    if report.saved:
        out.append(f"<p>The executable is in <code>{escape(report.saved)}</code>.</p>")
    if report.message and report.status not in ("ok", "memory"):
        out.append(f"<pre>{escape(report.message)}</pre>")
    if judged.advice:
        items = "".join(f"<li>{escape(a)}</li>" for a in judged.advice)
        out.append(f'<div class="todo"><strong>What to do</strong><ul>{items}</ul></div>')
    if report.memory is not None:
        out.append(_fits(report, reports, judged))
    if report.prediction is not None:
        out.append(_fast(report))
    if report.findings or report.prediction is not None:
        out.append(_wastes(report.findings))
    out.append(_plan(report))
    out.append("</section>")
    return "".join(out)


def _tiles(report: Report, judged: facts.Verdict) -> str:
    p, memory, both, total = report.prediction, report.memory, facts.throughput(report), facts.needed(report)
    tiles = [("Result", judged.word.capitalize() if judged.word != "ok" else "Compiles and fits", report.topology)]
    if memory is not None and total is not None:
        share = facts.share(total, memory.available)
        tiles.append(("HBM of a device", share, f"{facts.size(total)} of {facts.size(memory.available)}"))
    if p is not None:
        low, high = facts.seconds(p.overlapped_seconds), facts.seconds(p.serial_seconds)
        tiles.append(("Step, estimate", f"~{high}", f"~{low} with perfect overlap"))
        if both is not None:
            tiles.append(
                (
                    f"{report.unit.capitalize()}/s, estimate",
                    f"~{facts.rate(both[0], '').rstrip(' /s')}",
                    f"~{facts.rate(both[1], '').rstrip(' /s')} with overlap",
                )
            )
        tiles.append(
            ("MFU, estimate", f"~{facts.percent(p.mfu_serial)}", f"~{facts.percent(p.mfu_overlapped)} with overlap")
        )
        tiles.append(("Bound by", p.bound, facts.RESOURCES[p.bound].split(";")[0]))
    shown = "".join(
        f'<div class="tile"><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(more)}</small></dd></div>'
        for name, value, more in tiles
    )
    return f'<dl class="tiles">{shown}</dl>'


def _fits(report: Report, reports: Sequence[Report], judged: facts.Verdict) -> str:
    memory, total = report.memory, facts.needed(report)
    assert memory is not None
    parts = facts.memory_parts(report)
    whole = sum(n for _, n in parts)
    if total is None:
        said = f"It was not compiled, so temporaries are not known. What the plan places takes {facts.size(whole)}"
    else:
        said = f"Each device needs {facts.size(total)}"
    said += f" of the {facts.size(memory.available)} that a program may use ({facts.share(whole, memory.available)})."
    rows = [
        [
            _Cell(name, before=f'<span class="swatch {_PARTS[name]}"></span>'),
            _Cell(facts.size(n), n),
            _Cell(facts.share(n, memory.available), n / memory.available),
        ]
        for name, n in parts
    ]
    rows.append([_Cell("all"), _Cell(facts.size(whole), whole), _Cell(facts.share(whole, memory.available), 0)])
    head = ["part", "bytes", "of the HBM"]
    out = [
        f"<h3>Does it fit? {_badge(judged.fits)}</h3><p>{escape(said)}</p>",
        f"<figure>{charts.memory(report, _PARTS)}</figure>",
        _table(head, rows, "HBM of a device", marked=len(rows) - 1),
    ]
    found = facts.sizes(report, reports)
    if found:
        out.append(_sizes(found))
    return "".join(out)


def _sizes(found: Sequence[facts.Size]) -> str:
    least, scale = facts.smallest(found), charts.size_scale(found)
    if least is None:
        said = "No size of this generation that was looked at fits."
    else:
        unsure = "" if least.exact else "~"
        may = "" if least.whole else ", temporaries not counted"
        said = f"The smallest that fits is {unsure}{least.topology}, {facts.devices(least.devices)}{may}."
    rows = []
    for s in found:
        value = f"{s.shown}, {s.answer.removeprefix('~')}"
        rows.append((f"{s.topology}, {facts.devices(s.devices)}, {s.plan}", charts.size_bar(s, scale), value))
    legend = [("fits", "fits"), ("does not fit", "misses")]
    available = facts.size(found[0].available)
    return (
        f"<h4>Smallest topology</h4><p>{escape(said)}</p><figure><figcaption>Bytes of a device by topology, against "
        f"its HBM of {available} (the line). Hatched: an estimate, with temporaries scaled by the number of devices."
        f"</figcaption>{_legend(legend)}{_rows(rows, 'long')}</figure>"
    )


def _fast(report: Report) -> str:
    p = report.prediction
    assert p is not None
    both = facts.throughput(report)
    rows: list[list[str | _Cell]] = [
        ["step", _num(facts.seconds(p.overlapped_seconds)), _num(facts.seconds(p.serial_seconds))],
        ["MFU", _num(facts.percent(p.mfu_overlapped)), _num(facts.percent(p.mfu_serial))],
    ]
    if both is not None:
        rows.insert(1, ["throughput", _num(facts.rate(both[1], report.unit)), _num(facts.rate(both[0], report.unit))])
    head = ["", "perfect overlap", "one after another"]
    whole = p.serial_seconds
    alone = [
        (name, charts.bar([(style, f"{what}: {facts.seconds(t)}", t)], whole, f"{what} {facts.seconds(t)}"),
         f"~{facts.seconds(t)}, {facts.share(t, whole)}")
        for name, style, what, t in (
            ("MXU, products", "mxu", "MXU", p.mxu_seconds),
            ("HBM, memory traffic", "hbm", "HBM", p.hbm_seconds),
            ("ICI, communication", "ici", "ICI", p.ici_seconds),
        )
    ]  # fmt: skip
    return "".join(
        [
            '<h3>How fast could it go? <span class="badge unknown">estimate</span></h3>',
            f"<p>{escape(f'Bound by {p.bound}, {facts.RESOURCES[p.bound]}.')}</p>",
            _table(head, rows, "With communication beside computing, and after it; of all devices"),
            "<figure><figcaption>Time that each needs by itself, against the step one after another</figcaption>",
            f"{_rows(alone)}</figure>",
            _times(report),
            _operators(report),
            _collectives(report),
        ]
    )


def _num(shown: str) -> _Cell:
    return _Cell(f"~{shown}", 0)


def _times(report: Report) -> str:
    """Where the time goes: by phase, and by module and phase."""
    p, total = report.prediction, facts.phases(report)
    assert p is not None
    whole = sum(total.values())
    if not whole:
        return ""
    parts = [(phase, f"{phase}: {facts.seconds(t)}, {facts.share(t, whole)}", t) for phase, t in total.items()]
    said = ", ".join(title for _, title, _ in parts)
    found = facts.groups(report, operators=False, communication=True)
    shown = [(g.module, g.by_phase) for g in found[:_MODULES]]
    rest = found[_MODULES:]
    if rest:
        added = {phase: sum(g.by_phase.get(phase, 0.0) for g in rest) for phase in facts.PHASES}
        shown.append((f"{len(rest)} more", added))  # type: ignore[arg-type]
    longest = max(sum(by.values()) for _, by in shown)
    rows = []
    for name, by in shown:
        bits = [(ph, f"{name}, {ph}: {facts.seconds(by[ph])}", by[ph]) for ph in facts.PHASES if by.get(ph)]
        time = sum(by.values())
        label = f"{name}: {', '.join(f'{ph} {facts.seconds(t)}' for ph, _, t in bits)}"
        rows.append((name, charts.bar(bits, longest, label), f"~{facts.seconds(time)}, {facts.share(time, whole)}"))
    table: list[list[str | _Cell]] = [
        [name, *(_Cell(facts.seconds(by[ph]) if by.get(ph) else "-", by.get(ph, 0.0)) for ph in total)]
        for name, by in shown
    ]
    return "".join(
        [
            "<h4>Where the time goes</h4>",
            f"<figure><figcaption>The whole step, one after another: {escape(said)}</figcaption>",
            charts.bar(parts, whole, said, 30),
            _legend([(phase, phase) for phase in total]),
            "</figure><figure><figcaption>By module, over layers; the longest fills the width</figcaption>",
            _rows(rows),
            "</figure>",
            _details("Time by module and phase as a table", _table(["module", *total], table, "Estimates", sort=True)),
        ]
    )


def _operators(report: Report) -> str:
    p = report.prediction
    assert p is not None
    found = facts.groups(report, operators=True, communication=False)
    if not found:
        return ""
    picture, numbered = charts.roofline(Topology.parse(report.topology).chip, found)
    top = [_operator(report, g, f"{n}. ") for n, g in enumerate(numbered, 1)]
    every = [_operator(report, g) for g in found]
    head = ["operator", "share", "time", "FLOPs", "HBM traffic", "FLOP/byte", "bound"]
    out = ["<h4>Roofline</h4>"]
    if numbered:
        out += [
            "<figure><figcaption>Operators with products: FLOPs for each byte of HBM traffic (across), and FLOP/s at "
            "most (up), on a device. The area is the time. Under the roof are products of a type or precision that "
            "the matrix unit takes longer for; at the right, those that read and write on-chip memory alone."
            f"</figcaption>{picture}",
            _legend([("bound by MXU", "mxu"), ("bound by HBM", "hbm")]),
            "</figure>",
            _table(head, top, "Operators with the numbers of the picture, the longest first"),
        ]
    table = _table(
        head, every, "Of a device in a step, over layers; the share is of the step one after another", sort=True
    )
    return "".join([*out, _details(f"All operators ({len(every)})", table)])


def _operator(report: Report, g: facts.Group, before: str = "") -> list[str | _Cell]:
    assert report.prediction is not None
    whole = report.prediction.serial_seconds
    intensity = g.flops / g.hbm_bytes if g.hbm_bytes else 0.0
    return [
        f"{before}{g.module} {g.operator}".strip(),
        _Cell(facts.share(g.seconds, whole), g.seconds),
        _Cell(f"~{facts.seconds(g.seconds)}", g.seconds),
        _Cell(facts.flops(g.flops), g.flops),
        _Cell(facts.size(g.hbm_bytes) if g.hbm_bytes else "-", g.hbm_bytes),
        _Cell(facts.plain(intensity) if intensity else "-", intensity),
        g.bound,
    ]


def _collectives(report: Report) -> str:
    p, found = report.prediction, facts.collectives(report)
    assert p is not None
    if not found:
        return "<h4>Communication</h4><p>There is no communication between devices.</p>"
    rows = [
        [
            t.kind,
            t.module,
            t.phase,
            _Cell(facts.size(t.bytes), t.bytes),
            _Cell(str(t.executions), t.executions),
            _Cell(str(t.group_size), t.group_size),
            t.over,
            "yes" if t.asynchronous else "no",
            _Cell(f"~{facts.seconds(t.seconds)}", t.seconds),
            _Cell(facts.share(t.seconds, p.serial_seconds), t.seconds),
        ]
        for t in found
    ]
    head = ["collective", "for", "phase", "bytes", "runs", "devices", "over", "may overlap", "time", "share"]
    moved = f"{facts.size(sum(t.bytes for t in found))} in {sum(t.executions for t in found)} collectives"
    table = _table(head, rows, "Of a device in a step, over layers", sort=True)
    first = found[0]
    said = f"A device exchanges {moved} in a step, ~{facts.seconds(p.ici_seconds)}. The longest: {first.kind} for "
    said += f"{first.module} ({first.phase}) among {first.group_size} devices, ~{facts.seconds(first.seconds)}."
    return f"<h4>Communication</h4><p>{escape(said)}</p>{_details(f'All collectives ({len(rows)})', table)}"


def _wastes(findings: Sequence[Finding]) -> str:
    if not findings:
        return "<h3>What wastes the chip?</h3><p>Nothing that the check looks for.</p>"
    cards = []
    for f in findings:
        cost = f'<span class="cost">~{facts.percent(f.cost)}</span>' if f.cost is not None else ""
        where = [f"<code>{escape(f.line)}</code>"] if f.line else []
        where += [f"in {escape(f.module)}"] if f.module else []
        where += [f"{f.count} places"] if f.count > 1 else []
        code = f"<pre>{escape(f.code.strip())}</pre>" if f.code.strip() else ""
        tags = " &middot; ".join([escape(f.kind), *where])
        cards.append(
            f'<li class="card">{cost}<h4>{escape(f.what)}</h4><p class="tags">{tags}</p>'
            f"{code}{f'<p>{escape(f.advice)}</p>' if f.advice else ''}</li>"
        )
    note = "The costliest first; a percentage is the share of the step's time or of the HBM that it takes."
    return f'<h3>What wastes the chip?</h3><p class="soft">{note}</p><ul class="cards">{"".join(cards)}</ul>'


def _plan(report: Report) -> str:
    plan = report.plan
    mesh = [[a, _Cell(str(n), n), _axis_use(plan, a)] for a, n in plan.get("mesh", {}).items()]
    out = [
        "<h3>How the model is divided</h3>",
        _table(["axis", "size", "divides"], mesh, "Mesh, the last axis between neighbours"),
    ]
    rules = [[pattern, _spec(spec)] for pattern, spec in plan.get("parameters", ())]
    rules += [[f"result of {pattern}", _spec(spec)] for pattern, spec in plan.get("activations", ())]
    if rules:
        head = ["pattern in the name", "axes by dimension"]
        out.append(
            _details(
                f"Rules for parameters and results ({len(rules)})", _table(head, rules, "The first that matches holds")
            )
        )
    if report.tried:
        rows: list[list[str | _Cell]] = [
            [name, status, _Cell(facts.size(n) if n else "-", n), _Cell(f"~{facts.seconds(t)}" if t else "-", t)]
            for name, status, n, t in report.tried
        ]
        head = ["plan", "result", "HBM of a device", "step, one after another"]
        out.append(_table(head, rows, "Plans that were compiled", sort=True))
    return "".join(out)


def _axis_use(plan: dict[str, Any], axis: str) -> str:
    uses = {
        "batch": "the batch",
        "sequence": "the sequence between layers",
        "heads": "the heads of attention",
        "gathered": "parameters as they are stored, gathered for use",
        "experts": "the experts",
    }
    found = [what for part, what in uses.items() if axis in _names(plan.get(part))]
    if any(axis in _names(axes) for _, spec in plan.get("parameters", ()) for axes in spec):
        found.append("parameters by the rules below")
    return ", ".join(found) or "nothing"


def _names(given: object) -> tuple[str, ...]:
    if isinstance(given, str):
        return (given,)
    return tuple(map(str, given)) if isinstance(given, list | tuple) else ()


def _spec(spec: Sequence[Sequence[str]]) -> str:
    return "[" + ", ".join(" x ".join(axes) if axes else "whole" for axes in spec) + ", ...]"


def _ending(reports: Sequence[Report]) -> str:
    items = "".join(f"<li>{escape(a)}</li>" for a in facts.assumptions(reports))
    rows: list[list[str | _Cell]] = []
    for r in reports:
        t = r.timing
        times = (t.build, t.trace, t.lower, t.compile, t.analyse)
        held = _Cell(facts.size(t.compiler_bytes) if t.compiler_bytes else "-", t.compiler_bytes)
        rows.append([r.topology, *(_Cell(facts.seconds(s) if s else "-", s) for s in times), held])
    head = ["topology", "build", "trace", "lower", "compile", "analyse", "memory of the compiler"]
    versions = [
        ", ".join(f"{name} {version or 'absent'}" for name, version in some)
        for some in dict.fromkeys(tuple(r.versions.items()) for r in reports)
    ]
    return "".join(
        [
            f"<h2>What this rests on</h2><p>{escape(facts.ESTIMATES)}</p><ul>{items}</ul>",
            "<h3>This check</h3>",
            _table(head, rows, "Time and memory of the check on the machine it ran on, measured"),
            *(f'<p class="soft">{escape(v)}</p>' for v in versions),
            '<p class="soft">The same as JSON is in this file, in the element with the id torchtpu-check.</p>',
        ]
    )
