"""Many devices in one process: a model divided over them by a plan, its tensors ordinary tensors.

Example::

    model = torchtpu.spmd.shard(model, "fsdp=4,tp=2")
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torchtpu.spmd.shard_batch(tokens, model)).loss

The plan is the one that ``torchtpu check`` tries (``torchtpu.sharding``). A divided tensor has its whole size and
says it is on ``tpu:0``; its storage's array lies on all devices of the mesh, and XLA divides every program that reads
it. Without a mesh nothing of this is imported.
"""

from torchtpu.spmd.shard import Share, describe, shard, shard_batch, table

__all__ = ["Share", "describe", "shard", "shard_batch", "table"]
