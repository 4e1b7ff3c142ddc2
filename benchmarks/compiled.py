"""``python -m benchmarks.compiled``: torch.compile and text generation against fused eager mode and hand-written JAX.

Prints tables of ratios and writes ``compiled.json`` and ``compiled.md``; like ``benchmarks.eager`` otherwise.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
os.environ.setdefault("TORCHTPU_CACHE_LIMIT", "0")

import torch

import torchtpu  # noqa: F401
from benchmarks import jax_llama
from benchmarks.measure import Measure, interleave
from benchmarks.report import Section, measure_sections

__all__ = ["main", "measure_calls", "measure_decoding", "measure_llama"]

PROMPT, NEW = 16, 64


def measure_decoding(rounds: int = 5) -> list[Measure]:
    """``generate()`` of tokens with a static cache, whose step Transformers compiles, and with the default cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks import jax_decode

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**jax_llama.SIZES, pad_token_id=0)).eval().to("tpu")
    model.generation_config.eos_token_id = None
    found = []
    for batch in (1, jax_llama.BATCH):
        theirs = jax_decode.generator(batch, PROMPT, NEW)
        ids = torch.randint(4, jax_llama.VOCAB, (batch, PROMPT)).to("tpu")
        mask = torch.ones_like(ids)

        def ours(cache: str, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> torch.Tensor:
            return model.generate(
                ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, cache_implementation=cache
            ).cpu()

        for cache in ("static", "dynamic"):
            ours(cache), ours(cache)
            before = torch.tpu.compile_stats()["compiles"]
            name = f"Llama 4 x 256, batch {batch}, {NEW} tokens, {cache} cache"
            measure = interleave(
                name,
                lambda cache=cache: ours(cache),
                theirs,
                rounds=rounds,
                goal=1 / 0.9 if cache == "static" else None,
            )
            compiles = torch.tpu.compile_stats()["compiles"] - before
            rate, other = (batch * NEW / t * 1e3 for t in (measure.ours, measure.theirs))
            measure.note = f"{rate:.0f} tokens/s against {other:.0f}; {compiles} compiles"
            found.append(measure)
            print(f"{name}: {measure.ratio:.2f}, {measure.note}", file=sys.stderr, flush=True)
    return found


def measure_calls(rounds: int = 99) -> list[Measure]:
    """A compiled module of 200 small parameters, against a call of the same program by ``jax.jit`` with 201 arrays."""
    import jax
    import jax.numpy as jnp

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.full((4,), 0.01 * i)) for i in range(200)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for w in self.weights:
                x = x + w
            return x

    model = torch.compile(Sum().to("tpu"))
    x = torch.ones(4).to("tpu")
    arrays = [jnp.full((4,), 0.01 * i) for i in range(200)]
    start = jnp.ones(4)

    @jax.jit
    def function(x: jax.Array, weights: list[jax.Array]) -> jax.Array:
        for w in weights:
            x = x + w
        return x

    def ours() -> None:
        with torch.no_grad():
            result = model(x)
            torch.tpu.synchronize()
        del result  # what nothing refers to is not computed

    measure = interleave(
        "forward of 200 parameters, waited for",
        ours,
        lambda: function(start, arrays).block_until_ready(),
        rounds=rounds,
        calls=5,
        unit="us",
    )
    measure.note = f"{measure.ours - measure.theirs:+.0f} us a call (goal: at most 150 us more)"
    return [measure]


def measure_llama(rounds: int = 7) -> list[Measure]:
    """Forward pass and training step, compiled, against the same in fused eager mode and by hand in JAX."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**jax_llama.SIZES, use_cache=False))
    ids = torch.randint(0, jax_llama.VOCAB, (jax_llama.BATCH, jax_llama.SEQ)).to("tpu")
    found = []
    compiled, eager = _side(copy.deepcopy(model), ids, True), _side(model, ids, False)
    for other, theirs in (("fused eager mode", eager), ("hand-written JAX", jax_llama.forward_and_step())):
        for what, a, b in zip(("forward", "training step"), compiled, theirs, strict=True):
            a(), b(), a(), b()
            name = f"Llama 4 x 256, 2048 tokens, {what}, against {other}"
            found.append(interleave(name, a, b, rounds=rounds, goal=1.0))
            print(f"{name}: {found[-1].ratio:.2f}", file=sys.stderr, flush=True)
    return found


def _side(model: Any, ids: torch.Tensor, compiled: bool) -> tuple[Callable[[], object], Callable[[], object]]:
    model = model.to("tpu")
    call = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def forward() -> float:
        with torch.no_grad():
            return call(input_ids=ids, labels=ids).loss.item()

    def step() -> float:
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.tpu.synchronize()  # the update goes on when the loss is there, in the time of the other side
        return loss.item()

    return forward, step


def afresh(measure: Callable[[], list[Measure]]) -> Callable[[], list[Measure]]:
    """A section without what Dynamo learnt from the others: what differed there it would take for changing sizes."""

    def run() -> list[Measure]:
        torch.compiler.reset()
        return measure()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=(__doc__ or "").splitlines()[0])
    names = ("decoding", "calls", "llama")
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="sections to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to be quoted")
    parser.add_argument("--output", type=Path, help="folder for the files; nothing is written without it")
    options = parser.parse_args()
    quick = options.quick
    sections: dict[str, Section] = {
        "decoding": (
            "Text generation",
            ("`generate()`", "hand-written JAX"),
            lambda: measure_decoding(1 if quick else 5),
        ),
        "calls": ("Calling a compiled module", ("tpu", "`jax.jit`"), lambda: measure_calls(2 if quick else 99)),
        "llama": ("A larger model", ("compiled", "the other"), lambda: measure_llama(1 if quick else 5)),
    }
    chosen = {
        name: (title, sides, afresh(run)) for name, (title, sides, run) in sections.items() if name in options.only
    }
    measure_sections("compiled", "Compiled benchmarks", chosen, options.output)


if __name__ == "__main__":
    main()
