"""``torch.distributed`` on the device: the c10d backend "tpu" (also "tpu_dist"), and what starts it.

The backend's name is registered with the device; nothing else is imported before a process group is made.
"""

from __future__ import annotations

from typing import Any

__all__ = ["BACKENDS", "register"]

BACKENDS = ("tpu", "tpu_dist")


def register() -> None:
    """Make the backend known to torch.distributed."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    for name in BACKENDS:
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, _creator(name), extended_api=True, devices=["tpu"])


def _creator(name: str) -> Any:
    def create(options: Any, backend_options: Any) -> Any:
        from torchtpu.distributed.create import create_backend

        return create_backend(name, options)

    return create
