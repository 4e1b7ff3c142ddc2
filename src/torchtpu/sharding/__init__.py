"""Sharding plans: which axis of a mesh of devices each dimension of a tensor is divided over.

Example::

    plan = parse("fsdp=8,tp=2")
    plan.spec("model.layers.0.mlp.down_proj.weight", (4096, 14336))  # ("fsdp", "tp")

A plan is data. The same object shards a program that is compiled ahead of time and one that runs on emulated devices.
"""

from torchtpu.sharding.plan import Plan, PlanError, Rule, Spec
from torchtpu.sharding.presets import parse, preset

__all__ = ["Plan", "PlanError", "Rule", "Spec", "parse", "preset"]
