"""Distributed Checkpoint: what one number of processes saved, another loads, bit for bit."""

import os
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

BACKEND = "cpu:gloo,tpu:tpu"
DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
FOLDER = Path(os.environ["CHECKPOINTS"])
SOURCES = os.environ.get("SOURCES", "saved,saved later").split(",")
AGAIN = os.environ.get("AGAIN")  # under this name the jobs that load save what they have loaded
warnings.filterwarnings("ignore", module="torch.distributed.checkpoint")


def trained(steps):
    """A sharded model and its optimizer after some steps from fixed numbers."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).to(DEVICE)
    mesh = init_device_mesh("tpu", (dist.get_world_size(),))
    for part in (m[0], m[2]):
        fully_shard(part, mesh=mesh)
    fully_shard(m, mesh=mesh)
    optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
    for _ in range(steps):
        m(torch.ones(3, 7, device=DEVICE)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return m, optimizer


def flat(state, prefix=""):
    for key, v in state.items():
        if isinstance(v, dict):
            yield from flat(v, f"{prefix}{key}.")
        elif isinstance(v, torch.Tensor):
            yield prefix + key, (v.full_tensor() if isinstance(v, DTensor) else v).detach().cpu()


def state_of(m, optimizer):
    model, optim = get_state_dict(m, optimizer)
    return {"model": model, "optimizer": optim}


def save_to(name, saver=dcp.save):
    m, optimizer = trained(2)
    state = state_of(m, optimizer)
    if dist.get_rank() == 0 and not (FOLDER / "expected.pt").exists():
        torch.save(dict(flat(state)), FOLDER / "expected.pt")
    else:
        dict(flat(state))
    found = saver(state, checkpoint_id=str(FOLDER / name))
    if hasattr(found, "result"):
        found.result()
    dist.barrier()


def check_save():
    if os.environ["PHASE"] == "save":
        save_to("saved")


def check_asynchronous_save():
    if os.environ["PHASE"] == "save":
        save_to("saved later", dcp.async_save)


def check_load_on_another_number_of_processes():
    expected = torch.load(FOLDER / "expected.pt")
    for name in SOURCES:
        m, optimizer = trained(1)
        state = state_of(m, optimizer)
        dcp.load(state, checkpoint_id=str(FOLDER / name))
        set_state_dict(m, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        found = dict(flat(state_of(m, optimizer)))
        assert found.keys() == expected.keys()
        for key, value in found.items():
            assert torch.equal(value, expected[key]), key
    if AGAIN:
        dcp.save(state_of(m, optimizer), checkpoint_id=str(FOLDER / AGAIN))


def check_safetensors():
    from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter

    m, _ = trained(2)
    model = m.state_dict()
    expected = torch.load(FOLDER / "expected.pt")

    def save(name):
        names = dict.fromkeys(model, 1)
        writer = HuggingFaceStorageWriter(
            path=str(FOLDER / name), fqn_to_index_mapping=names, save_distributed=True, enable_consolidation=True
        )
        dcp.save(model, storage_writer=writer)
        dist.barrier()

    if os.environ["PHASE"] == "save":
        save("huggingface")
    for name in ["huggingface", *(f"huggingface {s}" for s in SOURCES if not s.startswith("saved"))]:
        for v in model.values():
            v.zero_()
        dcp.load(model, storage_reader=HuggingFaceStorageReader(path=str(FOLDER / name)))
        for key, v in model.items():
            assert torch.equal(v.full_tensor().cpu(), expected[f"model.{key}"]), key
    if AGAIN:
        save(f"huggingface {AGAIN}")


def check_safetensors_reads_the_file():
    if dist.get_rank() == 0:
        from safetensors.torch import load_file

        expected = torch.load(FOLDER / "expected.pt")
        (path,) = (FOLDER / "huggingface").glob("*.safetensors")
        for key, value in load_file(path).items():
            assert torch.equal(value, expected[f"model.{key}"]), key
