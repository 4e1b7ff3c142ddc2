"""A small training job that resumes from its last checkpoint: ``conformance.failures`` kills a rank of it.

Environment (besides torchrun's): ``JOB_FOLDER``, where everything goes, and ``JOB_KILL``, "RANK POINT" of the rank that
in the first start asks at a point to be killed; none for an undisturbed run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

POINTS = ("init", "compile", "collective", "optimizer", "checkpoint")
STEPS, EVERY, DISTURBED = 6, 2, 3
"""Training steps; steps between two checkpoints; the step in which a rank dies at the later points."""

FOLDER = Path(os.environ.get("JOB_FOLDER", "."))
RANK, ATTEMPT = int(os.environ.get("RANK", "0")), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def note(kind: str, **more: object) -> None:
    """Tell the outside; in one write, so that a reader never sees half a line."""
    line = json.dumps(
        {
            "kind": kind,
            "rank": RANK,
            "attempt": ATTEMPT,
            "pid": os.getpid(),
            "time": time.time(),
            "cpu": time.process_time(),
        }
        | more
    )
    descriptor = os.open(FOLDER / f"notes-{ATTEMPT}-{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, f"{line}\n".encode())
    os.close(descriptor)


def at(point: str, step: int = -1) -> None:
    """The job comes to a point of a step (-1: before the first)."""
    chosen = os.environ.get("JOB_KILL", "").split()
    now = step == -1 if point == "init" else step == 0 if point == "compile" else step == DISTURBED
    ask = bool(chosen) and ATTEMPT == 0 and now and chosen == [str(RANK), point]
    note("kill me" if ask else "point", point=point, step=step)


def main() -> None:
    """Train, write a checkpoint now and then, and leave the losses of all steps in a file."""
    at("init")
    import datetime

    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    import torchtpu  # noqa: F401

    device = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
    torch.tpu.set_device(device)
    dist.init_process_group("tpu", timeout=datetime.timedelta(seconds=60))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def state() -> dict[str, object]:
        of_model, of_optimizer = get_state_dict(model, optimizer)
        return {"model": of_model, "optimizer": of_optimizer, "losses": losses}

    losses = torch.zeros(STEPS, dtype=torch.float64)
    first = 0
    # PyTorch writes the metadata last: a checkpoint that has them is whole.
    complete = [int(p.parent.name) for p in (FOLDER / "checkpoints").glob("*/.metadata")]
    if complete:
        first = max(complete)
        saved = state()
        dcp.load(saved, checkpoint_id=str(FOLDER / "checkpoints" / str(first)))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],  # type: ignore[arg-type]
        )
    note("resumed", step=first)
    for step in range(first, STEPS):
        at("compile", step)
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(16, 8, generator=generator), torch.randn(16, 4, generator=generator)
        mine = slice(4 * RANK, 4 * RANK + 4)
        loss = nn.functional.mse_loss(model(x[mine].to(device)), y[mine].to(device))
        loss.backward()
        at("collective", step)
        mean = loss.detach().clone()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        at("optimizer", step)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = mean.item()
        if (step + 1) % EVERY == 0 or step == DISTURBED:
            at("checkpoint", step)
            dcp.save(state(), checkpoint_id=str(FOLDER / "checkpoints" / str(step + 1)))
    note("finished", losses=losses.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except BaseException as error:
        note("error", type=type(error).__name__, text=str(error)[:4000])
        raise
    sys.exit(0)
