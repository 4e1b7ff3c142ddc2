"""PyTorch's own wrappers, unmodified, against one process that sees all the data."""

import contextlib
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
STEPS = 3


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=12, depth=2):
        super().__init__()
        self.embed = nn.Linear(6, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model():
    torch.manual_seed(7)
    return Model()


def batch(step, rows=8):
    generator = torch.Generator().manual_seed(step)
    n = dist.get_world_size()
    return torch.randn(rows * n, 6, generator=generator), torch.randn(rows * n, 3, generator=generator)


def loss_of(m, x, y):
    return nn.functional.mse_loss(m(x).float(), y)


def reference(clip=None):
    """Losses and parameters of one process on the CPU with the whole batch."""
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(m, x, y)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in m.parameters()]


def mine(t):
    return t.chunk(dist.get_world_size())[dist.get_rank()].to(DEVICE)


def train(m, clip=None):
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(m, mine(x), mine(y))
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(m.parameters(), clip)
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    return losses, [full(p) for p in m.parameters()]


def full(p):
    p = p.detach()
    return (p.full_tensor() if isinstance(p, DTensor) else p).cpu()


def agree(found, expected, tolerance=1e-5):
    for a, b in zip(found[0], expected[0], strict=True):
        assert abs(a - b) <= tolerance * max(1.0, abs(b)), (found[0], expected[0])
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=10 * tolerance, atol=10 * tolerance)


def check_ddp():
    m = DistributedDataParallel(model().to(DEVICE), device_ids=[DEVICE.index])
    agree(train(m), reference())


def check_ddp_with_small_buckets_as_views():
    m = DistributedDataParallel(model().to(DEVICE), bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    agree(train(m), reference())


def check_ddp_unused_parameters_and_static_graph():
    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x):
            return self.used(x)

    torch.manual_seed(0)
    plain = Partly()
    for options in ({"find_unused_parameters": True}, {"static_graph": True}):
        m = DistributedDataParallel(copy.deepcopy(plain).to(DEVICE), **options)
        x, y = batch(0)
        for _ in range(2):
            m.zero_grad()
            loss_of(m, mine(x), mine(y)).backward()
        single = copy.deepcopy(plain)
        loss_of(single, x, y).backward()
        torch.testing.assert_close(m.module.used.weight.grad.cpu(), single.used.weight.grad)


def check_synchronised_batch_norm():
    torch.manual_seed(0)
    x, weights = torch.randn(8, 3, 5), torch.randn(8, 3, 5)
    n, r = dist.get_world_size(), dist.get_rank()
    single = nn.BatchNorm1d(3)
    with torch.no_grad():
        single.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
    m = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(single)).to(DEVICE)
    theirs = x.clone().requires_grad_()
    rows = slice(0, 3) if r == 0 else slice(3 + 5 * (r - 1) // (n - 1), 3 + 5 * r // (n - 1))  # as many as nobody else
    ours = x[rows].to(DEVICE).requires_grad_()
    expected, found = single(theirs), m(ours)
    (expected * weights).sum().backward()
    (found * weights[rows].to(DEVICE)).sum().backward()
    dist.all_reduce(m.weight.grad)
    dist.all_reduce(m.bias.grad)
    torch.testing.assert_close(found.cpu(), expected[rows], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad[rows], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(m.weight.grad.cpu(), single.weight.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(m.bias.grad.cpu(), single.bias.grad, rtol=1e-5, atol=1e-5)
    for name, value in single.state_dict().items():
        torch.testing.assert_close(m.state_dict()[name].cpu(), value, rtol=1e-5, atol=1e-6)


def check_ddp_no_sync_accumulates():
    m = DistributedDataParallel(model().to(DEVICE))
    for step in range(2):
        with m.no_sync() if step == 0 else contextlib.nullcontext():
            x, y = batch(step)
            loss_of(m, mine(x), mine(y)).backward()
    single = model()
    for step in range(2):
        loss_of(single, *batch(step)).backward()
    for a, b in zip(m.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-5)


def check_ddp_join_with_uneven_inputs():
    from torch.distributed.algorithms.join import Join

    m = DistributedDataParallel(nn.Linear(6, 3).to(DEVICE))
    steps = 1 + dist.get_rank()
    with Join([m]):
        for step in range(steps):
            x, y = batch(step)
            loss_of(m, mine(x), mine(y)).backward()
    dist.barrier()


def check_ddp_compressed_gradients():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    m = DistributedDataParallel(model().to(DEVICE))
    m.register_comm_hook(None, fp16_compress_hook)
    agree(train(m), reference(), 2e-2)


def shard(m, **options):
    for block in m.blocks:
        fully_shard(block, **options)
    return fully_shard(m, **options)


def check_fsdp2():
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))
    m = shard(model().to(DEVICE), mesh=mesh)
    assert all(isinstance(p, DTensor) for p in m.parameters())
    agree(train(m), reference())


def check_fsdp2_clips_gradients():
    m = shard(model().to(DEVICE))
    agree(train(m, clip=0.05), reference(clip=0.05))


def check_fsdp2_keeps_parameters_gathered_and_prefetches():
    m = shard(model().to(DEVICE), reshard_after_forward=False)
    m.set_modules_to_forward_prefetch([m.blocks[0]])
    m.blocks[1].set_modules_to_backward_prefetch([m.blocks[0]])
    agree(train(m), reference())


def check_fsdp2_mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    m = shard(model().to(DEVICE), mp_policy=policy)
    agree(train(m), reference(), 3e-2)


def check_fsdp2_gradient_factor():
    m = shard(model().to(DEVICE))
    for module in m.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(1.0)
    x, y = batch(0)
    loss_of(m, mine(x), mine(y)).backward()
    single = model()
    loss_of(single, x, y).backward()
    n = dist.get_world_size()
    for a, b in zip(m.parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(full(a.grad), b.grad * n, rtol=1e-4, atol=1e-5)


def check_fsdp2_cpu_offload():
    single = reference()
    m = shard(model(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(m, mine(x), mine(y))
        loss.backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
        losses.append(loss.item())
    for a, b in zip(losses, single[0], strict=True):
        assert abs(a - b) < 1e-5


def check_fsdp2_from_meta():
    with torch.device("meta"):
        m = Model()
    shard(m)
    m.to_empty(device=DEVICE)
    whole = model().state_dict()
    for name, p in m.state_dict().items():
        p.copy_(torch.distributed.tensor.distribute_tensor(whole[name].to(DEVICE), p.device_mesh, p.placements))
    agree(train(m), reference())


def check_fsdp2_with_activation_checkpointing():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    m = model().to(DEVICE)
    apply_activation_checkpointing(m, check_fn=lambda module: isinstance(module, Block))
    agree(train(shard(m)), reference())


def check_nothing_ran_on_the_cpu():
    assert torch.tpu.fallback_count() == 0, torch.tpu.fallbacks()
