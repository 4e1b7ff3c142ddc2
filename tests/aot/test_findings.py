"""What wastes the chip is found, with the line it comes from, and only where it does."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from jax.sharding import AbstractMesh, AxisType
from torch import nn
from torch.nn import functional as F

from torchtpu.aot import Compiler, libtpu_missing
from torchtpu.aot.count import Counts, count
from torchtpu.aot.findings import find, refused
from torchtpu.aot.findings_context import merge, percent, seconds_text, size_text
from torchtpu.aot.forms import without_kernel
from torchtpu.aot.graph import capture
from torchtpu.aot.hlo import Collective, Copy, Hlo, Memory, Padding, read_hlo
from torchtpu.aot.layout import Layout
from torchtpu.aot.report import Finding
from torchtpu.aot.roofline import predict
from torchtpu.aot.step import Step, build_step
from torchtpu.aot.topology import Topology
from torchtpu.sharding import Plan, Rule, parse

TOPOLOGY = Topology.parse("v6e:2x2")
BF16 = torch.bfloat16
needs_libtpu = pytest.mark.skipif(libtpu_missing() is not None, reason=libtpu_missing() or "")


def make_step(module: nn.Module, plan: str | Plan = "fsdp", kind: str = "infer", **inputs: torch.Tensor) -> Step:
    plan = parse(plan, TOPOLOGY.devices) if isinstance(plan, str) else plan
    mesh = AbstractMesh(tuple(plan.mesh.values()), tuple(plan.mesh), axis_types=(AxisType.Auto,) * len(plan.mesh))
    module = module.to("meta").train(kind == "train")
    return build_step(capture(module, {k: x.to("meta") for k, x in inputs.items()}), Layout(plan, mesh, "tpu"), kind)


def findings(step: Step, hlo: Hlo | None = None) -> list[Finding]:
    counts = count(step.jaxpr())
    prediction = predict(counts, hlo.collectives, TOPOLOGY, memory=hlo.memory) if hlo else None
    return find(step, counts, hlo, prediction, TOPOLOGY)


def only(found: list[Finding], kind: str) -> Finding:
    chosen = [f for f in found if f.kind == kind]
    assert len(chosen) == 1, [f"{f.kind}: {f.what}" for f in found]
    return chosen[0]


def tokens(rows: int, width: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(rows, width, dtype=dtype, device="meta")


class Head(nn.Module):
    def __init__(self, width: int, vocabulary: int, dtype: torch.dtype = BF16) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width, dtype=dtype)
        self.lm_head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.embed_tokens(ids))


def test_a_hidden_size_that_is_no_whole_tile() -> None:
    """3000 is filled up to 3072: once for all the weights that have it, with its share of the work and what to take."""
    layers = nn.Sequential(*[nn.Linear(3000, 3000, bias=False, dtype=BF16) for _ in range(3)])
    found = only(findings(make_step(layers, input=tokens(8192, 3000))), "tile")
    # 1 - (3000 / 3072)^2: both of a weight's dimensions are it
    assert "is 3000, as it is in 2 other weights" in found.what and "4.6 %" in found.what
    assert "3072" in found.advice and found.cost is not None and found.cost == pytest.approx(0.046, abs=0.002)
    assert not findings(make_step(nn.Linear(3072, 3072, dtype=BF16), input=tokens(8192, 3072)))


def test_sizes_are_those_on_a_device() -> None:
    """6912 columns are 3456 for each of two devices, which is no multiple of 256 although 6912 is."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj = nn.Linear(4096, 6912, bias=False, dtype=BF16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.q_proj(x)

    found = only(findings(make_step(Projected(), "fsdp=2,tp=2", x=tokens(8192, 4096))), "tile")
    assert "3456 on each device once it is divided over 2" in found.what
    assert "7168 or 6656" in found.advice and found.module == "q_proj"
    assert found.code == "return self.q_proj(x)" and "test_findings.py" in found.line


def test_a_vocabulary_that_no_axis_divides() -> None:
    """50257 is odd: tensor parallelism leaves both weights whole, and says which dimension and axis."""
    step = make_step(Head(1024, 50257), "fsdp=2,tp=2", ids=torch.zeros(16, 1024, dtype=torch.int64))
    found = only(findings(step), "unsharded")
    assert "embed_tokens.weight is not divided over tp=2" in found.what and found.count == 2
    assert "its dimension 0 (50257) is no multiple of 2" in found.what and "50688" in found.advice
    step = make_step(Head(1024, 50688), "fsdp=2,tp=2", ids=torch.zeros(16, 1024, dtype=torch.int64))
    assert not findings(step)


def test_weights_that_every_device_holds() -> None:
    """Data parallelism divides none: one finding with all bytes, moments of the optimizer among them."""
    layers = nn.Sequential(*[nn.Linear(4096, 4096, bias=False, dtype=BF16) for _ in range(2)])
    found = only(findings(make_step(layers, "dp", "train", input=tokens(8192, 4096))), "unsharded")
    saved = 2 * 4096 * 4096 * (2 + 8) * 3 / 4
    assert size_text(saved) in found.what and "--shard fsdp=4" in found.advice
    assert found.cost == pytest.approx(saved / TOPOLOGY.chip.usable_hbm_bytes)
    assert not [
        f for f in findings(make_step(layers, "fsdp", "train", input=tokens(8192, 4096))) if f.kind == "unsharded"
    ]


def test_a_weight_without_a_rule() -> None:
    """In a plan of rules, a big weight that none matches."""
    plan = Plan({"dp": 2, "tp": 2}, parameters=(Rule("up.weight", (("tp",),)),), batch=("dp",))
    module = nn.Sequential()
    module.add_module("up", nn.Linear(4096, 8192, bias=False, dtype=BF16))
    module.add_module("side", nn.Linear(8192, 8192, bias=False, dtype=BF16))
    found = only(findings(make_step(module, plan, input=tokens(8192, 4096))), "unsharded")
    assert "side.weight is not divided over tp=2: no rule" in found.what and "side" in found.advice


def test_float32_products_and_those_that_only_look_like_it() -> None:
    """A float32 model takes 6 passes; a bfloat16 one takes 1, forward and backward, though gradients are summed in
    float32."""
    for dtype in (torch.float32, BF16):
        layers = nn.Sequential(*[nn.Linear(2048, 2048, bias=False, dtype=dtype) for _ in range(2)])
        found = [
            f
            for f in findings(make_step(layers, "fsdp", "train", input=tokens(8192, 2048, dtype)))
            if f.kind == "dtype"
        ]
        assert [f.count for f in found if "6 passes" in f.what] == ([2] if dtype is torch.float32 else [])


def test_attention_without_its_kernel_multiplies_as_narrowly_as_its_inputs() -> None:
    """Forward and backward; a mask that is an input keeps it from the kernel."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(1024, 1024, bias=False, dtype=BF16)

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            heads = self.project(x).unflatten(-1, (8, 128)).transpose(1, 2)
            return F.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).float()

    x = torch.empty(4, 1024, 1024, dtype=BF16, device="meta")
    mask = torch.empty(4, 1, 1024, 1024, dtype=torch.bool, device="meta")
    step = make_step(Attention(), "fsdp", "train", x=x, mask=mask)
    assert {op.dtype for op in count(step.jaxpr()).ops if op.primitive == "dot_general"} == {"bfloat16"}
    assert not [f for f in findings(step) if "6 passes" in f.what]


def test_float64_and_float16() -> None:
    """Types that the chip has not, or not for products."""

    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.double().mul(2).sum(-1).float()

    found = only(findings(make_step(Wide(), x=tokens(4096, 4096, torch.float32))), "dtype")
    assert "float64" in found.what and ".double()" in found.code and found.cost
    layer = nn.Linear(1024, 1024, dtype=torch.float16)
    assert "bfloat16" in only(findings(make_step(layer, input=tokens(8192, 1024, torch.float16))), "dtype").advice


class Integers(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("ids", torch.zeros(rows, 8192, dtype=torch.int64, device="meta"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.ids * 31 % 1009).sum()


def test_int64() -> None:
    """A large table of integers costs memory and time; a few token ids do not."""
    found = [f for f in findings(make_step(Integers(8192), "dp", x=tokens(8, 128))) if f.kind == "int64"]
    assert any("the buffer ids is int64" in f.what for f in found)
    assert any("integers of 64 bits" in f.what and "self.ids * 31" in f.code for f in found)
    step = make_step(Head(1024, 1024), ids=torch.zeros(16, 1024, dtype=torch.int64))
    assert not [f for f in findings(step) if f.kind == "int64"]


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (lambda x, at: torch.gather(x, 1, at), "reads"),
        (lambda x, at: x.scatter(1, at, 0.0), "writes"),
        (lambda x, at: torch.sort(x, -1)[0], "sorts"),
        (lambda x, at: x.cumsum(-1), "runs over"),
    ],
)
def test_one_after_another(function: Callable[..., torch.Tensor], word: str) -> None:
    """Gathers, scatters, sorts and scans over millions of elements are told; over a few they are not."""

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
            return function(x, at)

    def run(columns: int) -> list[Finding]:
        at = torch.zeros(8, columns, dtype=torch.int64)
        return [
            f for f in findings(make_step(Module(), x=tokens(8, columns, torch.float32), at=at)) if f.kind == "gather"
        ]

    (found,) = run(1 << 20)
    assert word in found.what and "test_findings.py" in found.line and found.advice


class Attention(nn.Module):
    def __init__(self, heads: int, masked: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.masked, self.dropout = heads, masked, dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mask = q[..., :1] > 0 if self.masked else None
        if mask is not None:
            mask = mask.expand(*q.shape[:3], q.shape[2])
        return F.scaled_dot_product_attention(q, q, q, mask, self.dropout, is_causal=mask is None)


@pytest.mark.parametrize(
    ("module", "length", "reason"),
    [
        (Attention(8), 2048, ""),
        (Attention(8, masked=True), 2048, "not recognised as causal or as a sliding window (it depends on x)"),
        (Attention(8, dropout=0.5), 2048, "drops scores with probability 0.5"),
        (Attention(8), 2040, "2040 queries and 2040 keys"),
        (Attention(32), 2048, "heads are 32 wide"),
    ],
)
def test_attention_without_its_kernel(module: Attention, length: int, reason: str) -> None:
    """The reason is the one by which the kernel is not chosen."""
    x = torch.empty(8, length, 1024, dtype=BF16, device="meta")
    step = make_step(module, x=x)
    found = [f for f in findings(step) if f.kind == "attention"]
    kernel = "splash" in str(step.jaxpr())
    assert kernel == (not reason) and bool(found) == bool(reason)
    if found:
        assert reason in found[0].what and found[0].cost and "scaled_dot_product_attention" in found[0].code


def test_narrow_heads() -> None:
    """Heads of 64 fill half the lanes, in the kernel too; heads of 128 all."""
    x = torch.empty(8, 8192, 1024, dtype=BF16, device="meta")
    found = only(findings(make_step(Attention(16), x=x)), "tile")
    assert "64 wide" in found.what and "50 %" in found.what
    assert not findings(make_step(Attention(8), x=x))


def test_reasons_without_the_kernel() -> None:
    """Arrays and tensors get the same answer."""
    good = torch.empty(1, 8, 256, 128, dtype=BF16, device="meta")
    assert without_kernel(good, good, good) is None
    array = jax.ShapeDtypeStruct((1, 8, 256, 128), "bfloat16")
    assert without_kernel(array, array, array) is None
    assert "float64" in str(without_kernel(good.double(), good, good))
    assert "one width" in str(without_kernel(good, good, good[..., :64]))
    assert "3 dimensions" in str(without_kernel(good[0], good, good))


@torch.library.custom_op("test_findings::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    """Nothing that a compiler knows."""
    return x.clone()


@mystery.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Refused(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        y = mystery(x)
        values = torch.linalg.eigvals(y)
        return mystery(y).cos(), values, torch.nonzero(x)


def test_what_keeps_a_model_off_the_chip() -> None:
    """All operators without a form, those on the host, and those whose result has no fixed size, each with its line."""
    graph = capture(Refused(), {"x": torch.empty(8, 8, device="meta")})
    found = refused(graph)
    assert [f.kind for f in found] == ["unsupported", "unsupported", "host", "host"]
    assert {f.code for f in found if f.kind == "unsupported"} == {
        "y = mystery(x)",
        "return mystery(y).cos(), values, torch.nonzero(x)",
    }
    assert "computed on the host" in found[2].what and "linalg.eigvals" in found[2].code
    assert "depends on the values" in found[3].what
    assert not refused(capture(nn.Linear(8, 8).to("meta"), {"input": torch.empty(8, 8, device="meta")}))


def test_what_cannot_be_lowered_without_counts() -> None:
    """There are no counts of a step that is not lowered."""

    class Strange(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return mystery(x)

    step = make_step(Strange(), x=torch.empty(8, 8, device="meta"))
    found = only(find(step, Counts(), None, None, TOPOLOGY), "unsupported")
    assert "test_findings.mystery" in found.what and found.cost is None


def compiled(**parts: Any) -> Hlo:
    return replace(Hlo(partitions=4), **parts)


def test_what_the_compiler_says() -> None:
    """Padding, copies and gathered activations are of the operator whose scope they carry."""
    step = make_step(nn.Sequential(nn.Linear(1024, 1024, dtype=BF16)), input=tokens(8192, 1024))
    step.jaxpr()
    (scope,) = [s for s, n in step.evaluator.scopes.items() if n.target is torch.ops.aten.linear.default]
    mib = 1 << 20
    hlo = compiled(
        padding=[
            Padding(f"jit(run)/{scope}/dot_general", "f32[1048576,3]{1,0:T(8,128)}", 12 * mib, 512 * mib, 1),
            Padding("state['parameters']['0.weight']", "bf16[8192,1023]{1,0:T(8,128)(2,1)}", 16760832, 16777216, 1),
        ],
        layout_copies=[
            Copy("layout", "copy.1", "copy", 64 * mib, 2, "bf16[4096,4096]{0,1:T(8,128)}", scope, "forward"),
            Copy("move", "copy.2", "copy", 64 * mib, 2, "bf16[4096,4096]{0,1:T(8,128)S(1)}", scope, "forward"),
        ],
        memory=[Memory(scope, "forward", 500 * mib)],
        collectives=[
            Collective("all-gather", "", size, "bf16", 4, ((0, 1, 2, 3),), 1, False, scope, "forward", f"{scope}/x")
            for size in (16 * mib, 2 * mib)
        ],
    )
    found = findings(step, hlo)
    padded = only(found, "padding")
    assert "filled up from 3 to 128" in padded.what and padded.module == "0"
    copied = only(found, "layout")
    assert size_text(128 * mib) in copied.what and "2 times" in copied.what
    gathered = only(found, "unsharded")  # the activations (8192 x 1024), not the weight
    assert "linear" in gathered.what and "over fsdp (16 MiB" in gathered.what
    assert [f.cost for f in found] == sorted((f.cost for f in found), key=lambda c: -(c or 0))


def test_communication_is_told_of_a_step_that_waits_for_it() -> None:
    """By kind and axes, with what each is about; nothing of a step that does not wait."""
    step = make_step(nn.Linear(1024, 1024, dtype=BF16), "fsdp=2,tp=2", input=tokens(8192, 1024))
    step.jaxpr()
    pairs = {"fsdp": ((0, 2), (1, 3)), "tp": ((0, 1), (2, 3))}

    def hlo(size: int) -> Hlo:
        return compiled(
            collectives=[
                Collective("all-gather", a, size, "bf16", 2, groups, 1, False, "", "forward", "")
                for a, groups in pairs.items()
            ],
            memory=[Memory("", "forward", 1 << 28)],
        )

    found = [f for f in findings(step, hlo(1 << 30)) if f.kind == "communication"]
    assert {w for f in found for w in ("fsdp=2", "tp=2") if f"all-gather over {w}" in f.what} == {"fsdp=2", "tp=2"}
    assert all(f.cost and f.cost > 0.3 for f in found)
    assert {f.advice.split(",")[0] for f in found} == {"these are weights", "these are activations"}
    assert not [f for f in findings(step, hlo(1 << 10)) if f.kind == "communication"]


def test_equal_findings_are_one() -> None:
    """Their costs add up; figures are read easily."""
    one = Finding("tile", "a", "b", "m", "f:1", cost=0.25)
    assert merge([one, one, replace(one, line="f:2")]) == [
        replace(one, cost=0.5, count=2),
        replace(one, line="f:2"),
    ]
    assert (percent(0.5), percent(0.046), percent(0.0041)) == ("50 %", "4.6 %", "0.41 %")
    assert (size_text(3 << 29), size_text(100)) == ("1.5 GiB", "100 bytes") and seconds_text(2.5e-5) == "25 us"


@needs_libtpu
def test_a_compiled_program() -> None:
    """What the compiler pads in HBM and rearranges is found, with the line that reads it."""

    class Points(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.empty(20_000_003, 3, device="meta"))

        def forward(self, at: torch.Tensor) -> torch.Tensor:
            return self.table[at]

    step = make_step(Points(), "dp", at=torch.zeros(64, 512, dtype=torch.int64))
    with tempfile.TemporaryDirectory() as folder, Compiler() as compiler:
        result = compiler.compile(step.stablehlo(), TOPOLOGY.name, mesh=[4], dump=folder)
        assert result.ok, result.message
        hlo = read_hlo(next(Path(folder).glob("*after_optimizations.txt")))
    found = findings(step, hlo)
    padded = only(found, "padding")
    assert padded.what.startswith("table ") and "filled up from 3 to 4" in padded.what
    assert padded.code == "return self.table[at]" and padded.cost == pytest.approx(20e6 * 4 / 33e9, rel=0.1)
    assert "rows of 3" in only(found, "gather").what
    assert only(found, "unsharded").cost and only(found, "layout").cost
