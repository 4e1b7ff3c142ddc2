"""Train a model whose parameters are split over several processes (FSDP2), and check it against one process.

    torchrun --nproc-per-node 2 examples/distributed.py

Each process has one device. Nothing here but its name is particular to the tpu.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS = 5


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def make_batch(step: int, ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8 * ranks, 16, generator=generator), torch.randn(8 * ranks, 4, generator=generator)


def train_alone(ranks: int) -> float:
    """The last loss of one process that sees every row."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = make_batch(step, ranks)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    local_rank = int(os.environ["LOCAL_RANK"])
    device = torch.device("tpu", local_rank)
    torch.tpu.set_device(device)
    dist.init_process_group("tpu", device_id=device)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = make_model().to(device)
    mesh = init_device_mesh("tpu", (ranks,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    for step in range(STEPS):
        x, y = (t.chunk(ranks)[rank].to(device) for t in make_batch(step, ranks))
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}")

    if rank == 0:
        print(f"{ranks} processes: {mean.item():.6f}, one process: {train_alone(ranks):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
