"""A small model, divided or not, and its training: what the tests of one process and of several have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtpu import _C


class Block(nn.Module):
    """A model with what plans know by name: projections up and down, and an embedding that is shared."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 4 * width)
        self.down_proj = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.lm_head = nn.Linear(width, 32, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        self.register_buffer("scale", torch.full((width,), 2.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed_tokens(tokens)
        x = x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x) * self.scale)))
        return self.lm_head(self.dropout(x))


def build(**options: float) -> Block:
    torch.manual_seed(0)
    return Block(**options)


def tokens_of(steps: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(32, (4, 6), generator=generator) for _ in range(steps)]


def train(model: nn.Module, steps: int = 3, place: Any = None, run: Any = None) -> tuple[list[float], Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in tokens_of(steps):
        tokens = batch.to("tpu") if place is None else place(batch)
        loss = nn.functional.cross_entropy((model if run is None else run)(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def value_of(t: torch.Tensor) -> Any:
    torch.tpu.synchronize()
    return _C.get_value(t)[0]
