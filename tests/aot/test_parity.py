"""Parity with PyTorch CPU: healthy models pass; a fault is found in the module and operator that it was put into."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest
import torch

from torchtpu import zoo
from torchtpu.aot.parity import compare, measure
from torchtpu.aot.parity.reference import grouped_product
from torchtpu.aot.parity.structure import convert, tensors
from torchtpu.lowering import registry

F32, BF16 = torch.float32, torch.bfloat16


class Of(zoo.ModelSource):
    """A source of one module class, whose inputs are a batch of vectors."""

    def __init__(self, make: Callable[[], torch.nn.Module], width: int) -> None:
        self.name, self.make, self.width = make.__name__, make, width

    def build(self, device: Any = "meta", dtype: Any = None, seed: int = 0) -> torch.nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().to(device=device, dtype=dtype)

    def example_inputs(self, kind: str, batch: int, seq: int, device: Any = "cpu", dtype: Any = None) -> dict[str, Any]:
        return {"x": torch.randn(batch, seq, self.width, generator=torch.Generator().manual_seed(0)).to(device, dtype)}

    def units(self, kind: str, batch: int, seq: int) -> zoo.Units:
        return zoo.Units(batch, "samples", batch)

    def loss(self, outputs: Any) -> torch.Tensor:
        return outputs[0].float().square().mean()


class Block(torch.nn.Module):
    """Returns a tuple, an integer tensor and a cache beside its result. Sizes are odd: no other test compiles them."""

    width = 23

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(self.width)
        self.up = torch.nn.Linear(self.width, 2 * self.width)
        self.down = torch.nn.Linear(2 * self.width, self.width)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.up(self.norm(x))
        gated = torch.nn.functional.softplus(hidden)
        x = x + self.down(gated)
        return x, hidden.argmax(-1), SimpleNamespace(keys=[hidden], device=x.device)


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> Any:
        kept = []
        for block in self.blocks:
            x, chosen, cache = block(x)
            kept += [chosen, cache]
        return x, kept


@pytest.fixture
def broken() -> Iterator[Callable[[str, Callable[..., Any]], None]]:
    """Put another function in the place of a lowering."""
    undo: list[tuple[registry.Lowering, Any]] = []

    def put(name: str, change: Callable[..., Any]) -> None:
        entry = registry.find(name)
        assert entry is not None
        undo.append((entry, entry.function))
        right = entry.function
        object.__setattr__(entry, "function", lambda *args, **kwargs: change(right(*args, **kwargs)))

    yield put
    for entry, function in undo:
        object.__setattr__(entry, "function", function)


def test_healthy() -> None:
    parity = compare(Of(Two, Block.width), kind="train", seq=5)
    assert parity.ok
    text = parity.text()
    assert "float32: rounding explains every difference" in text
    assert "bfloat16: rounding explains every difference" in text
    assert "blocks.1.down Linear" in text and "gradient" in text
    data = json.loads(json.dumps(parity.to_json()))
    first, second = data["runs"]
    assert (first["reference"], second["reference"]) == ("float64 on the CPU", "float32 on the CPU")
    assert [row["name"] for row in first["modules"]][-1] == "(model)" and len(first["modules"]) == 9
    # bfloat16 has errors to find, and the CPU's are as large
    row = second["modules"][-1]
    assert 1e-4 < row["device"]["relative"] < 4 * row["cpu"]["relative"]
    assert len(first["gradients"]) == 12


@pytest.mark.parametrize("name", ["qwen3-0.6b", "mixtral-8x7b"])
def test_healthy_models(name: str) -> None:
    """Caches and model outputs, experts that PyTorch CPU has no float64 form of."""
    parity = compare(zoo.resolve(name), kind="decode", batch=1, seq=8, dtypes=(F32,))
    assert parity.ok, parity.text()
    assert not parity.runs[0].notes


def test_a_wrong_lowering_is_named(broken: Any) -> None:
    class Faulty(Block):
        width = 29

    class Pair(Two):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.blocks = torch.nn.ModuleList([Faulty(), Faulty()])

    broken("softplus.default", lambda y: y * 1.0001)
    parity = compare(Of(Pair, Faulty.width), kind="infer", seq=5, dtypes=(F32,))
    (run,) = parity.runs
    culprit = run.culprit
    assert not parity.ok and culprit is not None
    # softplus is called by the block itself: its child `down`, whose inputs are wrong, is not to blame
    assert (culprit.module, culprit.kind) == ("blocks.0", "Faulty")
    assert culprit.operator.startswith("aten.softplus.default float32[2, 5, 58]")
    assert "test_parity.py" in culprit.line and culprit.line.endswith("in forward")
    statuses = {row.name: row.status for row in run.modules}
    assert statuses["blocks.0.up"] == "ok" and statuses["blocks.0.down"] == "inherits"
    assert statuses["blocks.0"] == "wrong" and statuses["blocks.1.up"] == "after"
    down = next(row for row in run.modules if row.name == "blocks.0.down")
    assert 0.1 < down.growth < 10 and down.inputs.relative > 1e-5
    assert "WRONG: the error first grows beyond rounding in blocks.0 (Faulty)" in parity.text()


def test_wrong_attention_is_named(broken: Any) -> None:
    """PyTorch CPU and the device have an operator each for it."""

    class Attention(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:, None]
            return torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attention = torch.nn.Linear(37, 37), Attention()

        def forward(self, x: torch.Tensor) -> Any:
            return (self.attention(self.first(x)),)

    source = Of(Model, 37)
    assert compare(source, kind="train", seq=6, dtypes=(F32,)).ok
    broken(
        "_scaled_dot_product_fused_attention_overrideable.default",
        lambda results: (results[0] * 1.001, *results[1:]),
    )
    culprit = compare(source, kind="infer", seq=7, dtypes=(F32,)).runs[0].culprit
    assert culprit is not None and culprit.module == "attention"
    assert culprit.operator.startswith("aten._scaled_dot_product_flash_attention_for_cpu.default float32[2, 1, 7, 37]")


def test_an_integer_result_that_is_wrong(broken: Any) -> None:
    class Chooses(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * 2, (x > 0).int().cumsum(-1)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.same, self.chooses = torch.nn.Linear(31, 31), Chooses()

        def forward(self, x: torch.Tensor) -> Any:
            return self.chooses(self.same(x))

    broken("cumsum.default", lambda y: y.at[..., -1].add(1))
    culprit = compare(Of(Model, 31), kind="infer", seq=3, dtypes=(F32,)).runs[0].culprit
    assert culprit is not None and culprit.module == "chooses" and culprit.operator.startswith("aten.cumsum.default")


def test_nan_on_the_device_alone(broken: Any) -> None:
    class Log(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log1p(x.abs() - 1)  # -inf and NaN on the CPU are right

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log, self.out = Log(), torch.nn.Linear(33, 33)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.out(self.log(x)),)

    source = Of(Model, 33)
    assert compare(source, kind="infer", seq=3, dtypes=(F32,)).ok
    broken("log1p.default", lambda y: jnp.where(y < -1, jnp.nan, y))
    parity = compare(source, kind="infer", seq=4, dtypes=(F32,))
    culprit = parity.runs[0].culprit
    assert culprit is not None and culprit.module == "log" and "log1p" in culprit.operator
    assert "NaN or infinity differs at" in culprit.explanation
    json.dumps(parity.to_json(), allow_nan=False)


def test_a_module_that_rounds_on_the_device() -> None:
    """Its operators are right; that there are others is seen where the runs differ."""

    class Rounds(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(35, 35)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.device.type == "tpu":
                x = x.to(torch.bfloat16).to(x.dtype)
            return self.inner(x).tanh()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.rounds = torch.nn.Linear(35, 35), Rounds()

        def forward(self, x: torch.Tensor) -> Any:
            return (self.rounds(self.first(x)),)

    culprit = compare(Of(Model, 35), kind="infer", seq=3, dtypes=(F32,)).runs[0].culprit
    assert culprit is not None and culprit.module == "rounds"
    assert culprit.operator.startswith("aten._to_copy.default") and "-> bfloat16" in culprit.explanation
    assert "runs others there" in culprit.explanation and "test_parity.py" in culprit.line


def test_a_wrong_backward_is_named(broken: Any) -> None:
    class Curve(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.hardswish(x)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.curve, self.last = torch.nn.Linear(41, 41), Curve(), torch.nn.Linear(41, 41)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.last(self.curve(self.first(x))),)

    broken("hardswish_backward.default", lambda y: y * 1.01)
    parity = compare(Of(Model, 41), kind="train", seq=3, dtypes=(F32,))
    (run,) = parity.runs
    assert all(row.status == "ok" for row in run.modules) and run.loss is not None and run.loss.ok
    assert {row.name for row in run.gradients if not row.ok} == {"first.weight", "first.bias"}
    culprit = run.culprit
    assert culprit is not None and culprit.backward and culprit.module == "curve"
    assert culprit.operator.startswith("aten.hardswish_backward.default")
    assert "test_parity.py" in culprit.line and "backward: HardswishBackward0" in culprit.line
    assert "the backward of curve (Curve)" in parity.text()


def test_a_wrong_backward_in_bfloat16(broken: Any) -> None:
    """Of a module whose inputs are integers: nothing but its output and gradient tells its dtype."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.last = torch.nn.Embedding(2, 39), torch.nn.Linear(39, 39)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.last(self.table((x > 0).long())),)

    source = Of(Model, 13)
    assert compare(source, kind="train", seq=3).ok
    broken("embedding_dense_backward.default", lambda y: y * 1.5)
    for run in compare(source, kind="train", seq=5).runs:
        assert run.culprit is not None and run.culprit.module == "table" and run.culprit.backward
        assert run.culprit.operator.startswith("aten.embedding_dense_backward.default")


def test_a_wrong_loss_is_named(broken: Any) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(47, 47)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.first(x),)

    broken("mean.default", lambda y: y * 1.01)
    (run,) = compare(Of(Model, 47), kind="train", seq=3, dtypes=(F32,)).runs
    assert run.culprit is not None and run.culprit.module == "the loss"
    assert run.culprit.explanation == "the model's outputs are right, and the loss is not"


def test_rounding_that_is_magnified_is_no_fault() -> None:
    """A choice between near equals differs by device, and each operator is right."""

    class Chaos(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = torch.nn.Linear(51, 51), torch.nn.Linear(51, 51)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.first(x) * 1e7  # an error of rounding is now a whole turn
            return (self.last(x - x.round()),)

    parity = compare(Of(Chaos, 51), kind="train", seq=3, dtypes=(F32,))
    assert parity.ok, parity.text()


def test_random_numbers_cannot_be_compared() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(43, 43)

        def forward(self, x: torch.Tensor) -> Any:
            return (self.first(x) + torch.rand_like(x),)

    culprit = compare(Of(Model, 43), kind="infer", seq=3, dtypes=(F32,)).runs[0].culprit
    assert culprit is not None and "draws random numbers" in culprit.explanation
    assert culprit.operator.startswith("aten.rand_like")


def test_what_the_device_raises() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.device.type == "tpu":
                raise RuntimeError("not on this device\nmore")
            return x

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = torch.nn.Linear(3, 3), Inner()

        def forward(self, x: torch.Tensor) -> Any:
            return (self.inner(self.first(x)),)

    culprit = compare(Of(Model, 3), kind="infer", seq=3, dtypes=(F32,)).runs[0].culprit
    assert culprit is not None and culprit.module == "inner"
    assert culprit.explanation == "it raises RuntimeError on the device: not on this device"
    assert "test_parity.py" in culprit.line


def test_a_model_without_a_wider_dtype() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(5, 5)

        def forward(self, x: torch.Tensor) -> Any:
            if x.dtype == torch.float64:
                raise NotImplementedError("no double")
            return (self.first(x),)

    parity = compare(Of(Model, 5), kind="train", seq=3, dtypes=(F32,))
    assert parity.ok and "PyTorch CPU, which cannot run it in float64" in parity.text()
    assert parity.runs[0].notes == ["in float64 the CPU says: no double"]


def test_unknown_dtype() -> None:
    with pytest.raises(ValueError, match=r"compares float32, bfloat16 and float16: got torch\.int32"):
        compare(Of(Two, Block.width), dtypes=(torch.int32,))


def test_measures() -> None:
    one = torch.tensor([3.0, 4.0])
    assert measure.measure(one, one) == measure.NONE
    error = measure.measure(torch.tensor([3.0, 4.5]), one)
    assert error.absolute == 0.5 and error.relative == pytest.approx(0.1)
    assert measure.measure(torch.tensor([1, 2, 3, 5]), torch.tensor([1, 2, 3, 4])).relative == 0.25
    assert measure.measure(torch.tensor([True]), torch.tensor([False])).relative == 1
    lowest = torch.tensor([torch.finfo(F32).min, 1.0])
    assert measure.measure(lowest, torch.tensor([torch.finfo(torch.float64).min, 1.0], dtype=torch.float64)).note == ""
    assert "1 of 2" in measure.measure(torch.tensor([torch.nan, 4.0]), one).note
    assert "shape [2], not [3]" in measure.measure(one, torch.ones(3)).note
    zeros = torch.zeros(2)
    assert measure.measure(one, zeros).relative == float("inf")
    assert measure.measure(one, zeros, scale=1.0).relative == pytest.approx(5 / 2**0.5)
    assert measure.compare_all([one], []).note == "1 tensors, not 0"


def test_structure_is_copied() -> None:
    shared = torch.ones(2)
    cache = SimpleNamespace(layers=[SimpleNamespace(keys=shared, device=torch.device("cpu"))], name="cache")
    value = {"a": (shared, 3), "cache": cache, "dtype": BF16}
    made = convert(value, lambda x: x + 1, {torch.device("cpu"): torch.device("meta"), BF16: F32})
    assert made["a"][0] is made["cache"].layers[0].keys and made["a"][1] == 3
    assert made["cache"].layers[0].device.type == "meta" and made["dtype"] == F32
    assert shared.sum() == 2 and cache.layers[0].device.type == "cpu"
    assert len(tensors(value)) == 1


@pytest.mark.parametrize(
    "sizes", [((8, 8), (3, 8, 16)), ((3, 16, 8), (8, 8)), ((8, 8), (8, 8)), ((3, 2, 8), (3, 8, 16))]
)
def test_grouped_products_as_pytorch_has_them(sizes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    a, b = (torch.randn(size).to(BF16) for size in sizes)
    offs = None if len(sizes[0]) == len(sizes[1]) == 3 else torch.tensor([2, 4, 8], dtype=torch.int32)
    expected = torch.nn.functional.grouped_mm(a, b, offs=offs)
    torch.testing.assert_close(grouped_product(a.double(), b.double(), offs).to(BF16), expected)
