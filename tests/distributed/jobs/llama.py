"""FSDP2 training of a small Llama: the losses of one process that sees all the data."""

import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
STEPS = int(os.environ.get("STEPS", "20"))


def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def batch(step):
    return torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(step))


def train(m, rows, device):
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        ids = batch(step)[rows].to(device)
        loss = m(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def check_twenty_steps():
    n, r = dist.get_world_size(), dist.get_rank()
    m = model().to(DEVICE)
    for layer in m.model.layers:
        fully_shard(layer)
    fully_shard(m)
    losses = train(m, slice(8 // n * r, 8 // n * (r + 1)), DEVICE)
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    expected = train(model(), slice(None), "cpu")
    assert len(expected) == STEPS and expected[-1] != expected[0]
    torch.testing.assert_close(losses.cpu(), expected, rtol=0, atol=1e-5)


def check_nothing_ran_on_the_cpu():
    assert torch.tpu.fallback_count() == 0, torch.tpu.fallbacks()
