"""torch.accelerator, which speaks to the device through C++ only."""

import pytest
import torch


def test_identity():
    assert torch.accelerator.current_accelerator() == torch.device("tpu")
    assert torch.accelerator.is_available()
    assert torch.accelerator.device_count() == torch.tpu.device_count()


def test_device_index(two_devices):
    torch.accelerator.set_device_index(1)
    assert torch.accelerator.current_device_index() == torch.tpu.current_device() == 1
    torch.accelerator.set_device_index("tpu:0")
    with torch.accelerator.device_index(1):
        assert torch.tpu.current_device() == 1
    assert torch.tpu.current_device() == 0
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.accelerator.set_device_index(100)


def test_streams_and_waiting():
    stream = torch.Stream("tpu")
    torch.accelerator.set_stream(stream)
    assert torch.accelerator.current_stream() == stream
    torch.accelerator.set_stream(torch.tpu.default_stream())
    torch.accelerator.synchronize()
    start, end = (torch.Event("tpu", enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0


def test_memory():
    torch.tpu.init()
    x = torch.empty(100, device="tpu")
    assert torch.accelerator.memory_allocated() == torch.tpu.memory_allocated() >= x.nbytes
    assert torch.accelerator.max_memory_allocated() >= torch.accelerator.memory_allocated()
    assert torch.accelerator.memory_reserved() == torch.tpu.memory_reserved()
    assert torch.accelerator.max_memory_reserved() >= torch.accelerator.memory_reserved()
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    torch.accelerator.empty_cache()


def test_capability_lists_dtypes():
    supported = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.complex64, torch.bool} <= supported
    assert torch.complex32 not in supported
