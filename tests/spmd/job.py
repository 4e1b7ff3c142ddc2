"""What a process with eight emulated devices finds out; the last line of its output is JSON.

job.py llama|generate|experts PLAN
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import torchtpu  # noqa: F401 - registers the device
from torchtpu import spmd
from torchtpu.runtime import observe

BATCH, LENGTH, STEPS = 8, 16, 3
SIZES = {
    "vocab_size": 320,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(layers: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers))


def mixture() -> torch.nn.Module:
    torch.manual_seed(0)
    routed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **routed, num_hidden_layers=1))


def train(model: torch.nn.Module, batch: int = BATCH) -> tuple[list[float], list[int], list[observe.CompiledProgram]]:
    """Losses, compiles of each step, and the programs."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(1)
    losses, compiles, programs = [], [], []
    nothing = lambda _: None  # noqa: E731
    with observe.observing(programs.append, nothing, nothing):
        for _ in range(STEPS):
            before = len(programs)
            tokens = torch.randint(SIZES["vocab_size"], (BATCH, LENGTH), generator=generator)[:batch].to("tpu")
            loss = model(input_ids=tokens, labels=tokens).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            compiles.append(len(programs) - before)
    return losses, compiles, programs


def peak(program: observe.CompiledProgram) -> int:
    """Bytes on one device while a program runs: arguments, results that take no argument's place, and temporaries."""
    found = program.executable.memory_analysis()
    kept = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return kept + found.temp_size_in_bytes


def most(programs: list[observe.CompiledProgram], products: bool) -> observe.CompiledProgram:
    """The program that needs most memory among those with matrix products, or those without: a step is the one that
    computes gradients, and the optimizer's.
    """
    return max((p for p in programs if any("mm" in o for o in p.about.operators) is products), key=peak)


def whole_at_once(text: str, shapes: set[tuple[int, ...]]) -> int:
    """Of a scheduled program, the most values of a whole parameter's shape that are alive at the same time."""
    entry = text[text.index("\nENTRY") :].splitlines()[1:]
    made: dict[str, int] = {}
    last: dict[str, int] = {}
    for i, line in enumerate(entry):
        found = re.match(r"\s+(?:ROOT )?%([\w.-]+) = \w+\[([\d,]+)\]", line)
        for used in re.findall(r"%([\w.-]+)", line.split("=", 1)[-1]):
            last[used] = i
        if found is not None and tuple(map(int, found[2].split(","))) in shapes and " parameter(" not in line:
            made[found[1]] = i
    return max((sum(a <= i < last.get(n, a) for n, a in made.items()) for i in range(len(entry))), default=0)


def memory(model: torch.nn.Module, programs: list[observe.CompiledProgram], share: int) -> list[dict[str, Any]]:
    """The programs of a step on the mesh against the ideal.

    Activations are those of one device with its part of the batch. Besides its share of parameters and gradients, a
    device holds one layer whole, its parameters and its gradients. The optimizer has parameters, gradients, two moments
    and, as PyTorch's foreach implementation does, the denominators of all parameters at once.
    """
    _, _, alone = train(llama(LAYERS).to("tpu"), BATCH // torch.tpu.device_count())
    whole = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    activations = peak(most(alone, True)) - 2 * whole
    step, update = most(programs, True), most(programs, False)
    return [
        {"name": name, "peak": peak(p), "ideal": ideal}
        for name, p, ideal in (
            ("forward and backward", step, 2 * share + activations + 2 * layer),
            ("optimizer", update, 5 * share),
        )
    ]


LAYERS = 4


def main(what: str, plan: str) -> dict[str, Any]:
    if what == "experts":
        alone, *_ = train(mixture().to("tpu"))
        losses, *_ = train(spmd.shard(mixture(), plan))
        return {"alone": alone, "losses": losses}
    if what == "generate":
        tokens = []
        for model in (llama(1).to("tpu"), spmd.shard(llama(1), plan)):
            prompt = torch.arange(2 * 5).reshape(2, 5).to("tpu")
            mask = torch.ones_like(prompt)
            with torch.no_grad():
                made = model.generate(prompt, attention_mask=mask, max_new_tokens=6, do_sample=False)
            tokens.append(made.tolist())
        return {"alone": tokens[0], "tokens": tokens[1]}
    alone, *_ = train(llama(LAYERS).to("tpu"))
    model = spmd.shard(llama(LAYERS), plan)
    losses, compiles, programs = train(model)
    share = sum(s.nbytes for s in spmd.table(model))
    shapes = {s for p in model.parameters() if p.dim() > 1 for s in (tuple(p.shape), tuple(p.shape[::-1]))}
    return {
        "alone": alone,
        "losses": losses,
        "compiles": compiles,
        "whole": whole_at_once(most(programs, True).executable.as_text(), shapes),
        "programs": memory(model, programs, share) if plan.startswith("fsdp=8") else [],
    }


if __name__ == "__main__":
    with contextlib.redirect_stderr(sys.stdout):
        print(json.dumps(main(*sys.argv[1:])))
