"""What Dynamo knows of the device. PyTorch has an interface of its own for "tpu", for one device without streams.

Import this only once Dynamo is imported: it is expensive to import.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo import device_interface

from torchtpu.device._index import device_index


class TpuInterface(device_interface.DeviceInterface):
    """torch.tpu in the shape Dynamo asks for."""

    device = torch.tpu.device
    Event = torch.tpu.Event
    Stream = torch.tpu.Stream
    current_device = staticmethod(torch.tpu.current_device)
    set_device = staticmethod(torch.tpu.set_device)
    device_count = staticmethod(torch.tpu.device_count)
    is_available = staticmethod(torch.tpu.is_available)
    stream = staticmethod(torch.tpu.stream)
    current_stream = staticmethod(torch.tpu.current_stream)
    set_stream = staticmethod(torch.tpu.set_stream)
    synchronize = staticmethod(torch.tpu.synchronize)
    get_device_properties = staticmethod(torch.tpu.get_device_properties)
    memory_allocated = staticmethod(torch.tpu.memory_allocated)
    exchange_device = staticmethod(torch.tpu._exchange_device)
    maybe_exchange_device = staticmethod(torch.tpu._exchange_device)

    class Worker:
        """Device questions of compile workers, which must not start the device."""

        @staticmethod
        def set_device(device: int) -> None:
            torch.tpu.set_device(device)

        @staticmethod
        def current_device() -> int:
            return torch.tpu.current_device()

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            return torch.tpu.get_device_properties(device)

    @staticmethod
    def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
        torch.tpu.set_stream(torch.tpu.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

    @staticmethod
    def get_raw_stream(device_idx: int) -> int:
        return torch.tpu.current_stream(device_idx).stream_id

    @staticmethod
    def get_compute_capability(device: Any = None) -> str:
        return torch.tpu.get_device_name(device_index(device))

    @staticmethod
    def is_bf16_supported(including_emulation: bool = False) -> bool:
        return torch.tpu.is_bf16_supported(including_emulation)

    @classmethod
    def is_dtype_supported(cls, dtype: torch.dtype, including_emulation: bool = False) -> bool:
        return including_emulation or dtype not in (torch.float64, torch.complex128)


def register() -> None:
    """Make Dynamo use TpuInterface for "tpu" and "tpu:N"."""
    device_interface.get_registered_device_interfaces()  # PyTorch registers its own on the first question
    device_interface.register_interface_for_device("tpu", TpuInterface)
    for i in range(torch.tpu.device_count()):
        device_interface.register_interface_for_device(f"tpu:{i}", TpuInterface)
