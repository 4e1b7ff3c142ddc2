"""Transformers' generate() on the device: greedy gives the CPU's tokens, sampling follows the seed."""

from __future__ import annotations

import copy

import pytest
import torch
from zoo import build, ids

import torchtpu  # noqa: F401


@pytest.fixture(scope="module")
def pair():
    model, _ = build("llama")
    model = model.eval()
    model.generation_config.pad_token_id = 0
    return model, copy.deepcopy(model).to("tpu")


def test_greedy_gives_the_tokens_of_the_cpu(pair):
    cpu, tpu = pair
    torch.manual_seed(1)
    prompt = ids(2, 5)
    expected = cpu.generate(prompt, max_new_tokens=6, do_sample=False)
    actual = tpu.generate(prompt.to("tpu"), max_new_tokens=6, do_sample=False)
    assert actual.device.type == "tpu"
    assert torch.equal(actual.cpu(), expected)
    assert torch.tpu.fallback_count() == 0


def test_sampling_is_reproducible(pair):
    _, tpu = pair
    prompt = ids(1, 4).to("tpu")

    def sample(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return (
            tpu.generate(prompt, max_new_tokens=8, do_sample=True, top_k=20, top_p=0.9, temperature=1.3)
            .cpu()
            .tolist()[0]
        )

    assert sample(0) == sample(0)
    assert any(sample(0) != sample(s) for s in (1, 2, 3))


def test_beam_search_gives_the_tokens_of_the_cpu(pair):
    cpu, tpu = pair
    torch.manual_seed(2)
    prompt = ids(2, 4)
    expected = cpu.generate(prompt, max_new_tokens=4, num_beams=3, do_sample=False)
    assert torch.equal(tpu.generate(prompt.to("tpu"), max_new_tokens=4, num_beams=3, do_sample=False).cpu(), expected)


def test_encoder_decoder():
    model, batch = build("whisper")
    model = model.eval()
    twin = copy.deepcopy(model).to("tpu")
    expected = model.generate(batch["input_features"], max_new_tokens=5, do_sample=False)
    actual = twin.generate(batch["input_features"].to("tpu"), max_new_tokens=5, do_sample=False)
    assert torch.equal(actual.cpu(), expected)


def test_static_cache_compiles_with_the_tpu_backend(pair):
    """Transformers compiles static caches on a tpu by itself, with Dynamo's backend "tpu"."""
    from torchtpu.runtime.compiler import statistics

    cpu, tpu = pair
    torch.manual_seed(1)
    prompt = ids(2, 5)
    expected = cpu.generate(prompt, max_new_tokens=6, do_sample=False)
    first = tpu.generate(prompt.to("tpu"), max_new_tokens=6, do_sample=False, cache_implementation="static")
    before = statistics.compiles
    second = tpu.generate(prompt.to("tpu"), max_new_tokens=6, do_sample=False, cache_implementation="static")
    assert torch.equal(first.cpu(), expected) and torch.equal(second.cpu(), expected)
    assert statistics.compiles == before
