"""Loops in a model's graph: which layers are equal, what they hand on, share and have each for themselves."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from torchtpu.aot.blocks import Loop, find_loops
from torchtpu.aot.graph import Graph, capture
from torchtpu.integrations import experts

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "head_dim": 8,
}


def graph_of(kind: str, config: Any, **more: torch.Tensor) -> Graph:
    with torch.device("meta"):
        model = getattr(transformers, kind)(config).eval()
    experts.use(model)
    ids = torch.empty(1, 16, dtype=torch.int64, device="meta")
    return capture(model, {"use_cache": False, **(more or {"input_ids": ids})})


def summary(loops: list[Loop]) -> list[tuple[str, int, int, int]]:
    return [(loop.name, loop.first, loop.period, loop.length) for loop in loops]


def varying(graph: Graph, loop: Loop) -> set[str]:
    """Names in the first block of the arguments that each block has its own of."""
    names = {i.node: i.name for i in graph.inputs}
    return {names[loop.reads[0][p]] for p in loop.varying if loop.reads[0][p] in names}


def test_llama() -> None:
    graph = graph_of("LlamaForCausalLM", transformers.LlamaConfig(**SMALL, num_hidden_layers=4))
    (loop,) = find_loops(graph)
    assert summary([loop]) == [("model.layers", 0, 1, 4)]
    assert len(loop.carried) == 1 and len(loop.shared) == 2, "hidden states; sines and cosines"
    assert len(varying(graph, loop)) == 9 and "model.layers.0.mlp.up_proj.weight" in varying(graph, loop)
    assert loop.label("model.layers.2.mlp.up_proj") == "model.layers.0-3.mlp.up_proj"
    assert loop.label("model.layers.0") == "model.layers.0-3"
    assert loop.label("model.norm") == "model.norm" and loop.label("model.layers_2.0.x") == "model.layers_2.0.x"


def test_deepseek_begins_with_dense_layers() -> None:
    config = transformers.DeepseekV3Config(
        **{k: v for k, v in SMALL.items() if k not in ("head_dim", "num_key_value_heads")},
        num_key_value_heads=4,
        num_hidden_layers=5,
        first_k_dense_replace=2,
        moe_intermediate_size=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    )
    dense, mixtures = find_loops(graph_of("DeepseekV3ForCausalLM", config))
    assert summary([dense, mixtures]) == [("model.layers", 0, 1, 2), ("model.layers", 2, 1, 3)]
    assert mixtures.label("model.layers.3.mlp.experts") == "model.layers.2-4.mlp.experts"


def test_gemma_has_a_period() -> None:
    """Windows of attention in all but every third layer: three layers are a block."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3TextConfig(**SMALL, num_hidden_layers=6, layer_types=kinds, sliding_window=4)
    (loop,) = find_loops(graph_of("Gemma3ForCausalLM", config))
    assert summary([loop]) == [("model.layers", 0, 3, 2)]
    assert loop.label("model.layers.4.mlp") == loop.label("model.layers.1.mlp") == "model.layers.1-4:3.mlp"


def test_encoder_and_decoder() -> None:
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=3, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=64, max_source_positions=8, num_mel_bins=8,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
    )  # fmt: skip
    sound = torch.empty(1, 8, 16, device="meta")
    ids = torch.empty(1, 4, dtype=torch.int64, device="meta")
    graph = graph_of("WhisperForConditionalGeneration", config, input_features=sound, decoder_input_ids=ids)
    encoder, decoder = find_loops(graph)
    assert summary([encoder, decoder]) == [("model.encoder.layers", 0, 1, 2), ("model.decoder.layers", 0, 1, 3)]
    assert len(encoder.shared) == 0 and len(decoder.shared) == 1, "the decoder's layers all read the encoder's result"


class Block(torch.nn.Module):
    def __init__(self, width: int = 8, scale: float = 1.0) -> None:
        super().__init__()
        self.linear, self.scale = torch.nn.Linear(width, width), scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu() * self.scale


def loops_of(model: torch.nn.Module) -> list[tuple[str, int, int, int]]:
    return summary(find_loops(capture(model.to("meta"), {"x": torch.empty(2, 8, device="meta")})))


class Holds(torch.nn.Module):
    """A list of blocks, whose results may be used later too."""

    def __init__(self, *blocks: torch.nn.Module, sums: bool = False) -> None:
        super().__init__()
        self.blocks, self.sums = torch.nn.Sequential(*blocks), sums

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.sums:
            return self.blocks(x)
        kept = [x]
        for block in self.blocks:
            kept.append(block(sum(kept)))
        return kept[-1]


def test_blocks_of_ones_own() -> None:
    assert loops_of(Holds(*(Block() for _ in range(5)))) == [("blocks", 0, 1, 5)]
    assert loops_of(Holds(*(Block(scale=1.0 + i % 2) for i in range(4)))) == [("blocks", 0, 2, 2)]
    assert loops_of(Holds(torch.nn.Linear(8, 8), Block(), Block())) == [("blocks", 1, 1, 2)]
    assert loops_of(Holds(Holds(Block(), Block()), Holds(Block(), Block()))) == [("blocks", 0, 1, 2)]


def test_what_is_no_loop() -> None:
    assert loops_of(Holds(*(Block(scale=1.0 + i) for i in range(3)))) == [], "another constant in each"
    assert loops_of(Holds(*(Block() for _ in range(3)), sums=True)) == [], "a block reads all before it"
    assert loops_of(Holds(Block(), torch.nn.Tanh())) == []
