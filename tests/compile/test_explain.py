"""``torchtpu.explain``, the logger, and artifacts of PyTorch's structured trace."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchtpu
from torchtpu.compile.tiles import Product, products

ROOT = Path(__file__).parents[2]


def test_a_module(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 130), nn.GELU(), nn.Linear(130, 128)).to("tpu")
    x = torch.randn(10, 12, device="tpu")
    model(x).cpu()  # what has been compiled already is explained all the same
    report = torchtpu.explain(model, x, dump=tmp_path / "programs")
    for run in (report.eager, report.compiled):
        (program,) = run.programs
        assert program.flops is not None and program.flops > 2 * 10 * 130 * (12 + 128)
        assert program.argument_bytes >= x.nbytes + sum(p.nbytes for p in model.parameters())
        assert program.output_bytes >= 10 * 128 * 4 and program.peak_bytes >= program.argument_bytes
        assert program.bytes_accessed is not None and program.compile_seconds > 0
        assert sum(program.operators.values()) >= 3
        assert [(x["m"], x["k"], x["n"], x["count"]) for x in program.products] == [(10, 130, 128, 1), (10, 12, 130, 1)]
        assert program.products[1]["unaligned"] == ["m 10 of 8", "k 12 of 128", "n 130 of 128"]
        assert program.products[1]["wasted_128"] == pytest.approx(1 - 10 * 12 * 130 / (16 * 128 * 256), abs=1e-4)
        assert 0.5 < program.wasted[128] < program.wasted[256] < 1
        assert "stablehlo.dot_general" in Path(program.stablehlo).read_text()
        assert "HloModule" in Path(program.hlo).read_text()
    assert len(list((tmp_path / "programs").iterdir())) == 4
    assert len(report.graphs) == 1 and report.graph_breaks == [] and report.error is None
    assert report.eager.round_trips == [] and report.eager.fallbacks == {}
    assert "3 operators not seen before" in report.eager.reasons[0]
    text = str(report)
    for expected in ("Fused eager mode: 1 program compiled", "1 graph, 0 breaks", "k 12 of 128", str(tmp_path)):
        assert expected in text
    assert json.loads(json.dumps(report.as_dict()))["eager"]["programs"][0]["flops"] == report.eager.programs[0].flops


def test_blocks_that_repeat_are_compiled_once() -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU(), nn.LayerNorm(8)) for _ in range(12)]
    model = nn.Sequential(*layers).to("tpu")
    report = torchtpu.explain(model, torch.randn(4, 8, device="tpu"))
    block = max(report.eager.programs, key=lambda program: program.runs)
    assert block.runs >= 8 and f"run {block.runs} times" in str(report)
    assert [(x["m"], x["k"], x["n"]) for x in block.products] == [(4, 8, 8)]


def test_breaks_and_round_trips() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.sum().item() > 0:
            y = y + 1
        return torch.nonzero(y)[: int(y.cpu()[0])] * 1.5

    report = torchtpu.explain(function, torch.ones(4, device="tpu"))
    line = function.__code__.co_firstlineno
    where = [x["where"] for x in report.eager.round_trips]
    assert [f"{__file__}:{line + 2}", f"{__file__}:{line + 4}"] == sorted(set(where))
    assert {x["what"].split(" (")[0] for x in report.eager.round_trips} == {
        "a number read by Python",
        "a copy to the host",
        "aten.nonzero.default, whose size depends on values",
    }
    assert report.eager.flushes >= 2
    assert len(report.graphs) == len(report.graph_breaks) + 1 >= 2
    assert report.graph_breaks[0]["where"] == f"{__file__}:{line + 2}"
    assert "Tensor.item()" in report.graph_breaks[0]["reason"]
    assert f"graph break at {__file__}:{line + 2}" in str(report)
    assert Path(report.folder).is_dir() and report.folder in str(report)


def test_recompiles_are_explained_and_not_mixed_with_earlier_ones() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x.sin() @ x

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return inner(x) + inner(y).sum()

    x, y = torch.ones(3, 3, device="tpu"), torch.ones(5, 5, device="tpu")
    compiled = torch.compile(function, backend="tpu")
    reports = [torchtpu.explain(compiled, x, y) for _ in range(10)]  # Dynamo gives up after eight compiles
    assert all(report.graphs and report.error is None for report in reports)
    (again,) = reports[0].recompiles  # later it knows that this size changes
    assert "inner" in again["function"]
    assert "size mismatch at index 0" in again["reason"] and again["reason"] in str(reports[0])
    assert not any(report.recompiles for report in reports[1:])
    torch.testing.assert_close(compiled(x, y).cpu(), function(x.cpu(), y.cpu()))


def test_a_training_step() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to("tpu")
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(16, 8, device="tpu")

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()
    report = torchtpu.explain(step)
    assert report.error is None and report.recompiles == []
    assert len(report.eager.programs) == 2  # forward and backward, optimizer
    assert any("_fused_adamw_" in op or "addcdiv" in op for op in report.eager.programs[1].operators)


def test_errors() -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with pytest.raises(RuntimeError, match=r"shape|size"):
        torchtpu.explain(wrong, torch.ones(2, 3, device="tpu"))

    assert torchtpu.explain(lambda: 3).error == "Dynamo found no operators to capture"


@torch.library.custom_op("explain_test::twice", mutates_args=(), device_types="cpu")
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_an_operator_without_a_program() -> None:
    report = torchtpu.explain(lambda x: twice(x) + 1, torch.ones(2, device="tpu"))
    assert report.eager.fallbacks == {"explain_test.twice.default": 1}
    assert report.error is not None and "explain_test.twice" in report.error
    assert "on the CPU, 1x: explain_test.twice.default" in str(report) and report.error in str(report)


def test_loops_are_pointed_out() -> None:
    report = torchtpu.explain(torch.rand, 4, device="tpu")
    assert report.eager.programs[0].loops == 2  # of the generator
    assert "2 loops, whose bodies count once" in str(report)


def test_nothing_stays_behind() -> None:
    from torchtpu.eager import trace
    from torchtpu.runtime import observe

    cache, mode = trace._cache, torch.tpu.eager_mode
    with torch.tpu.set_eager_mode("strict"):
        torchtpu.explain(lambda x: x + 1, torch.ones(2, device="tpu"))
        assert torch.tpu.eager_mode == "strict"
    assert trace._cache is cache and torch.tpu.eager_mode == mode
    assert not observe.watched() and not observe._waiting


# Products


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "%2 = stablehlo.dot_general %0, %1, contracting_dims = [1] x [0], precision = [DEFAULT, DEFAULT] : "
            "(tensor<10x12xf32>, tensor<12x130xf32>) -> tensor<10x130xf32>",
            Product("dot", 1, 10, 12, 130, "f32"),
        ),
        (
            "%2 = stablehlo.dot_general %0, %1, batching_dims = [0, 1] x [0, 1], contracting_dims = [3] x [3] : "
            "(tensor<2x4x5x64xbf16>, tensor<2x4x7x64xbf16>) -> tensor<2x4x5x7xf32>",
            Product("dot", 8, 5, 64, 7, "bf16"),
        ),
        (
            "%2 = stablehlo.dot_general %0, %1, contracting_dims = [0] x [0] : "
            "(tensor<3xcomplex<f32>>, tensor<3xcomplex<f32>>) -> tensor<complex<f32>>",
            Product("dot", 1, 1, 3, 1, "complex<f32>"),
        ),
        (
            "%7 = stablehlo.convolution(%5, %6) dim_numbers = [b, f, 0, 1]x[o, i, 0, 1]->[b, f, 0, 1], window = "
            "{stride = [1, 1]} {batch_group_count = 1 : i64, feature_group_count = 2 : i64, precision_config = []} : "
            "(tensor<2x8x10x12xf32>, tensor<6x4x3x3xf32>) -> tensor<2x6x8x10xf32>",
            Product("convolution", 2, 160, 36, 3, "f32"),
        ),
    ],
)
def test_products(line: str, expected: Product) -> None:
    assert products(f"{line}\n{line}\n%3 = stablehlo.add %2, %2 : tensor<2xf32>\n") == [(expected, 2)]


def test_tiles() -> None:
    assert Product("dot", 1, 8, 128, 128, "f32").wasted(128) == 0
    assert Product("dot", 1, 8, 128, 128, "f32").wasted(256) == 0.75
    assert Product("dot", 1, 8, 128, 128, "bf16").unaligned() == ["m 8 of 16"]
    assert Product("dot", 1, 32, 128, 128, "i8").unaligned() == []


def test_products_of_lowered_programs_are_recognised() -> None:
    """The text that JAX writes is what the patterns expect."""
    import jax
    import jax.numpy as jnp

    def function(x, y, kernel):
        batched = jnp.einsum("bij,bjk->bik", x, y)
        return jax.lax.conv_general_dilated(batched[:, None], kernel, (1, 1), "SAME"), jnp.vdot(x, x)

    shapes = [(2, 5, 6), (2, 6, 7), (3, 1, 3, 3)]
    text = jax.jit(function).lower(*(jax.ShapeDtypeStruct(s, "float32") for s in shapes)).as_text()
    assert dict(products(text)) == {
        Product("dot", 2, 5, 6, 7, "f32"): 1,
        Product("dot", 1, 1, 60, 1, "f32"): 1,
        Product("convolution", 1, 70, 9, 3, "f32"): 1,
    }


def test_why_sizes_are_exact() -> None:
    """Dropout inside attention has no rule for sizes that change; the report says so, and on which operator."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5)

    x = torch.ones(2, 2, 6, 8, device="tpu")
    torch._dynamo.mark_dynamic(x, 2)
    report = torchtpu.explain(function, x)
    (why,) = report.exact
    assert "attention" in why and "drops out probabilities" in why
    assert f"compiled for exact sizes, not for buckets: {why}" in str(report)


# Logger and structured trace


def test_logger(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(7, 3, device="tpu")
    with caplog.at_level(logging.INFO, "torchtpu"):
        (x * 2 + x.cos()).cpu()
    messages = [r.getMessage() for r in caplog.records if r.name == "torchtpu"]
    assert any("compiles because: " in m for m in messages)
    assert any(re.match(r"compiled \d+ operators in [\d.]+ s \(traced in [\d.]+ s\)", m) for m in messages)


def test_environment_variables(tmp_path: Path) -> None:
    source = "import torch, torchtpu; print(torch.ones(3, device='tpu').sin().sum().item())"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT / 'src'}:{os.environ.get('PYTHONPATH', '')}",
        "TORCH_LOGS": "torchtpu",
        "TORCH_TRACE": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert "compiled 3 operators in" in done.stderr
    (log,) = tmp_path.iterdir()
    assert "torchtpu_stablehlo" in log.read_text() and "stablehlo.sine" in log.read_text()


def test_documented_example(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "explain.md").read_text()
    found = re.search(r"<!-- example -->\n```python\n(.*?)\n```", page, re.DOTALL)
    assert found is not None
    exec(compile(found[1], "explain.md", "exec"), {})
    assert "graph break" in capsys.readouterr().out
