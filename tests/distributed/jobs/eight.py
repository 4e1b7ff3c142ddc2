"""Meshes of two and three dimensions in eight processes."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("pp", "dp", "tp")}


def mesh_of(*shape):
    return init_device_mesh("tpu", shape, mesh_dim_names=NAMES[len(shape)])


def check_every_dimension_has_its_groups():
    for shape in ((4, 2), (2, 4), (2, 2, 2)):
        mesh = mesh_of(*shape)
        ranks = torch.arange(8).view(shape)
        here = tuple(mesh.get_coordinate())
        assert int(ranks[here]) == dist.get_rank()
        for dim, name in enumerate(NAMES[len(shape)]):
            x = torch.full((3,), float(dist.get_rank()), device=DEVICE)
            dist.all_reduce(x, group=mesh.get_group(name))
            line = ranks.movedim(dim, -1)[tuple(c for i, c in enumerate(here) if i != dim)]
            assert x.tolist() == [float(line.sum())] * 3


def check_redistribution():
    torch.manual_seed(0)
    whole = torch.randn(10, 9, 6)
    mesh = mesh_of(2, 2, 2)
    layouts = (
        [Shard(0), Shard(1), Shard(2)],
        [Shard(0), Shard(0), Replicate()],
        [Replicate(), Shard(2), Shard(2)],
        [Replicate(), Replicate(), Replicate()],
    )
    for source in layouts:
        for target in layouts:
            x = distribute_tensor(whole.to(DEVICE), mesh, source).redistribute(mesh, target)
            assert tuple(x.placements) == tuple(target) and torch.equal(x.full_tensor().cpu(), whole)
    local = (whole * (dist.get_rank() + 1)).to(DEVICE)
    x = torch.distributed.tensor.DTensor.from_local(local, mesh, [Partial()] * 3)
    torch.testing.assert_close(x.redistribute(mesh, [Shard(0)] * 3).full_tensor().cpu(), 36 * whole)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 8, generator=generator), torch.randn(8, 8, generator=generator)


def alone(steps):
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        x, y = batch(step)
        losses.append(nn.functional.mse_loss(m(x), y))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def check_training_with_tensor_parallel_and_sharded_replicas():
    """FSDP2 over the replicas of tensor parallel layers; with three dimensions, hybrid sharding."""
    for shape in ((4, 2), (2, 2, 2)):
        mesh = mesh_of(*shape)
        m = model().to(DEVICE)
        for block in m:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=mesh["pp", "dp"] if len(shape) == 3 else mesh["dp"])
        optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
        replica = dist.get_rank() // 2  # ranks that differ in the last dimension see the same rows
        for step, expected in enumerate(alone(3)):
            x, y = (t.chunk(4)[replica].to(DEVICE) for t in batch(step))
            loss = nn.functional.mse_loss(m(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            assert abs(mean.item() - expected) < 1e-5, (shape, step, mean.item(), expected)
