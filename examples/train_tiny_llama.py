"""Train a small Llama from Hugging Face Transformers on the bytes of a text, then let it write.

    python examples/train_tiny_llama.py --steps 60

The only line that mentions the device is the default of ``--device``: "cuda" or "cpu" work the same.
"""

import argparse
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

TEXT = "the quick brown fox jumps over the lazy dog. " * 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="tpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

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
    model = LlamaForCausalLM(config).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    text = torch.tensor(list(TEXT.encode()))

    start = time.perf_counter()
    for step in range(options.steps):
        begin = torch.randint(len(text) - 64, (8,)).tolist()
        batch = torch.stack([text[b : b + 64] for b in begin]).to(options.device)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:3}  loss {loss.item():.3f}  {time.perf_counter() - start:5.1f} s", flush=True)

    # The text grows inside a buffer of one size, because every new shape compiles new programs. Attention is causal,
    # so what follows the text does not matter.
    prompt = b"the quick"
    written = torch.zeros(1, 64, dtype=torch.long)
    written[0, : len(prompt)] = torch.tensor(list(prompt))
    written = written.to(options.device)
    with torch.no_grad():
        for end in range(len(prompt), written.shape[1]):
            written[:, end] = model(written).logits[:, end - 1].argmax(-1)
    print(bytes(written[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
