"""DTensor and the plans on it, pipelines, functional collectives and compiled graphs, in four processes."""

import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))


def mesh_of(*shape, names=None):
    return init_device_mesh("tpu", shape, mesh_dim_names=names)


def check_meshes():
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    r = dist.get_rank()
    assert list(mesh.get_coordinate()) == [r // 2, r % 2] and mesh["tp"].size() == 2
    x = torch.ones(2, device=DEVICE) * r
    dist.all_reduce(x, group=mesh.get_group("tp"))
    assert x.tolist() == [float(2 * (r // 2) * 2 + 1)] * 2


def check_every_redistribution():
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(0)
    whole = torch.randn(9, 7)
    for source in (Replicate(), Shard(0), Shard(1)):
        for target in (Replicate(), Shard(0), Shard(1)):
            x = distribute_tensor(whole.to(DEVICE), mesh, [source])
            y = x.redistribute(mesh, [target])
            assert y.placements == (target,) and torch.equal(y.full_tensor().cpu(), whole)
    n = dist.get_world_size()
    for op in ("sum", "avg", "max"):
        for target in (Replicate(), Shard(0), Shard(1)):
            local = (whole * (dist.get_rank() + 1)).to(DEVICE)
            x = DTensor.from_local(local, mesh, [Partial(op)])
            values = torch.stack([whole * (i + 1) for i in range(n)])
            expected = {"sum": values.sum(0), "avg": values.mean(0), "max": values.amax(0)}[op]
            torch.testing.assert_close(x.redistribute(mesh, [target]).full_tensor().cpu(), expected)


def check_dtensor_operators():
    mesh = mesh_of(2, 2)
    torch.manual_seed(0)
    a, b = torch.randn(8, 12), torch.randn(12, 4)
    for pa in ([Shard(0), Replicate()], [Replicate(), Shard(1)], [Shard(0), Shard(1)]):
        for pb in ([Replicate(), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(1)]):
            x = distribute_tensor(a.to(DEVICE), mesh, pa)
            y = distribute_tensor(b.to(DEVICE), mesh, pb)
            torch.testing.assert_close((x @ y).full_tensor().cpu(), a @ b, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(x.softmax(-1).full_tensor().cpu(), a.softmax(-1))
            torch.testing.assert_close(x.sum().full_tensor().cpu(), a.sum(), rtol=1e-5, atol=1e-5)


def check_dtensor_random():
    mesh = mesh_of(dist.get_world_size())
    torch.manual_seed(11)
    x = torch.distributed.tensor.rand((16, 4), device_mesh=mesh, placements=[Shard(0)])
    rows = x.full_tensor().cpu()
    assert rows.shape == (16, 4) and len({tuple(r.tolist()) for r in rows}) == 16
    y = torch.distributed.tensor.rand((4,), device_mesh=mesh, placements=[Replicate()]).to_local()
    everyone = [torch.empty_like(y) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, y)
    assert all(torch.equal(e.cpu(), y.cpu()) for e in everyone)


class Layer(nn.Module):
    """An attention block and a gated feed-forward block."""

    def __init__(self, width=16, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(width, 32), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def layer():
    torch.manual_seed(3)
    return Layer()


PLAN = {
    **{name: ColwiseParallel() for name in ("q", "k", "v", "up", "gate")},
    "o": RowwiseParallel(),
    "down": RowwiseParallel(),
}


def whole(t):
    t = t.detach()
    return (t.full_tensor() if isinstance(t, DTensor) else t).cpu()


def same_gradients(m, single):
    for (name, a), b in zip(m.named_parameters(), single.parameters(), strict=True):
        torch.testing.assert_close(whole(a.grad), b.grad, rtol=1e-4, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")


def check_tensor_parallel():
    mesh = mesh_of(4)
    single = layer()
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    single(x).square().mean().backward()
    m = parallelize_module(layer().to(DEVICE), mesh, PLAN)
    out = m(x.to(DEVICE))
    torch.testing.assert_close(out.cpu(), single(x), rtol=1e-5, atol=1e-5)
    out.square().mean().backward()
    same_gradients(m, single)


def check_sequence_parallel():
    mesh = mesh_of(4)
    single = layer()
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))
    single(x).square().mean().backward()

    class Parts(Layer):
        def forward(self, x):
            h = self.norm1(x)
            h = h.redistribute(placements=[Replicate()]).to_local()
            q, k, v = (f(h).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
            a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.o(a.transpose(1, 2).flatten(2))
            h = self.norm2(x).redistribute(placements=[Replicate()]).to_local()
            return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))

    torch.manual_seed(3)
    plan = {
        **PLAN,
        "norm1": SequenceParallel(),
        "norm2": SequenceParallel(),
        "o": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    m = parallelize_module(Parts().to(DEVICE), mesh, plan)
    out = m(distribute_tensor(x.to(DEVICE), mesh, [Shard(1)]))
    torch.testing.assert_close(out.full_tensor().cpu(), single(x), rtol=1e-5, atol=1e-5)
    out.square().mean().backward()
    same_gradients(m, single)


def check_loss_parallel():
    mesh = mesh_of(4)
    logits = torch.randn(6, 12, generator=torch.Generator().manual_seed(0))
    target = torch.arange(6)
    x = distribute_tensor(logits.to(DEVICE), mesh, [Shard(1)]).requires_grad_()
    with loss_parallel():
        loss = nn.functional.cross_entropy(x, target.to(DEVICE))
        loss.backward()
    reference = logits.clone().requires_grad_()
    expected = nn.functional.cross_entropy(reference, target)
    expected.backward()
    torch.testing.assert_close(whole(loss), expected.detach())
    torch.testing.assert_close(whole(x.grad), reference.grad)


def check_context_parallel():
    """Ring attention, by the kernel that PyTorch's context parallelism knows; it needs multiples of 32 rows a part."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = mesh_of(4)
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 2, 256, 8, generator=generator) for _ in range(3)]
    plain = [t.clone().requires_grad_() for t in whole]
    expected = nn.functional.scaled_dot_product_attention(*plain, is_causal=True)
    expected.square().sum().backward()
    q, k, v = (t.to(DEVICE) for t in whole)
    with (
        sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION),
        context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3),
    ):
        parts = [t.detach().requires_grad_() for t in (q, k, v)]
        out = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        out.square().sum().backward()
        found = context_parallel_unshard(mesh, [out.detach(), *(t.grad for t in parts)], [2] * 4)
    for a, b in zip(found, [expected.detach(), *(t.grad for t in plain)], strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=1e-4, atol=1e-5)


def split(name):
    """Whether the plan splits a parameter: one norm of parameters on different meshes PyTorch does not compute."""
    return name.split(".")[0] in PLAN


def check_two_dimensions():
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    single = layer()
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    single(x).square().mean().backward()
    expected = torch.nn.utils.clip_grad_norm_([p for n, p in single.named_parameters() if split(n)], 0.01)
    m = parallelize_module(layer().to(DEVICE), mesh["tp"], PLAN)
    fully_shard(m, mesh=mesh["dp"])
    rows = x.chunk(2)[mesh.get_local_rank("dp")].to(DEVICE)
    m(rows).square().mean().backward()
    norm = torch.nn.utils.clip_grad_norm_([p for n, p in m.named_parameters() if split(n)], 0.01)
    torch.testing.assert_close(whole(norm), expected, rtol=1e-4, atol=1e-6)
    same_gradients(m, single)


def check_hybrid_sharding():
    mesh = mesh_of(2, 2, names=("replicate", "shard"))
    single = layer()
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    single(x).square().mean().backward()
    m = fully_shard(layer().to(DEVICE), mesh=mesh)
    m(x.chunk(4)[dist.get_rank()].to(DEVICE)).square().mean().backward()
    same_gradients(m, single)


def check_pipelines():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

    torch.manual_seed(5)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)]
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 6, generator=generator)
    out = x
    for stage in stages:
        out = stage(out)
    expected = nn.functional.mse_loss(out, y)
    expected.backward()
    r, n = dist.get_rank(), dist.get_world_size()
    import copy

    for schedule in (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B):
        several = schedule is ScheduleInterleaved1F1B
        if several:
            parts = [copy.deepcopy(stages[i]) for i in (r, r + n)]
        else:
            parts = [nn.Sequential(*copy.deepcopy(stages[2 * r : 2 * r + 2]))]
        for part in parts:
            part.zero_grad()
            part.to(DEVICE)
        places = [r, r + n] if several else [r]
        made = [PipelineStage(p, i, 2 * n if several else n, DEVICE) for p, i in zip(parts, places, strict=True)]
        run = schedule(made if several else made[0], 4, loss_fn=nn.functional.mse_loss)
        losses = []
        if r == 0:
            run.step(x.to(DEVICE))
        elif r == n - 1:
            run.step(target=y.to(DEVICE), losses=losses)
            torch.testing.assert_close(torch.stack(losses).mean().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
        else:
            run.step()
        wanted = [stages[i] for i in places] if several else [nn.Sequential(*stages[2 * r : 2 * r + 2])]
        for part, reference in zip(parts, wanted, strict=True):
            for a, b in zip(part.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(a.grad.cpu(), b.grad, rtol=1e-4, atol=1e-6)


def check_functional_collectives():
    n, r = dist.get_world_size(), dist.get_rank()
    x = torch.arange(4.0, device=DEVICE) + r
    world = list(range(n))
    everyone = torch.stack([torch.arange(4.0) + i for i in range(n)])
    torch.testing.assert_close(funcol.all_reduce(x, "sum", world).cpu(), everyone.sum(0))
    torch.testing.assert_close(funcol.all_gather_tensor(x, 0, world).cpu(), everyone.flatten())
    torch.testing.assert_close(funcol.reduce_scatter_tensor(x, "avg", 0, world).cpu(), everyone.mean(0)[r : r + 1])
    torch.testing.assert_close(funcol.broadcast(x, 1, world).cpu(), everyone[1])
    torch.testing.assert_close(funcol.all_to_all_single(x, None, None, world).cpu(), everyone[:, r])
    for a, b in zip(funcol.all_reduce_coalesced([x, x * 2], "sum", world), (1, 2), strict=True):
        torch.testing.assert_close(a.cpu(), b * everyone.sum(0))
    y = x.clone().requires_grad_()
    funcol.all_gather_tensor_autograd(y, 0, dist.group.WORLD).sum().backward()
    assert y.grad.tolist() == [float(n)] * 4


def check_compiled_collectives():
    world = list(range(dist.get_world_size()))

    def f(x):
        y = funcol.all_reduce(x.sin(), "sum", world)
        z = funcol.all_gather_tensor(y * 2, 0, world)
        return z.cos() + 1

    x = torch.arange(4.0, device=DEVICE) + dist.get_rank()
    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(compiled(x).cpu(), f(x).cpu())


def check_compiled_ddp_and_tensor_parallel():
    torch._dynamo.reset()
    single = layer()
    x = torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(0))
    single(x).square().mean().backward()
    m = parallelize_module(layer().to(DEVICE), mesh_of(4), PLAN)
    compiled = torch.compile(m)
    for _ in range(2):
        m.zero_grad()
        compiled(x.to(DEVICE)).square().mean().backward()
    same_gradients(m, single)
    ddp = nn.parallel.DistributedDataParallel(layer().to(DEVICE))
    compiled = torch.compile(ddp)
    for _ in range(2):
        ddp.zero_grad()
        compiled(x.chunk(4)[dist.get_rank()].to(DEVICE)).square().mean().backward()
    same_gradients(ddp, single)


def check_old_compiled_collectives():
    def f(x):
        dist.all_reduce(x)
        return x + 1

    torch._dynamo.reset()
    x = torch.ones(3, device=DEVICE)
    assert torch.compile(f)(x.clone()).tolist() == [dist.get_world_size() + 1.0] * 3


def check_nothing_ran_on_the_cpu():
    assert torch.tpu.fallback_count() == 0, torch.tpu.fallbacks()
