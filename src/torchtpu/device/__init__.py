"""``torch.tpu``: the device module, in the names of torch.cuda.

Nothing here starts the device but what needs it: making a tensor, naming the device or describing it. Asking how many
devices there are, seeding and selecting one do not, so a program that never uses a tpu pays nothing for having one.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from torchtpu.device import _index, amp, memory, random, streams
from torchtpu.device.memory import *  # noqa: F403
from torchtpu.device.random import *  # noqa: F403
from torchtpu.device.streams import *  # noqa: F403

__all__ = [
    *memory.__all__,
    *random.__all__,
    *streams.__all__,
    "amp",
    "can_device_access_peer",
    "current_device",
    "default_generators",  # noqa: F405 - these two are properties of _DeviceModule
    "device",
    "device_count",
    "device_of",
    "eager_mode",  # noqa: F405
    "compile_stats",
    "fallback_count",
    "fallbacks",
    "get_amp_supported_dtype",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "init",
    "is_available",
    "is_bf16_supported",
    "is_current_stream_capturing",
    "is_initialized",
    "set_device",
    "set_eager_mode",
    "synchronize",
    "utilization",
]


def _extension() -> types.ModuleType:
    from torchtpu import _C

    return _C


def _devices() -> types.ModuleType:
    from torchtpu.runtime import devices

    return devices


# ---- life cycle -----------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Whether there is a TPU, or ``TORCHTPU_PLATFORM=cpu`` asks for XLA:CPU in its place.

    Without either the device still works, on XLA:CPU, but a program that looks for an accelerator should not take it
    for one.
    """
    return _devices().is_available()


def init() -> None:
    """Start the device. Making the first tensor does it too."""
    _extension().initialise()


def _lazy_init() -> None:
    _extension().initialise()


def is_initialized() -> bool:
    """Whether the device has been started in this process."""
    return _devices().is_initialised()


def _is_in_bad_fork() -> bool:
    return _devices().in_bad_fork()


def synchronize(device: Any = None) -> None:
    """Wait until everything enqueued on a device is done; raises the error of a program that failed."""
    index = _index.device_index(device)
    _check_index(index)
    _devices().synchronize(index)


# ---- selecting ------------------------------------------------------------------------------------------------------


def device_count() -> int:
    """Number of devices of this process. Starts nothing."""
    return _extension().device_count()


def current_device() -> int:
    """Index of the device current in this thread."""
    return _extension().current_device()


def set_device(device: Any) -> None:
    """Make a device current in this thread; no-op for a negative index."""
    _extension().exchange_device(_index.device_index(device, allow_none=False))


def _exchange_device(device: int) -> int:
    return _extension().exchange_device(device)


_maybe_exchange_device = _exchange_device


class device:
    """Context manager that makes a device current; None or a negative index changes nothing.

    Args:
        device: int, string or torch.device.
    """

    def __init__(self, device: Any):
        self.idx = -1 if device is None else _index.device_index(device)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = _exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _exchange_device(self.prev_idx)


class device_of(device):
    """Context manager that makes the device of a tensor or storage current; no change if it is not on a tpu."""

    def __init__(self, obj: Any):
        super().__init__(obj.device if obj.device.type == "tpu" else None)


# ---- describing -----------------------------------------------------------------------------------------------------


def _check_index(index: int) -> None:
    if not 0 <= index < device_count():
        raise RuntimeError(f"tpu: invalid device ordinal {index}: this process has {device_count()} tpu device(s)")


def get_device_name(device: Any = None) -> str:
    """ "TPU v5e" and the like; "XLA:CPU" on the host."""
    return _devices().device_name(_index.device_index(device))


def get_device_properties(device: Any = None) -> Any:
    """Name, memory, platform, coordinates in the slice and so on, as attributes."""
    return _devices().properties(_index.device_index(device))


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """(TPU generation, 0); (0, 0) on XLA:CPU. CUDA's capabilities have no counterpart here."""
    found = get_device_properties(device)
    return found.major, found.minor


def can_device_access_peer(device: Any, peer_device: Any) -> bool:
    """Whether data can go from one device to another directly: the runtime sends it between all of a process."""
    for index in (_index.device_index(device), _index.device_index(peer_device)):
        _check_index(index)
    return True


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: bfloat16 is what a TPU computes in."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """What ``torch.autocast("tpu")`` accepts."""
    return [torch.bfloat16, torch.float16]


def is_current_stream_capturing() -> bool:
    """False: there are no graphs to capture; compiled programs take their place."""
    return False


def utilization(device: Any = None) -> int:
    """Not available: the runtime does not report how busy a device is. A profile (torch.profiler, xprof) shows it."""
    raise NotImplementedError(
        "the tpu runtime does not report utilisation; measure it with a profile (torch.profiler, or xprof on a TPU VM)"
    )


# ---- operators that ran elsewhere, and how eager runs ---------------------------------------------------------------


def fallback_count() -> int:
    """How many operator calls ran on the CPU because the device has no lowering for them."""
    from torchtpu.eager import fallback

    return fallback.fallback_count()


def fallbacks() -> dict[str, int]:
    """Those operators and how often each was called."""
    from torchtpu.eager import fallback

    return fallback.fallbacks()


def compile_stats() -> dict[str, Any]:
    """What this process has compiled and why.

    Returns:
        ``compiles``, ``compile_seconds``, ``compile_processor_seconds`` (of all threads meanwhile), ``disk_hits``
        (programs found on disk instead) and ``disk_seconds`` (loading them) of all programs; of fused mode: ``flushes``
        (traces run), ``cache_hits`` (those that had been compiled), ``operators`` recorded, and ``misses``, the reasons
        of the latest compiles.
    """
    from torchtpu.eager import trace

    return trace.statistics()


def set_eager_mode(mode: str) -> Any:
    """Context manager: run a block in eager mode "fused", "strict" or "debug". `torch.tpu.eager_mode = ...` sets it."""
    from torchtpu.eager import modes

    return modes.set_eager_mode(mode)


class _DeviceModule(types.ModuleType):
    """A module with computed attributes that can be assigned to."""

    @property
    def eager_mode(self) -> str:
        from torchtpu.eager import modes

        return modes.get_mode()

    @eager_mode.setter
    def eager_mode(self, mode: str) -> None:
        from torchtpu.eager import modes

        modes.set_mode(mode)

    @property
    def default_generators(self) -> tuple[torch.Generator, ...]:
        return random.default_generators()

    @property
    def _initialized(self) -> bool:
        return is_initialized()


sys.modules[__name__].__class__ = _DeviceModule
