"""What `torchtpu check` says of reports that are made up here: the text, the page and the JSON."""

from __future__ import annotations

import copy
import json
import math
import re
import sys
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from torchtpu.aot.check import _failure
from torchtpu.aot.compile import Result
from torchtpu.aot.report import Finding, Fit, MemoryUse, Report, Timing
from torchtpu.aot.roofline import CollectiveTime, Prediction, ScopeTime
from torchtpu.aot.topology import Topology
from torchtpu.cli import check_facts as facts
from torchtpu.cli.check_html import page
from torchtpu.cli.check_text import WIDTH, text
from torchtpu.sharding import parse

GIB = 2**30
HOSTILE = "<script>alert(1)</script>&\"'<!--\x1b[31m</style></pre>"
VOID = {"meta", "link", "br", "img", "input", "hr", "base", "source"}


def report(**changed: Any) -> Report:
    """A training step of 32 layers on v6e:4x4, of which everything is known."""
    plan = parse("fsdp=8,tp=2", 16)
    scopes = [
        ScopeTime("model.layers/model.layers.0-31.mlp.up_proj/mm_5", "forward", 0.2, 0.1, 0.2, 184e12, 164e9),
        ScopeTime("model.layers/model.layers.0-31.mlp.up_proj/mm_5", "backward", 0.4, 0.1, 0.4, 367e12, 164e9),
        ScopeTime("model.layers/model.layers.0-31.mlp.up_proj/mm_5", "recompute", 0.2, 0.0, 0.2, 184e12, 0.0),
        ScopeTime("model.layers/model.layers.0-31.norm/mul_2", "forward", 0.0, 0.1, 0.1, 0.0, 164e9),
        ScopeTime("lm_head/mm", "forward", 0.05, 0.0, 0.05, 46e12, 0.0),
        ScopeTime("optimizer", "forward", 0.0, 0.05, 0.05, 0.0, 82e9),
        ScopeTime("", "forward", 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    over = "line of 2"
    scope = "model.layers/model.layers.0-31.mlp.up_proj/mm_5"
    collectives = [
        CollectiveTime("all-gather", scope, "forward", GIB, 2, 32, True, 0.2, over),
        CollectiveTime("all-gather", scope, "forward", GIB, 2, 32, False, 0.1, over),
    ]
    prediction = Prediction(
        topology="v6e:4x4",
        devices=16,
        mxu_seconds=0.85,
        hbm_seconds=0.35,
        compute_seconds=1.0,
        ici_seconds=0.3,
        serial_seconds=1.3,
        overlapped_seconds=1.0,
        bound="MXU",
        model_flops=9e15,
        hardware_flops=12e15,
        mfu_serial=0.47,
        mfu_overlapped=0.61,
        tokens_per_second_serial=262144 / 1.3,
        tokens_per_second_overlapped=262144.0,
        scopes=scopes,
        collectives=collectives,
    )
    parts = {"parameters": GIB, "optimizer": 4 * GIB, "buffers": 64, "inputs": 2**20}
    memory = MemoryUse(
        **parts,
        outputs=0,
        temporaries=20 * GIB,
        code=GIB // 4,
        total=int(25.5 * GIB),
        available=int(31.24 * GIB),
        compiled=True,
    )
    made = Report(
        model="llama3-8b",
        parameters=8030261248,
        published=8030261248,
        published_source="config.json",
        kind="train",
        batch=64,
        sequence=4096,
        units=262144,
        unit="tokens",
        dtype="bfloat16",
        topology="v6e:4x4",
        chips=16,
        devices=16,
        plan=plan.as_dict(),
        plan_name=plan.name,
        loops=[("model.layers", 32)],
        memory=memory,
        prediction=prediction,
        findings=[
            Finding(
                "tile",
                "the last dimension of 80 fills 62% of a tile",
                "Take a multiple of 128.",
                "model.layers.0-31.self_attn",
                "modeling.py:120",
                "        q = self.q_proj(x)",
                0.12,
                32,
            )
        ],
        fits=[
            Fit("v6e:2x4", 8, "fsdp=4,tp=2", 10 * GIB, 40 * GIB, False),
            Fit("v6e:4x4", 16, "fsdp=8,tp=2", 5 * GIB, 20 * GIB, True),
            Fit("v6e:4x8", 32, "fsdp=16,tp=2", int(2.5 * GIB), 10 * GIB, True),
        ],
        assumptions=["Rates are the published peaks of v6e; no program reaches them."],
        timing=Timing(build=0.1, trace=40, lower=3, compile=300, analyse=2, compiler_bytes=GIB),
        versions={"torch": "2.13.0", "libtpu": None},
    )
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def failed(status: str, message: str, **changed: Any) -> Report:
    """A report of a step that was not compiled: temporaries are not known."""
    made = report(status=status, message=message, prediction=None, findings=[], **changed)
    assert made.memory is not None
    made.memory = MemoryUse(
        GIB, 4 * GIB, 64, 2**20, 0, 0, 0, 5 * GIB + 64 + 2**20, made.memory.available, compiled=False
    )
    if status == "memory":
        _failure(Result("fail", message), made.memory)
    there = Topology.parse(made.topology).devices
    made.fits = [
        Fit(
            f.topology,
            f.devices,
            f.plan,
            f.state_bytes,
            wanted := made.memory.temporaries * there // f.devices,
            f.state_bytes + wanted <= Topology.parse(f.topology).chip.usable_hbm_bytes,
        )
        for f in made.fits
    ]
    return made


FAILURES = {
    "memory": "Used 45.00G of 31.24G hbm. Exceeded hbm capacity by 13.76G.",
    "fail": "INTERNAL: Mosaic failed to compile",
    "lower": "no lowering for torchvision::nms",
    "crash": "the compiler's process ended with signal SIGFPE",
    "timeout": "gave up after 3600 s",
}


class Page(HTMLParser):
    """Reads a page: open elements, what is loaded, ids, and the text outside of scripts."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loaded: list[str] = []
        self.links: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.data = ""
        self.feed(content)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [given["id"]] if given.get("id") else []
        self.loaded += [v or "" for k, v in attrs if k in ("src", "srcset", "data", "poster", "xlink:href")]
        if tag == "a":
            self.links.append(given["href"] or "")
        elif "href" in given:
            self.loaded.append(given["href"] or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "script" and not self.data:
            self.data = data
        elif inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def joined(words: str) -> str:
    """Text without the ends of its lines."""
    return " ".join(words.split())


def widest(words: str) -> int:
    return max(len(line) for line in words.splitlines())


def test_text_answers_in_the_order_of_importance() -> None:
    said = text(report(), colour=False)
    order = ["Does it compile?", "Does it fit?", "How fast could it go?", "What wastes the chip?", "What this rests on"]
    places = [said.index(question.upper()) for question in order]
    assert places == sorted(places)
    assert widest(said) <= WIDTH


def test_text_has_the_facts() -> None:
    said = joined(text(report(), colour=False))
    for fact in (
        "llama3-8b on v6e:4x4",
        "8.03B parameters (published: 8.03B)",
        "Each device needs 25.5 GiB of 31.2 GiB HBM (82%)",
        "P parameters 1.00 GiB",
        "T temporaries 20.0 GiB",
        "Smallest topology that fits: v6e:4x4 (16 devices)",
        "step ~1.00 s ~1.30 s",
        "~262,000 tokens/s ~202,000 tokens/s",
        "MFU ~61% ~47%",
        "Bound by MXU",
        "forward 350 ms, recompute 200 ms, backward 400 ms, optimizer 50.0 ms, communication 300 ms",
        "model.layers.0-31.mlp.up_proj mm 62% ~800 ms 735 TFLOP 305 GiB MXU",
        "all-gather model.layers.0-31.mlp.up_proj forward 64.0 GiB 64 2 ~300 ms 23%",
        "the last dimension of 80 fills 62% of a tile [tile, ~12%, 32 places]",
        "modeling.py:120 in model.layers.0-31.self_attn",
        "q = self.q_proj(x)",
        "-> Take a multiple of 128.",
        facts.ESTIMATES,
        "Rates are the published peaks of v6e",
        "compile 300 s",
        "torch 2.13.0, libtpu absent",
    ):
        assert fact in said, fact


def test_the_bar_shows_each_part_by_its_share() -> None:
    bar = next(line for line in text(report(), colour=False).splitlines() if line.startswith("  ["))
    drawn = bar[bar.index("[") + 1 : bar.index("|")]
    share = {letter: drawn.count(letter) / len(drawn) for letter in "POT."}
    for letter, wanted in (("P", 1), ("O", 4), ("T", 20), (".", 31.24 - 25.5)):
        assert share[letter] == pytest.approx(wanted / 31.24, abs=0.03), letter


def test_what_is_over_the_memory_is_drawn_behind_its_end() -> None:
    bar = next(x for x in text(failed("memory", FAILURES["memory"]), colour=False).splitlines() if x.startswith("  ["))
    inside, _, over = bar.strip().strip("[]").partition("|")
    assert len(over) / len(inside + over) == pytest.approx(13.76 / 45, abs=0.03)


@pytest.mark.parametrize("status", FAILURES)
def test_every_failure_is_shown_with_what_to_do(status: str) -> None:
    made = failed(status, FAILURES[status])
    said, read = text(made, colour=False), Page(page(made))
    judged = facts.verdict(made)
    assert judged.advice and not judged.good
    assert widest(said) <= WIDTH
    for shown in (joined(said), read.text):
        assert "What to do" in shown
        assert joined(judged.sentence) in shown
        for sentence in judged.advice:
            assert joined(sentence) in shown
    if status != "memory":
        assert FAILURES[status] in joined(said) and FAILURES[status] in read.text


def test_every_status_is_judged_in_words_of_its_own() -> None:
    words = {facts.verdict(failed(status, message)).word for status, message in FAILURES.items()}
    assert len(words) == len(FAILURES) and "ok" not in words


@pytest.mark.parametrize(
    ("message", "total"),
    [
        (FAILURES["memory"], 45 * GIB),
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (40.00G) exceeds available HBM",
            None,
        ),
    ],
)
def test_a_refusal_for_memory_says_how_much_is_needed(message: str, total: int | None) -> None:
    made = failed("memory", message)
    assert made.memory is not None
    assert facts.needed(made) == (45 * GIB + 64 + 2**20 if total is None else total)


def test_topologies_are_judged_with_the_temporaries_that_the_compiler_refused() -> None:
    """The state alone fits all of them; with 40 GiB of temporaries on 16 devices, 32 are needed."""
    made = failed("memory", FAILURES["memory"])
    found = {s.topology: s for s in facts.sizes(made)}
    assert [s.fits for s in found.values()] == [False, False, True]
    assert found["v6e:4x4"].exact and not found["v6e:4x8"].exact
    assert found["v6e:4x8"].total == pytest.approx(int(2.5 * GIB) + 20 * GIB, rel=1e-3)
    assert "Check v6e:4x8 (32 devices, fsdp=16,tp=2)" in joined(text(made, colour=False))


def test_without_known_temporaries_nothing_smaller_than_what_failed_is_advised() -> None:
    found = facts.sizes(failed("memory", "RESOURCE_EXHAUSTED"))
    assert [(s.topology, s.answer) for s in found] == [
        ("v6e:2x4", "~does not fit"),
        ("v6e:4x4", "does not fit"),
        ("v6e:4x8", "~may fit"),
    ]


def test_a_topology_that_was_compiled_is_no_estimate() -> None:
    small = report(topology="v6e:2x4", chips=8, devices=8)
    found = {s.topology: s for s in facts.sizes(report(), [small])}
    assert found["v6e:2x4"].exact and found["v6e:2x4"].fits
    other_step = report(topology="v6e:2x4", chips=8, devices=8, batch=8)
    assert not {s.topology: s for s in facts.sizes(report(), [other_step])}["v6e:2x4"].exact


def test_layers_that_are_not_looped_are_one_group() -> None:
    made = report()
    assert made.prediction is not None
    made.prediction.scopes = [
        ScopeTime(f"features.{i}.conv/convolution_{i}", "forward", 0.1, 0.0, 0.1, 1e12, 0.0) for i in range(4)
    ]
    (group,) = facts.groups(made, operators=True, communication=False)
    assert (group.module, group.operator, len(group.members)) == ("features.*.conv", "convolution", 4)
    assert group.seconds == pytest.approx(0.4) and group.flops == pytest.approx(4e12)


def test_several_topologies_are_compared() -> None:
    bad = failed("memory", FAILURES["memory"], topology="v6e:2x4", chips=8, devices=8)
    several = [report(), bad, report(topology="v6e:4x8", chips=32, devices=32)]
    said, read = text(several, colour=False), Page(page(several))
    assert widest(said) <= WIDTH
    first = said.split("DOES IT COMPILE?")[0]
    for row in (
        r"v6e:4x4 +16 .* ok +82% +~1.30 s +~202,000",
        r"v6e:2x4 +8 .* does not fit +144%",
        r"v6e:4x8 +32 .* ok",
    ):
        assert re.search(row, first), row
    for shown in (said, read.text):
        assert "Smallest that compiles and fits: v6e:4x4 (16 chips, fsdp=8,tp=2)." in shown
        assert "Most from each chip: v6e:4x4" in shown
    assert {"#check-1", "#check-2", "#check-3"} == set(read.links)
    assert {"check-1", "check-2", "check-3"} <= set(read.ids)


def test_a_batch_that_grows_with_the_topology_is_a_column() -> None:
    said = text([report(), report(topology="v6e:4x8", chips=32, devices=32, batch=128)], colour=False)
    first = said.split("DOES IT COMPILE?")[0]
    assert re.search(r"batch +topology", first) and re.search(r"128 +v6e:4x8", first)


def test_an_assumption_of_one_topology_says_which() -> None:
    other = report(topology="v5e:4x4", assumptions=[*report().assumptions, "Only here."])
    assert facts.assumptions([report(), other]) == [*report().assumptions, "v5e:4x4: Only here."]


def test_images_are_counted_as_images() -> None:
    made = report(unit="images", units=64, kind="infer")
    assert made.prediction is not None
    made.prediction.tokens_per_second_serial = made.prediction.tokens_per_second_overlapped = None
    said = joined(text(made, colour=False))
    assert "64 images/s ~49.2 images/s" in said and "4096" not in said


def test_colours_are_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = text(report())
    assert "\033[" in coloured
    assert re.sub(r"\033\[[\d;]*m", "", coloured) == text(report(), colour=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in text(report())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: False, raising=False)
    assert "\033" not in text(report())


def hostile(status: str = "ok") -> Report:
    made = report(model=HOSTILE, status=status, message=HOSTILE * 40, plan_name=HOSTILE * 3, published_source=HOSTILE)
    made.versions = {HOSTILE: HOSTILE}
    made.assumptions = [HOSTILE]
    made.saved = HOSTILE
    made.loops = [(HOSTILE, 3)]
    made.findings = [Finding(HOSTILE, HOSTILE, HOSTILE, HOSTILE, "x" * 300, HOSTILE * 9, 0.5, 2)]
    made.tried = [(HOSTILE, "ok", 1, 1.0)]
    made.plan = {**made.plan, "mesh": {"fsdp": 8}, "parameters": [[HOSTILE, [["fsdp"], []]]]}
    assert made.prediction is not None
    made.prediction.scopes.append(ScopeTime(HOSTILE, "forward", 0.5, 0.1, 0.5, 1e12, 1e9))
    made.prediction.collectives.append(CollectiveTime(HOSTILE, HOSTILE, "forward", 1, 2, 1, True, 0.5, HOSTILE))
    return made


@pytest.mark.parametrize("status", ["ok", *FAILURES])
def test_hostile_strings_are_text(status: str) -> None:
    made = hostile(status)
    content = page([made, made])
    read = Page(content)
    assert read.tags.count("script") == 2 and read.tags.count("style") == 1
    assert "alert(1)</script>" not in content and "\x1b" not in content
    assert json.loads(read.data)[0]["model"] == HOSTILE
    said = text([made, made], colour=False)
    assert "\x1b" not in said and widest(said) <= WIDTH


@pytest.mark.parametrize("several", [[report()], [report(), report(topology="v6e:4x8", chips=32, devices=32)]])
def test_the_page_loads_nothing(several: list[Report]) -> None:
    content = page(several)
    read = Page(content)
    assert read.loaded == []
    assert not re.search(r"https?:|//\w+\.|@import|url\((?!#)", re.sub(r"(?m)^\s*//.*$", "", content))
    assert not {"iframe", "object", "embed", "img", "link"} & set(read.tags)
    assert "default-src 'none'" in content
    assert len(set(read.ids)) == len(read.ids)


def test_the_page_has_the_facts_and_pictures_with_words() -> None:
    content = page(report())
    read = Page(content)
    for fact in ("25.5 GiB", "~202,000", "~47%", "q = self.q_proj(x)", "modeling.py:120", "Take a multiple of 128."):
        assert fact in read.text, fact
    pictures = re.findall(r'<svg class="chart[^>]*>', content)
    assert len(pictures) > 8
    for picture in pictures:
        assert re.search(r'aria-label="[^"]+"|aria-hidden="true"', picture), picture
    assert "prefers-color-scheme: dark" in content and "@media print" in content


def test_the_roofline_puts_an_operator_under_the_roof() -> None:
    """On the slope, across and down of a point are those of the roof at its intensity."""
    made = report()
    assert made.prediction is not None
    made.prediction.scopes = [ScopeTime("a/mm", "forward", 0.01, 0.1, 0.1, 1638e9 * 30 * 0.1, 1638e9 * 0.1)]
    content = page(made)
    (point,) = re.findall(r'<circle class="point hbm" cx="([\d.]+)%" cy="([\d.]+)"', content)
    x1, y1, x2, y2 = map(
        float, re.findall(r'class="roof" x1="([\d.]+)%" y1="([\d.]+)" x2="([\d.]+)%" y2="([\d.]+)"', content)[0]
    )
    x, y = map(float, point)
    assert x1 < x < x2
    assert y == pytest.approx(y1 + (y2 - y1) * (x - x1) / (x2 - x1), abs=0.5)


def test_a_step_of_nothing_is_shown() -> None:
    made = report(findings=[], fits=[], loops=[], assumptions=[], versions={}, timing=Timing())
    assert made.prediction is not None
    made.prediction.scopes, made.prediction.collectives = [], []
    for name in ("serial_seconds", "overlapped_seconds", "mxu_seconds", "hbm_seconds", "ici_seconds"):
        setattr(made.prediction, name, 0.0)
    assert "No communication" in text(made, colour=False)
    Page(page(made))
    assert widest(text([made, copy.deepcopy(made)], colour=False)) <= WIDTH


@pytest.mark.parametrize("made", [report(), failed("crash", "x"), report(memory=None, prediction=None, status="lower")])
def test_the_json_is_strict_and_in_the_page(made: Report) -> None:
    content = json.dumps(made.to_json(), allow_nan=False)
    assert json.loads(content) == made.to_json()
    assert json.loads(Page(page(made)).data) == [made.to_json()]


def test_json_has_no_infinity_and_no_numpy() -> None:
    made = report(parameters=np.int64(3), tried=[("fsdp=4", "ok", 1, math.inf)])
    assert made.prediction is not None
    made.prediction.mfu_serial = math.nan
    made.prediction.model_flops = np.float32(2.0)
    data = json.loads(json.dumps(made.to_json(), allow_nan=False))
    assert data["prediction"]["mfu_serial"] is None and data["tried"] == [["fsdp=4", "ok", 1, None]]
    assert data["parameters"] == 3 and data["prediction"]["model_flops"] == 2.0


def test_json_of_something_else_is_refused() -> None:
    with pytest.raises(TypeError, match="no plain data"):
        report(saved=object()).to_json()


def test_no_report_is_an_error() -> None:
    for show in (text, page):
        with pytest.raises(ValueError, match="no report"):
            show([])
