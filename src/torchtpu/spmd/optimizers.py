"""State of optimizers that was loaded or made on one device is divided as its parameters are, before it is used."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchtpu import _C
from torchtpu.eager.arrays import force
from torchtpu.eager.hidden import hide_from_dynamo
from torchtpu.runtime import meshes

__all__ = ["install"]

_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
_installed = False


def install() -> None:
    """Look at every optimizer's state before its step, once for each that was loaded."""
    global _installed
    if not _installed:
        _installed = True
        hide_from_dynamo(_before_step)
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    state = optimizer.state
    if _seen.get(optimizer) == id(state):
        return
    _seen[optimizer] = id(state)
    for p, values in state.items():
        if not isinstance(p, torch.Tensor) or p.device.type != "tpu":
            continue
        like = force(_C.get_value(p)[0])
        if meshes.divided(like) and isinstance(values, dict):
            for t in values.values():
                if isinstance(t, torch.Tensor) and t.device.type == "tpu" and t.shape == p.shape:
                    _divide(t, like)


def _divide(t: torch.Tensor, like: jax.Array) -> None:
    value, shape, dtype = _C.get_value(t)
    value = force(value)
    if isinstance(value, jax.Array) and not meshes.divided(value) and value.shape == like.shape:
        _C.set_value(t, meshes.put(value, like.sharding), shape, dtype)
