"""What one of two processes with two emulated devices each finds out; the last line of its output is JSON.

processes.py CHECK...: the names of functions below, without ``check_``.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import sys
import time
import traceback
from typing import Any

import torch
from small_model import Block, build, tokens_of, train, value_of
from torch import nn

import torchtpu  # noqa: F401 - registers the device
from torchtpu import spmd
from torchtpu.runtime import meshes

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def same(model: nn.Module, expected: nn.Module) -> None:
    for (name, a), b in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-4, atol=1e-5, msg=name)


def close(found: list[float], expected: list[float]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


# ---- what works as on one device -----------------------------------------------------------------------------------


def check_training() -> None:
    one = build().to("tpu")
    losses, _ = train(one)
    for plan in ("fsdp=2,tp=2", "fsdp"):
        model = spmd.shard(build(), plan)
        weight = value_of(model.up_proj.weight)
        assert not weight.is_fully_addressable
        assert sum(s.data.nbytes for s in weight.addressable_shards) == weight.nbytes // SIZE
        found, optimizer = train(model)
        close(found, losses)
        same(model, one)
        moment = value_of(optimizer.state[model.up_proj.weight]["exp_avg"])
        assert moment.sharding.is_equivalent_to(weight.sharding, 2)


def check_batches_by_parts() -> None:
    losses, _ = train(build().to("tpu"))
    model = spmd.shard(build(), "fsdp=4")

    def mine(batch: torch.Tensor) -> torch.Tensor:
        made = spmd.shard_batch(batch.chunk(SIZE)[RANK], model, local=True)
        assert torch.equal(made.cpu(), batch)
        return made

    close(train(model, place=mine)[0], losses)
    close(train(spmd.shard(build(), "fsdp=4"), place=lambda b: spmd.shard_batch(b, model))[0], losses)
    tp = spmd.shard(build(), "tp=4")
    with raises(RuntimeError, "does not divide a batch"):
        spmd.shard_batch(torch.ones(2, 3), tp, local=True)


def check_saved_and_loaded() -> None:
    model = spmd.shard(build(), "fsdp=4")
    _, optimizer = train(model, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    results = []
    for plan in (None, "fsdp=2,tp=2"):
        other = build().to("tpu") if plan is None else spmd.shard(build(), plan)
        other.load_state_dict(saved["model"])
        new = torch.optim.AdamW(other.parameters(), lr=1e-2)
        new.load_state_dict(copy.deepcopy(saved["optimizer"]))
        batch = tokens_of(1)[0].to("tpu")
        losses = []
        for _ in range(2):
            loss = nn.functional.cross_entropy(other(batch).flatten(0, 1), batch.flatten())
            new.zero_grad()
            loss.backward()
            new.step()
            losses.append(loss.item())
        results.append(losses)
        if plan is not None:
            state = value_of(new.state[other.up_proj.weight]["exp_avg"])
            assert meshes.spans(state.sharding) and not state.is_fully_replicated
    close(results[1], results[0])


def check_random_numbers() -> None:
    results = []
    for plan in (None, "fsdp=4"):
        model = build(dropout=0.5)
        model = model.to("tpu") if plan is None else spmd.shard(model, plan)
        torch.tpu.manual_seed(3)
        results.append(train(model)[0])
    close(results[1], results[0])


def check_from_meta_and_from_the_device() -> None:
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
    torch.tpu.manual_seed(5)
    made = spmd.shard(empty, "fsdp=4")
    torch.tpu.manual_seed(5)
    with torch.device("tpu"):
        expected = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
    assert not value_of(made[0].weight).is_fully_replicated
    same(made, expected)
    same(spmd.shard(build().to("tpu"), "fsdp=4"), build())


def check_operator_by_operator() -> None:
    losses, _ = train(build().to("tpu"), 2)
    with torch.tpu.set_eager_mode("strict"):
        close(train(spmd.shard(build(), "fsdp=4"), 2)[0], losses)


def check_compiled() -> None:
    losses, _ = train(build().to("tpu"))
    model = spmd.shard(build(), "fsdp=4")
    close(train(model, run=torch.compile(model, fullgraph=True))[0], losses)
    one, run = build().to("tpu"), torch.compile(spmd.shard(build(), "fsdp=4"), dynamic=True)
    with torch.no_grad():
        for rows in (4, 8, 12):
            tokens = (torch.arange(6 * rows).reshape(rows, 6) % 32).to("tpu")
            torch.testing.assert_close(run(tokens).cpu(), one(tokens).cpu(), rtol=1e-5, atol=1e-6)


def check_values_read() -> None:
    """Whole values are read by each process alone, divided ones together."""
    model, plain = spmd.shard(build(), "fsdp=4"), build()
    weight = model.up_proj.weight.detach()
    total = weight.sum()
    if RANK == 0:
        torch.tpu.synchronize()
    torch.tpu.synchronize()
    if RANK == 0:
        assert abs(total.item() - plain.up_proj.weight.sum().item()) < 1e-4
    assert torch.equal(weight.nonzero().cpu(), plain.up_proj.weight.detach().nonzero())
    assert torch.equal(weight[1].cpu(), plain.up_proj.weight.detach()[1])
    assert (weight + torch.ones(16).to("tpu")).cpu().equal(plain.up_proj.weight.detach() + 1)
    moved = torch.ones(64, 16).to("tpu")
    moved += weight
    assert moved.cpu().equal(plain.up_proj.weight.detach() + 1)
    with torch.no_grad():
        model.up_proj.weight.copy_(torch.ones(64, 16))
        model.up_proj.weight.copy_(torch.full((64, 16), 2.0).to("tpu"))
    assert not value_of(model.up_proj.weight).is_fully_replicated
    assert model.up_proj.weight.sum().item() == 2 * 64 * 16
    try:
        with torch.no_grad():
            model(torch.full((4, 6), 99).to("tpu"))
        torch.tpu.synchronize()
    except IndexError as error:
        assert "out of range" in str(error)
    else:
        raise AssertionError("no IndexError")


def check_mesh_within_a_process() -> None:
    losses, _ = train(build().to("tpu"))
    model = spmd.shard(build(), "fsdp=2")
    assert value_of(model.up_proj.weight).is_fully_addressable
    close(train(model)[0], losses)


def check_sizes_of_meshes() -> None:
    with raises(RuntimeError, "needs 3 devices, and this process has 2, all processes of the job 4"):
        spmd.shard(build(), "tp=3")


def check_checkpoint() -> None:
    """What a process group's checkpoints need: whole values on the CPU, on each process."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("tpu")
    model = spmd.shard(build(), "fsdp=4")
    train(model, 2)
    folder = os.environ["JOB_FOLDER"]
    dcp.save({k: v.cpu() for k, v in model.state_dict().items()}, checkpoint_id=f"{folder}/dcp")
    other = spmd.shard(build(), "fsdp=2,tp=2")
    into = {k: torch.empty(v.shape, dtype=v.dtype) for k, v in other.state_dict().items()}
    dcp.load(into, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(into)
    same(other, model)
    torch.save(model.state_dict(), f"{folder}/model.pt" if RANK == 0 else os.devnull)
    dist.barrier()
    plain = build()
    plain.load_state_dict(torch.load(f"{folder}/model.pt", map_location="cpu"))
    same(model, plain)


# ---- with transformers ---------------------------------------------------------------------------------------------


def check_generate() -> None:
    from job import llama

    found = []
    for model in (llama(1).to("tpu"), spmd.shard(llama(1), "fsdp=2,tp=2")):
        prompt = torch.arange(2 * 5).reshape(2, 5).to("tpu")
        with torch.no_grad():
            made = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
        found.append(made.tolist())
    assert found[0] == found[1], found


def check_experts() -> None:
    import job

    close(job.train(spmd.shard(job.mixture(), "ep=4"))[0], job.train(job.mixture().to("tpu"))[0])


# ---- what goes wrong -----------------------------------------------------------------------------------------------


def check_lone_reader() -> None:
    model = spmd.shard(build(), "fsdp=4")
    if RANK == 0:
        model.up_proj.weight.cpu()  # alone
    time.sleep(9)


def check_other_values() -> None:
    torch.manual_seed(RANK)
    spmd.shard(Block(), "fsdp=4")


def check_other_programs() -> None:
    """Programs that both have run before, so that nobody waits for anybody, in another order."""
    weight = spmd.shard(build(), "fsdp=4").up_proj.weight.detach()
    for _ in range(2):
        weight.sum().item(), weight.amax().item()
    for _ in range(100):
        (weight.sum() if RANK == 0 else weight.amax()).item()
        time.sleep(0.1)


@contextlib.contextmanager
def raises(kind: type[Exception], text: str) -> Any:
    try:
        yield
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def main(names: list[str]) -> dict[str, str]:
    found = {}
    for name in names:
        start = time.perf_counter()
        try:
            globals()[f"check_{name}"]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        print(f"{name} {time.perf_counter() - start:.1f} s {'FAILED' if found[name] else ''}", flush=True)
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])), flush=True)
