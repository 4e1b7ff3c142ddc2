"""Every collective of c10d, on every rank, against what the inputs of all ranks give on the CPU."""

import os

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
SIZES = [(), (3,), (5, 7), (2, 33, 11)]  # the last does not fit in one message
NUMBERS = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.complex64),
]
MOVED = [*NUMBERS, torch.bool, torch.float8_e4m3fn, torch.uint16, torch.complex128]


def value(rank, size, dtype, salt=0):
    """What a rank holds: small whole numbers, so that every order of summation gives the same."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    x = torch.randint(0, 4, size, generator=generator)
    return (x > 1) if dtype is torch.bool else x.to(dtype)


def mine(size, dtype=torch.float32, salt=0):
    return value(dist.get_rank(), size, dtype, salt).to(DEVICE)


def everyones(size, dtype=torch.float32, salt=0):
    return [value(r, size, dtype, salt) for r in range(dist.get_world_size())]


def same(found, expected):
    assert found.device == DEVICE
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def total(values, op):
    x = values[0]
    kind = torch.complex64 if x.is_complex() else torch.float64 if x.is_floating_point() else torch.int64
    wide = [v.to(kind) for v in values]
    result = wide[0]
    for v in wide[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVG):
            result = result + v
        elif op == ReduceOp.PRODUCT:
            result = result * v
        elif op == ReduceOp.MIN:
            result = torch.minimum(result, v)
        elif op == ReduceOp.MAX:
            result = torch.maximum(result, v)
        elif op == ReduceOp.BAND:
            result = result & v
        elif op == ReduceOp.BOR:
            result = result | v
        elif op == ReduceOp.BXOR:
            result = result ^ v
    if op == ReduceOp.AVG:
        n = len(values)
        result = result / n if result.is_floating_point() or result.is_complex() else result // n
    return result.to(values[0].dtype)


def check_all_reduce_of_every_dtype():
    for dtype in NUMBERS:
        for size in SIZES if dtype is torch.float32 else SIZES[2:]:
            x = mine(size, dtype)
            dist.all_reduce(x)
            same(x, total(everyones(size, dtype), ReduceOp.SUM))


def check_all_reduce_with_every_operation():
    floating = (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
    whole = (*floating, ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
    for dtype, ops in ((torch.float32, floating), (torch.int32, whole), (torch.uint8, whole)):
        for op in ops:
            for size in ((5,), (40, 41)):
                x = mine(size, dtype)
                dist.all_reduce(x, op=op)
                same(x, total(everyones(size, dtype), op))


def check_all_reduce_of_booleans():
    for size in ((5,), (40, 41)):
        for op, combine in ((ReduceOp.SUM, torch.any), (ReduceOp.MAX, torch.any), (ReduceOp.MIN, torch.all)):
            x = mine(size, torch.bool)
            dist.all_reduce(x, op=op)
            same(x, combine(torch.stack(everyones(size, torch.bool)), dim=0))


def check_premultiplied_sum():
    for size in ((5,), (40, 41)):
        for factor in (0.5, torch.tensor([0.5])):
            x = mine(size)
            dist.all_reduce(x, op=dist._make_nccl_premul_sum(factor))
            same(x, sum(everyones(size)) * 0.5)
            n = dist.get_world_size()
            out = torch.empty(size, device=DEVICE)
            dist.reduce_scatter_tensor(out, mine((n, *size)), op=dist._make_nccl_premul_sum(factor))
            same(out, sum(everyones((n, *size)))[dist.get_rank()] * 0.5)


def check_operations_without_meaning_are_refused():
    for op, dtype in ((ReduceOp.BAND, torch.float32), (ReduceOp.AVG, torch.bool)):
        try:
            dist.all_reduce(mine((3,), dtype), op=op)
        except TypeError as error:
            assert "has no meaning for" in str(error)
        else:
            raise AssertionError("accepted")


def check_sums_are_equal_on_all_ranks():
    torch.manual_seed(dist.get_rank())
    for size in ((11,), (5000,)):
        x = torch.randn(size).to(DEVICE)
        dist.all_reduce(x)
        rows = torch.empty(dist.get_world_size(), *size, device=DEVICE)
        dist.all_gather_into_tensor(rows, x)
        for row in rows.cpu():
            assert torch.equal(row, x.cpu())


def check_all_gather():
    n = dist.get_world_size()
    for dtype in MOVED:
        for size in SIZES if dtype is torch.float32 else SIZES[2:]:
            out = [torch.empty(size, dtype=dtype, device=DEVICE) for _ in range(n)]
            dist.all_gather(out, mine(size, dtype))
            for found, expected in zip(out, everyones(size, dtype), strict=True):
                bits = torch.uint8 if size else dtype  # nothing to compare numbers of eight bits with
                assert torch.equal(found.cpu().view(bits), expected.view(bits)) or not size


def check_all_gather_into_tensor():
    n = dist.get_world_size()
    for size in SIZES[1:]:
        out = torch.empty(n * size[0], *size[1:], device=DEVICE)
        dist.all_gather_into_tensor(out, mine(size))
        same(out, torch.cat(everyones(size)))
        stacked = torch.empty(n, *size, device=DEVICE)
        dist.all_gather_into_tensor(stacked, mine(size))
        same(stacked, torch.stack(everyones(size)))


def check_nan_and_zeros_keep_their_bits():
    bits = torch.tensor([0x7FC00001, -0x80000000, 0x7F800001, 1], dtype=torch.int32)
    x = bits.view(torch.float32).to(DEVICE)
    dist.broadcast(x, 0)
    assert torch.equal(x.view(torch.int32).cpu(), bits)
    out = [torch.empty(4, device=DEVICE) for _ in range(dist.get_world_size())]
    dist.all_gather(out, x)
    assert all(torch.equal(o.view(torch.int32).cpu(), bits) for o in out)


def check_uneven_all_gather():
    n = dist.get_world_size()
    for scale in (1, 500):
        sizes = [(scale * (r + 1), 2) for r in range(n)]
        out = [torch.empty(s, device=DEVICE) for s in sizes]
        dist.all_gather(out, mine(sizes[dist.get_rank()]))
        for r, (found, size) in enumerate(zip(out, sizes, strict=True)):
            same(found, value(r, size, torch.float32))


def check_outputs_that_are_views():
    n = dist.get_world_size()
    for width in (3, 600):
        whole = torch.zeros(n + 2, width, device=DEVICE)
        dist.all_gather(list(whole[1 : n + 1]), mine((width,)))
        same(whole, torch.cat([torch.zeros(1, width), torch.stack(everyones((width,))), torch.zeros(1, width)]))
        table = torch.zeros(4, width, device=DEVICE)
        column = table.t()[1]
        column.copy_(mine((4,)))
        dist.all_reduce(column)
        assert torch.equal(table[:, 1].cpu(), sum(everyones((4,)))) and not table[:, 0].any()


def check_reduce_scatter():
    n, r = dist.get_world_size(), dist.get_rank()
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PRODUCT):
        for size in ((4,), (50, 20)):
            out = torch.empty(size, device=DEVICE)
            dist.reduce_scatter_tensor(out, mine((n * size[0], *size[1:])), op=op)
            same(out, total(everyones((n * size[0], *size[1:])), op).chunk(n)[r])
            parts = [mine(size, salt=s) for s in range(n)]
            dist.reduce_scatter(out, parts, op=op)
            same(out, total(everyones(size, salt=r), op))
    out = torch.empty(r + 1, device=DEVICE)
    dist.reduce_scatter(out, [mine((s + 1,), salt=s) for s in range(n)])
    same(out, total(everyones((r + 1,), salt=r), ReduceOp.SUM))


def check_coalesced():
    n, r = dist.get_world_size(), dist.get_rank()
    sizes = [(3,), (40, 20), (2, 2)]
    xs = [mine(s, salt=i) for i, s in enumerate(sizes)]
    dist.all_reduce_coalesced(xs)
    for i, (x, s) in enumerate(zip(xs, sizes, strict=True)):
        same(x, sum(everyones(s, salt=i)))
    outs = [torch.empty(n, *s, device=DEVICE) for s in sizes]
    with dist._coalescing_manager(device=DEVICE, async_ops=True) as manager:
        for i, (o, s) in enumerate(zip(outs, sizes, strict=True)):
            dist.all_gather_into_tensor(o, mine(s, salt=i))
    manager.wait()
    for i, (o, s) in enumerate(zip(outs, sizes, strict=True)):
        same(o, torch.stack(everyones(s, salt=i)))
    outs = [torch.empty(s, device=DEVICE) for s in sizes]
    with dist._coalescing_manager(device=DEVICE) as manager:
        for i, (o, s) in enumerate(zip(outs, sizes, strict=True)):
            dist.reduce_scatter_tensor(o, mine((n, *s), salt=i))
    for i, (o, s) in enumerate(zip(outs, sizes, strict=True)):
        same(o, sum(everyones((n, *s), salt=i))[r])


def check_all_to_all():
    n, r = dist.get_world_size(), dist.get_rank()
    for width in (2, 700):
        out = torch.empty(n * 2, width, device=DEVICE)
        dist.all_to_all_single(out, mine((n * 2, width)))
        same(out, torch.cat([x.chunk(n)[r] for x in everyones((n * 2, width))]))
        outs = [torch.empty(width, s + 1, device=DEVICE) for s in range(n)]
        dist.all_to_all(outs, [mine((width, r + 1), salt=s) for s in range(n)])
        for s, o in enumerate(outs):
            same(o, value(s, (width, s + 1), torch.float32, salt=r))


def check_uneven_all_to_all():
    n, r = dist.get_world_size(), dist.get_rank()
    for scale in (1, 300):
        give = [[scale * ((a + b) % 3) for b in range(n)] for a in range(n)]
        take = [give[s][r] for s in range(n)]
        out = torch.empty(sum(take), 2, device=DEVICE)
        dist.all_to_all_single(out, mine((sum(give[r]), 2)), take, give[r])
        parts = [value(s, (sum(give[s]), 2), torch.float32).split(give[s])[r] for s in range(n)]
        same(out, torch.cat(parts))


def check_broadcast():
    for dtype in (torch.float32, torch.bool, torch.int8, torch.bfloat16, torch.int64):
        for root in (0, dist.get_world_size() - 1):
            for size in SIZES if dtype is torch.float32 else SIZES[2:]:
                x = mine(size, dtype)
                dist.broadcast(x, root)
                same(x, value(root, size, dtype))


def check_reduce():
    for size in ((3,), (40, 20)):
        x = mine(size)
        dist.reduce(x, 1)
        if dist.get_rank() == 1:
            same(x, sum(everyones(size)))
        else:
            same(x, value(dist.get_rank(), size, torch.float32))


def check_scatter_and_gather():
    n, r = dist.get_world_size(), dist.get_rank()
    for size in ((3,), (40, 20)):
        out = torch.empty(size, device=DEVICE)
        dist.scatter(out, [mine(size, salt=s) for s in range(n)] if r == 1 else None, src=1)
        same(out, value(1, size, torch.float32, salt=r))
        outs = [torch.empty(size, device=DEVICE) for _ in range(n)] if r == 1 else None
        dist.gather(mine(size), outs, dst=1)
        if outs is not None:
            for found, expected in zip(outs, everyones(size), strict=True):
                same(found, expected)


def check_send_and_receive():
    n, r = dist.get_world_size(), dist.get_rank()
    for size in SIZES:
        x, y = mine(size), torch.empty(size, device=DEVICE)
        if r == 0:
            dist.send(x, 1, tag=3)
            dist.recv(y, 1)
            same(y, value(1, size, torch.float32))
        elif r == 1:
            dist.recv(y, 0, tag=3)
            same(y, value(0, size, torch.float32))
            dist.send(x, 0)
        ring = torch.empty(size, device=DEVICE)
        works = [dist.isend(x, (r + 1) % n), dist.irecv(ring, (r - 1) % n)]
        for work in works:
            work.wait()
        same(ring, value((r - 1) % n, size, torch.float32))


def check_receive_from_anyone():
    if dist.get_rank() == 0:
        found = set()
        for _ in range(dist.get_world_size() - 1):
            y = torch.empty(3, device=DEVICE)
            source = dist.recv(y)
            same(y, value(source, (3,), torch.float32))
            found.add(source)
        assert found == set(range(1, dist.get_world_size()))
    else:
        dist.send(mine((3,)), 0)
    dist.barrier()


def check_batched_messages():
    n, r = dist.get_world_size(), dist.get_rank()
    for size in ((4,), (40, 40)):
        forward, back = torch.empty(size, device=DEVICE), torch.empty(size, device=DEVICE)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine(size), (r + 1) % n),
                dist.P2POp(dist.irecv, forward, (r - 1) % n),
                dist.P2POp(dist.isend, mine(size, salt=1), (r - 1) % n, tag=1),
                dist.P2POp(dist.irecv, back, (r + 1) % n, tag=1),
            ]
        )
        for work in works:
            work.wait()
        same(forward, value((r - 1) % n, size, torch.float32))
        same(back, value((r + 1) % n, size, torch.float32, salt=1))


def check_batched_messages_to_itself():
    found = torch.empty(3, device=DEVICE)
    r = dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, mine((3,)), r), dist.P2POp(dist.irecv, found, r)]):
        work.wait()
    same(found, value(r, (3,), torch.float32))


def check_objects():
    n, r = dist.get_world_size(), dist.get_rank()
    found = [None] * n
    dist.all_gather_object(found, {"rank": r, "text": "x" * 3000 * r})
    assert [f["rank"] for f in found] == list(range(n)) and len(found[1]["text"]) == 3000
    told = ["from 1", 2] if r == 1 else [None, None]
    dist.broadcast_object_list(told, src=1)
    assert told == ["from 1", 2]
    got = [None]
    dist.scatter_object_list(got, [f"for {i}" for i in range(n)] if r == 0 else None, src=0)
    assert got == [f"for {r}"]
    all_of_them = [None] * n if r == 0 else None
    dist.gather_object(("rank", r), all_of_them, dst=0)
    assert r or all_of_them == [("rank", i) for i in range(n)]


def check_handles():
    x = mine((2000,))
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    assert work.is_completed() and work.is_success() and work.exception() is None
    same(x, sum(everyones((2000,))))
    y = mine((3,))
    future = dist.all_reduce(y, async_op=True).get_future()
    (found,) = future.wait()
    assert found is y or torch.equal(found.cpu(), y.cpu())
    same(y, sum(everyones((3,))))
    z = mine((3,))
    then = dist.all_reduce(z, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    same(then.wait(), 2 * sum(everyones((3,))))


def check_an_input_may_change_once_the_call_returns():
    x, out = mine((3000,)), torch.empty(dist.get_world_size(), 3000, device=DEVICE)
    work = dist.all_gather_into_tensor(out, x, async_op=True)
    x.zero_()
    work.wait()
    same(out, torch.stack(everyones((3000,))))


def check_overlapping_groups():
    n, r = dist.get_world_size(), dist.get_rank()
    pairs = [[a, (a + 1) % n] for a in range(n)] if n > 2 else [[0, 1]]
    groups = [dist.new_group(sorted(p)) for p in pairs]
    for pair, group in zip(pairs, groups, strict=True):
        if r in pair:
            for size in ((3,), (2000,)):
                x = mine(size)
                dist.all_reduce(x, group=group)
                same(x, sum(value(p, size, torch.float32) for p in pair))
    alone = dist.new_group([0])
    if r == 0:
        x = mine((3,))
        dist.all_reduce(x, group=alone)
        same(x, value(0, (3,), torch.float32))
    dist.barrier()


def check_split_group():
    n, r = dist.get_world_size(), dist.get_rank()
    half = n // 2
    halves = [list(range(half)), list(range(half, n))]
    group = dist.group.WORLD.split_group(halves[r // half], group_name=f"half{r // half}")
    x = mine((3,))
    group.allreduce([x]).wait()
    same(x, sum(value(p, (3,), torch.float32) for p in halves[r // half]))


def check_barriers():
    dist.barrier()
    dist.barrier(async_op=True).wait()
    dist.barrier(device_ids=[int(os.environ["LOCAL_RANK"])])


def check_names():
    assert dist.get_backend() == "tpu" and dist.Backend("tpu_dist") == "tpu_dist"
    assert dist.get_default_backend_for_device("tpu") == "tpu"
    assert torch.tpu.device_count() == dist.get_world_size()
    assert torch.ones(2, device="tpu").device == DEVICE
    assert torch.ones(2, device="tpu:0").to(DEVICE).device == DEVICE


def check_nothing_ran_on_the_cpu_by_accident():
    assert torch.tpu.fallback_count() == 0, torch.tpu.fallbacks()
