"""Transformers' generate() on the device: greedy gives the CPU's tokens, sampling follows the seed."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

import torchtpu  # noqa: F401
from zoo import build, ids


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


def _compiled_at(tpu, prompt: torch.Tensor, **choices) -> tuple[torch.Tensor, list[int]]:
    """The tokens, and how many programs were compiled before each of them."""
    counts = [torch.tpu.compile_stats()["compiles"]]

    def count(ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        counts.append(torch.tpu.compile_stats()["compiles"])
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)

    found = tpu.generate(prompt.to("tpu"), do_sample=False, stopping_criteria=[count], **choices).cpu()
    return found, [b - a for a, b in itertools.pairwise(counts)]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_prompts_of_any_length_reuse_programs(pair, cache):
    """With both caches tokens, masks and keys are longer at every step; the batch is padded on the left."""
    cpu, tpu = pair
    compiled: list[int] = []
    for length in (17, 18, 21):
        torch.manual_seed(length)
        prompt = ids(2, length)
        mask = torch.ones_like(prompt)
        prompt[0, :3] = mask[0, :3] = 0
        choices = {"max_new_tokens": 29 - length, "cache_implementation": cache}
        expected = cpu.generate(prompt, attention_mask=mask, do_sample=False, **choices)
        actual, compiled = _compiled_at(tpu, prompt, attention_mask=mask.to("tpu"), **choices)
        assert torch.equal(actual, expected)
    assert sum(compiled[3:]) == 0, compiled
    assert torch.tpu.fallback_count() == 0


def test_assisted_decoding_gives_the_tokens_of_the_cpu(pair):
    cpu, tpu = pair
    torch.manual_seed(3)
    assistant, _ = build("llama")
    assistant = assistant.eval()
    assistant.generation_config.pad_token_id = 0
    prompt = ids(1, 6)
    expected = cpu.generate(prompt, max_new_tokens=5, do_sample=False, assistant_model=assistant)
    twin = copy.deepcopy(assistant).to("tpu")
    actual = tpu.generate(prompt.to("tpu"), max_new_tokens=5, do_sample=False, assistant_model=twin)
    assert torch.equal(actual.cpu(), expected)


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
