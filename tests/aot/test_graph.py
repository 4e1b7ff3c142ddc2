"""Models as graphs: attention as it was meant, tied weights, source lines, and what cannot be traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from jax.sharding import AbstractMesh, AxisType
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from torchtpu.aot.graph import Graph, GraphError, capture, module_path, source_line
from torchtpu.aot.layout import Layout
from torchtpu.aot.step import build_step
from torchtpu.sharding import parse

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "use_cache": False,
}


def build(kind: Any, config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = kind(config)
    return model.eval()


def llama(**changed: Any) -> torch.nn.Module:
    return build(LlamaForCausalLM, LlamaConfig(**{**SMALL, **changed}))


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.empty(batch, length, dtype=torch.int64, device="meta")


def attentions(graph: Graph) -> list[torch.fx.Node]:
    found = graph.fx.find_nodes(op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default)
    return list(found)


@pytest.mark.parametrize("batch", [1, 3])
def test_llama(batch: int) -> None:
    """The mask is causal and goes; keys are not repeated; operators know their module and their line."""
    ids = tokens(batch, 16)
    graph = capture(llama(), {"input_ids": ids, "labels": ids})
    both = attentions(graph)
    assert len(both) == 2
    for node in both:
        query, key, value, mask, dropout, causal = node.args
        assert (mask, dropout, causal) == (None, 0.0, True)
        assert tuple(query.meta["val"].shape) == (batch, 4, 16, 8)
        assert tuple(key.meta["val"].shape) == tuple(value.meta["val"].shape) == (batch, 2, 16, 8)
        assert node.kwargs["enable_gqa"] is True and "window" not in node.meta
    assert [module_path(n) for n in both] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    line = source_line(both[0])
    assert line is not None
    assert line[0] == "transformers/models/llama/modeling_llama.py" and "attention_interface(" in line[2]
    kinds = {i.name: i.kind for i in graph.inputs}
    assert kinds["input_ids"] == kinds["labels"] == "input"
    assert kinds["model.layers.1.mlp.down_proj.weight"] == "parameter"
    assert all(i.trained == (i.kind == "parameter") for i in graph.inputs)
    assert graph.output("loss") is not None and graph.output("logits") is not None and graph.output("other") is None
    assert graph.blocks == ["model.layers"]
    assert not [n for n in graph.fx.nodes if "_assert" in str(n.target)]


def test_tied_weights_are_one_input() -> None:
    names = lambda tied: [  # noqa: E731
        i.name
        for i in capture(llama(tie_word_embeddings=tied, num_hidden_layers=1), {"input_ids": tokens(1, 8)}).inputs
        if i.shape == (64, 32)
    ]
    assert len(names(True)) == 1
    assert names(False) == ["model.embed_tokens.weight", "lm_head.weight"]


def test_sliding_window() -> None:
    """The mask stays, for where there is no kernel, and the operator knows the width."""
    model = build(MistralForCausalLM, MistralConfig(**{**SMALL, "num_hidden_layers": 1}, sliding_window=5))
    for node in attentions(capture(model, {"input_ids": tokens(2, 16)})):
        assert node.meta["window"] == 5 and node.args[3] is not None and node.args[5] is False
    short = attentions(capture(model, {"input_ids": tokens(2, 4)}))  # the window takes in everything
    assert all(n.args[3] is None and n.args[5] is True for n in short)


def test_a_padding_mask_is_kept() -> None:
    """What is masked depends on an input."""
    given = {"input_ids": tokens(2, 16), "attention_mask": tokens(2, 16)}
    graph = capture(llama(), given)
    assert "attention_mask" in {i.name for i in graph.inputs}
    for node in attentions(graph):
        assert isinstance(node.args[3], torch.fx.Node) and node.args[5] is False and "window" not in node.meta


class Masked(torch.nn.Module):
    """Attention under a mask that it makes itself."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=self.make(x))


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = torch.arange(x.shape[2], device=x.device)
    return at[:, None], at[None, :]


def _prefix(x: torch.Tensor) -> torch.Tensor:
    row, column = _rows(x)
    return ((row >= column) | (column < 3))[None, None]


def _both_sides(x: torch.Tensor) -> torch.Tensor:
    row, column = _rows(x)
    return ((row - column).abs() < 3)[None, None]


def _by_sample(x: torch.Tensor) -> torch.Tensor:
    row, column = _rows(x)
    sample = torch.arange(x.shape[0], device=x.device)[:, None, None, None]
    return (row >= column)[None, None] & ((sample == 0) | (row == column)[None, None])


def _all(x: torch.Tensor) -> torch.Tensor:
    row, column = _rows(x)
    return (row + column >= 0)[None, None]


def _causal(x: torch.Tensor) -> torch.Tensor:
    row, column = _rows(x)
    return (row >= column)[None, None].expand(x.shape[0], -1, -1, -1)


@pytest.mark.parametrize(
    ("make", "kind"),
    [(_prefix, "other"), (_both_sides, "other"), (_by_sample, "other"), (_all, "all"), (_causal, "causal")],
)
@pytest.mark.parametrize("batch", [1, 2])
def test_masks(make: Any, kind: str, batch: int) -> None:
    """A mask that is not quite causal, or not in every sample, is left as it is."""
    if make is _by_sample and batch == 1:
        kind = "causal"
    x = torch.empty(batch, 2, 8, 4, device="meta")
    (node,) = attentions(capture(Masked(make), {"x": x}))
    if kind == "other":
        assert isinstance(node.args[3], torch.fx.Node) and node.args[5] is False and "window" not in node.meta
    else:
        assert node.args[3] is None and node.args[5] is (kind == "causal")


class Branches(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:  # depends on values
            return x + 1
        return x


def test_a_branch_on_values_is_refused() -> None:
    """The error names the line of the model."""
    number = next(
        i for i, s in enumerate(Path(__file__).read_text().splitlines(), 1) if s.endswith("# depends on values")
    )
    with pytest.raises(GraphError, match=rf"cannot trace Branches.*must not branch.*test_graph\.py:{number}\)"):
        capture(Branches(), {"x": torch.empty(3, device="meta")})


class Counts(torch.nn.Module):
    """Writes a buffer, and has a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3, device="meta"))
        self.weight = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.seen.add_(x)
        return {"sum": self.seen * self.weight}


def test_a_written_buffer() -> None:
    graph = capture(Counts(), {"x": torch.empty(3, device="meta")})
    assert list(graph.writes) == ["seen"]
    assert {i.name: (i.kind, i.trained) for i in graph.inputs} == {
        "weight": ("parameter", False),
        "seen": ("buffer", False),
        "x": ("input", False),
    }
    assert [path for _, path in graph.outputs] == ["sum"]


class Doubles(torch.autograd.Function):
    """Its gradient is not that of its forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *g: torch.Tensor) -> torch.Tensor:
        return g[0] * 100


class Applies(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        applied: torch.Tensor = Doubles.apply(self.linear(x))
        return applied


def test_a_function_of_ones_own_is_mentioned() -> None:
    """Its forward is in the graph; training says that its backward is not."""
    before = torch.autograd.Function.__dict__["apply"]
    graph = capture(Applies(), {"x": torch.empty(3, 2, device="meta")})
    assert graph.functions == ["Doubles"]
    assert torch.autograd.Function.__dict__["apply"] is before
    mesh = AbstractMesh((1,), ("fsdp",), axis_types=(AxisType.Auto,))
    layout = Layout(parse("fsdp=1"), mesh, "tpu")
    said = "the backward of Doubles is not used: what its forward computes is differentiated"
    assert said in build_step(graph, layout, "train").assumptions
    assert said not in build_step(graph, layout, "infer").assumptions
    assert capture(Masked(_all), {"x": torch.empty(1, 2, 8, 4, device="meta")}).functions == []
