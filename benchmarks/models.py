"""Forward passes and training steps of real models against PyTorch CPU."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.measure import Measure, interleave

__all__ = ["MODELS", "measure_gpt2", "measure_minilm", "measure_models", "measure_training"]

Inputs = dict[str, torch.Tensor]


def measure_minilm() -> list[Measure]:
    """The sentence-embedding model of `torchtpu demo`, batch 32, float32."""
    from torchtpu.cli import demo

    model, tokenizer = demo.load_model()
    sentences = (demo.read_sentences(None) * 2)[:32]
    batches = demo.tokenize(tokenizer, sentences, 32)
    ours = copy.deepcopy(model).to("tpu")
    return [
        interleave(
            "MiniLM forward, batch 32",
            lambda: demo.embed(ours, batches),
            lambda: demo.embed(model, batches),
            rounds=9,
            goal=1.5,
        )
    ]


def _tokens(vocabulary: int = 256, batch: int = 4, length: int = 64) -> Inputs:
    ids = torch.randint(3, vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _llama() -> tuple[Any, Inputs]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config), _tokens()


def _qwen3() -> tuple[Any, Inputs]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
    )
    return Qwen3ForCausalLM(config), _tokens()


def _gpt2() -> tuple[Any, Inputs]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=256, n_embd=128, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(config), _tokens()


def _bert() -> tuple[Any, Inputs]:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config), _tokens()


def _qwen3_moe() -> tuple[Any, Inputs]:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return Qwen3MoeForCausalLM(config), _tokens()


def _vit() -> tuple[Any, Inputs]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=32,
        patch_size=8,
        num_labels=10,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config), {"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.arange(8)}


def _resnet() -> tuple[Any, Inputs]:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=10)
    return ResNetForImageClassification(config), {"pixel_values": torch.randn(8, 3, 64, 64), "labels": torch.arange(8)}


def _whisper() -> tuple[Any, Inputs]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=256,
        d_model=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        max_source_positions=50,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.0,
    )
    features = torch.randn(2, 16, 100)
    return WhisperForConditionalGeneration(config), {
        "input_features": features,
        "labels": torch.randint(3, 256, (2, 32)),
    }


MODELS: dict[str, Callable[[], tuple[Any, Inputs]]] = {
    "Llama": _llama,
    "Qwen3": _qwen3,
    "GPT-2": _gpt2,
    "BERT": _bert,
    "Qwen3-MoE": _qwen3_moe,
    "ViT": _vit,
    "ResNet": _resnet,
    "Whisper": _whisper,
}
"""Transformers' models in small configurations, with inputs; weights are random."""


def _side(model: Any, inputs: Inputs, device: str) -> tuple[Callable[[], object], Callable[[], object]]:
    model, inputs = model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward() -> float:
        with torch.no_grad():
            return model(**inputs).loss.item()

    def step() -> float:
        loss = model(**inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return forward, step


def measure_models(names: list[str], rounds: int = 7) -> list[Measure]:
    """Forward and training step (AdamW) of each model, reading the loss at the end of each."""
    found = []
    for name in names:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        ours = _side(copy.deepcopy(model), inputs, "tpu")
        theirs = _side(model, inputs, "cpu")
        for what, a, b in zip(("forward", "training step"), ours, theirs, strict=True):
            start = time.perf_counter()
            a()
            first = time.perf_counter() - start
            measure = interleave(f"{name} {what}", a, b, rounds=rounds)
            measure.note = f"first call {first:.1f} s"
            found.append(measure)
            print(f"{measure.name}: {measure.ratio:.2f}, {measure.note}", file=sys.stderr, flush=True)
    return found


def measure_training(rounds: int = 7) -> list[Measure]:
    """A larger Llama against PyTorch CPU, and against the same written by hand in JAX on the same XLA:CPU."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks import jax_llama

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**jax_llama.SIZES, use_cache=False))
    ids = torch.randint(0, jax_llama.VOCAB, (jax_llama.BATCH, jax_llama.SEQ))
    inputs = {"input_ids": ids, "labels": ids}
    ours = _side(copy.deepcopy(model), inputs, "tpu")
    found = []
    for other, theirs in (
        ("PyTorch CPU", _side(model, inputs, "cpu")),
        ("hand-written JAX", jax_llama.forward_and_step()),
    ):
        for what, a, b in zip(("forward", "training step"), ours, theirs, strict=True):
            a(), b(), a(), b()  # two steps until nothing compiles any more
            found.append(interleave(f"Llama 4 x 256, 2048 tokens, {what}, against {other}", a, b, rounds=rounds))
            print(f"{found[-1].name}: {found[-1].ratio:.2f}", file=sys.stderr, flush=True)

    def strict() -> float:
        with torch.tpu.set_eager_mode("strict"):
            return ours[1]()

    strict(), strict(), ours[1]()
    found.append(
        interleave("Llama 4 x 256, 2048 tokens, training step, against strict mode", ours[1], strict, rounds=3)
    )
    found[-1].goal = 1 / 1.5
    return [*found, _peak_memory(ours[1], jax_llama.step_memory())]


def _peak_memory(step: Callable[[], float], theirs: int) -> Measure:
    """The most memory in use during a training step, against what XLA says of the hand-written one."""
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    step()
    ours = torch.tpu.max_memory_used() / 2**20
    other = theirs / 2**20
    return Measure("peak memory of that step, against hand-written JAX", "MiB", ours, other, ours, other, goal=1.1)


def measure_gpt2(rounds: int = 7) -> list[Measure]:
    """GPT-2 (124 M parameters, random weights), forward of one sequence of 128 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config()).eval()
    ids = torch.randint(0, 50257, (1, 128))
    ours, on_device = copy.deepcopy(model).to("tpu"), ids.to("tpu")

    @torch.no_grad()
    def forward(m: Any, i: torch.Tensor) -> float:
        return m(i).logits[0, -1, 0].item()

    return [
        interleave(
            "GPT-2 124 M forward, 128 tokens",
            lambda: forward(ours, on_device),
            lambda: forward(model, ids),
            rounds=rounds,
            goal=1.15,
        )
    ]
