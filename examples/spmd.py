"""Many devices and one program: a Llama divided over eight devices trains as it does on one.

    python examples/spmd.py --plan fsdp=4,tp=2

or over the devices of two hosts, with one process on each (here both on this machine):

    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 127.0.0.1 examples/spmd.py
    torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr 127.0.0.1 examples/spmd.py

On a machine without TPUs, TORCHTPU_CPU_DEVICES makes XLA:CPU pretend to be several. It is read when the device starts.
"""

import argparse
import os

os.environ.setdefault("TORCHTPU_CPU_DEVICES", str(8 // int(os.environ.get("WORLD_SIZE", "1"))))

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchtpu import spmd

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def build() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def train(model: LlamaForCausalLM, steps: int) -> list[float]:
    """Losses of a few steps; nothing here knows how many devices there are."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(TEXT.encode()))
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        begin = torch.randint(len(text) - 32, (8,), generator=generator).tolist()
        batch = torch.stack([text[b : b + 32] for b in begin]).to("tpu")
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="fsdp=4,tp=2")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    model = spmd.shard(build(), options.plan)
    if os.environ.get("RANK", "0") == "0":
        print(spmd.describe(model))
    divided, one = train(model, options.steps), train(build().to("tpu"), options.steps)
    count = torch.tpu.device_count() * int(os.environ.get("WORLD_SIZE", "1"))
    for step, (a, b) in enumerate(zip(divided, one, strict=True)):
        print(f"step {step}  loss on {count} devices {a:.6f}  on one {b:.6f}")
    torch.testing.assert_close(divided, one, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
