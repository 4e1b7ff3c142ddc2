"""The zoo: parameter counts against published ones, and small variants that run with their example inputs."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import pytest
import torch

from torchtpu import zoo

MIXTURES = ("deepseek-v3", "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b")
NO_DECODE = ("bert-base", "vit-b16", "vit-l16", "flux")
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "flux" and importlib.util.find_spec("diffusers") is None, reason="diffusers is not installed"
        ),
    )
    for name in zoo.names()
]
STATED = {
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_419_200,
    "mixtral-8x7b": 46_702_792_704,
    "vit-b16": 86_567_656,
    "whisper-large-v3": 1_543_490_560,
}


def tensors(value: Any) -> list[torch.Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_published(name: str) -> None:
    source = zoo.resolve(name)
    model = source.build("meta", torch.bfloat16)
    assert all(x.is_meta for x in [*model.parameters(), *model.buffers()])
    published = source.published
    assert published is not None and published.source
    count = zoo.count_parameters(model) + published.as_buffers
    if published.exact:
        assert count == source.published_parameters
    else:
        assert abs(count - published.parameters) < 0.01 * published.parameters
    if name in STATED:
        assert count == STATED[name]
    assert {"bert-base": 109_514_298, "gpt2": 124_439_808, "qwen3-0.6b": 596_049_920}.get(name, count) == count


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_tiny_runs(name: str, kind: str) -> None:
    whole = zoo.resolve(name)
    source = whole.tiny()
    model = source.build("cpu", torch.float32, seed=1).eval()
    assert zoo.count_parameters(model) < 1_000_000
    assert source.layers(model) == whole.layers(whole.build("meta"))
    if name in NO_DECODE and kind == "decode":
        with pytest.raises(zoo.ModelError, match=r"has no decode: .* generates no tokens"):
            source.example_inputs(kind, 2, 16)
        return
    inputs = source.example_inputs(kind, 2, 16)
    again = source.example_inputs(kind, 2, 16)
    assert all(torch.equal(x, y) for x, y in zip(tensors(inputs), tensors(again), strict=True))
    outputs = model(**inputs)
    if kind == "train":
        source.loss(outputs).backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    else:
        first = outputs[0]
        assert first.isfinite().all() and first.shape[0] == 2
    units = source.units(kind, 2, 16)
    expected = 2 if units.name == "images" or kind == "decode" else 32
    assert units.count == expected


@pytest.mark.parametrize("kind", zoo.KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_forward_without_values(name: str, kind: str) -> None:
    if name in NO_DECODE and kind == "decode":
        return
    source = zoo.resolve(name).tiny()
    inputs = source.example_inputs(kind, 1, 16, "meta", torch.bfloat16)
    outputs = source.build("meta", torch.bfloat16).eval()(**inputs)
    assert outputs[0].is_meta


def test_structure_is_kept() -> None:
    """Gemma 3's local and global layers, DeepSeek's dense and sparse ones, Llama's grouped heads."""
    gemma = zoo.resolve("gemma3-27b").tiny()
    assert set(gemma.config.layer_types) == {"sliding_attention", "full_attention"}
    deepseek = zoo.resolve("deepseek-v3").tiny().build("meta")
    assert [type(layer.mlp).__name__ for layer in deepseek.model.layers] == ["DeepseekV3MLP", "DeepseekV3MoE"]
    llama = zoo.resolve("llama3-8b").tiny().config
    assert llama.num_key_value_heads < llama.num_attention_heads


def test_seed_decides_the_weights() -> None:
    source = zoo.resolve("llama-3.2-1b").tiny()
    before = torch.random.get_rng_state()
    one, same, other = (source.build("cpu", torch.float32, seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.get_default_dtype() == torch.float32
    assert torch.equal(one.lm_head.weight, same.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)


def test_decode_continues_a_full_cache() -> None:
    """The cache has room for one token, and what it holds decides the next."""
    source = zoo.resolve("llama3-8b").tiny()
    model = source.build("cpu", torch.float32).eval()
    inputs = source.example_inputs("decode", 2, 16)
    cache = inputs["cache"]
    assert cache.layers[0].keys.shape == (2, 2, 16, 16)
    assert int(cache.get_seq_length()) == 15
    with torch.no_grad():
        first = model(**inputs).logits
        assert int(cache.get_seq_length()) == 16
        changed = source.example_inputs("decode", 2, 16)
        changed["cache"].layers[0].values.zero_()
        assert not torch.allclose(first, model(**changed).logits)


def test_too_many_tokens() -> None:
    with pytest.raises(zoo.ModelError, match="gpt2 takes at most 1024 tokens: got 4096"):
        zoo.resolve("gpt2").example_inputs("train", 1, 4096, "meta")


def test_unknown_kind() -> None:
    with pytest.raises(ValueError, match="one of train, infer, decode: got 'prefill'"):
        zoo.resolve("gpt2").example_inputs("prefill", 1, 16)


def test_diffusers_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(zoo.ModelError, match=r"flux is a model of Diffusers, .*: pip install diffusers"):
        zoo.resolve("flux")
