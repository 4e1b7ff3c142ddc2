"""Guard, selection, description, streams and events."""

import threading

import pytest
import torch


def test_the_module_is_registered():
    assert torch.get_device_module("tpu") is torch.tpu
    assert torch.device("tpu").type == "tpu"
    assert torch.empty(1, device="tpu").is_tpu


def test_selecting_a_device(two_devices):
    assert torch.tpu.current_device() == 0
    with torch.tpu.device("tpu:1"):
        assert torch.tpu.current_device() == 1
        with torch.tpu.device(None), torch.tpu.device(-1):
            assert torch.tpu.current_device() == 1
    assert torch.tpu.current_device() == 0
    torch.tpu.set_device(torch.device("tpu:1"))
    torch.tpu.set_device(-1)
    assert torch.tpu.current_device() == 1
    torch.tpu.set_device(0)
    with torch.tpu.device_of(torch.empty(1, device="tpu:1")):
        assert torch.tpu.current_device() == 1
    with torch.tpu.device_of(torch.empty(1)):
        assert torch.tpu.current_device() == 0


def test_the_current_device_belongs_to_the_thread(two_devices):
    seen = []
    with torch.tpu.device(1):
        thread = threading.Thread(target=lambda: seen.append(torch.tpu.current_device()))
        thread.start()
        thread.join()
    assert seen == [0]


@pytest.mark.parametrize("index", [100, 300])
def test_an_invalid_ordinal_raises(index):
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.tpu.set_device(index)
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.tpu.synchronize(index)


def test_another_device_is_refused():
    with pytest.raises(ValueError, match="Expected a tpu device"):
        torch.tpu.set_device("cpu")


def test_description():
    assert torch.tpu.is_available()
    name = torch.tpu.get_device_name()
    properties = torch.tpu.get_device_properties("tpu:0")
    assert properties.name == name and properties.total_memory > 0 and properties.multi_processor_count >= 1
    assert torch.tpu.get_device_capability() == (properties.major, properties.minor)
    assert torch.tpu.can_device_access_peer(0, torch.tpu.device_count() - 1)
    assert torch.tpu.is_bf16_supported()
    assert not torch.tpu.is_current_stream_capturing()
    with pytest.raises(NotImplementedError, match="profile"):
        torch.tpu.utilization()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("TPU v2", "TPU v2"),
        ("TPU v3", "TPU v3"),
        ("TPU v4", "TPU v4"),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5e", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v5p", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU v6e", "TPU v6e"),
        ("TPU7x", "TPU v7x"),
        ("something new", "something new"),
    ],
)
def test_names_of_chips(kind, name):
    from torchtpu.runtime import devices

    assert devices._tpu_name(kind) == name


def test_everything_public_exists():
    assert [name for name in torch.tpu.__all__ if not hasattr(torch.tpu, name)] == []
    assert torch.tpu._initialized is torch.tpu.is_initialized()
    assert torch.tpu.fallback_count() == sum(torch.tpu.fallbacks().values())


def test_streams():
    start = torch.tpu.current_stream()
    assert start == torch.tpu.default_stream()
    other = torch.tpu.Stream(priority=-1)
    assert isinstance(other, torch.Stream) and other != start and other.device.type == "tpu"
    with torch.tpu.stream(other) as current:
        assert current is other and torch.tpu.current_stream() == other
        with torch.tpu.stream(None):
            assert torch.accelerator.current_stream() == other
    assert torch.tpu.current_stream() == start
    other.wait_stream(start)
    other.synchronize()
    assert other.query()


def test_a_stream_selects_its_device(two_devices):
    stream = torch.tpu.Stream("tpu:1")
    with torch.tpu.stream(stream):
        assert torch.tpu.current_device() == 1 and torch.tpu.current_stream() == stream
    assert torch.tpu.current_device() == 0
    assert torch.tpu.current_stream(1) == torch.tpu.default_stream(1)


def test_events():
    start, end = torch.tpu.Event(enable_timing=True), torch.tpu.Event(enable_timing=True)
    assert isinstance(start, torch.Event) and start.query()
    start.record()
    end.record(torch.tpu.Stream())
    end.synchronize()
    assert end.query()
    assert 0 <= start.elapsed_time(end) < 10_000
    torch.tpu.current_stream().wait_event(end)
    plain = torch.tpu.current_stream().record_event()
    plain.wait()
    with pytest.raises((RuntimeError, ValueError), match="timing"):
        start.elapsed_time(plain)


def test_waiting_covers_what_was_noted():
    import jax.numpy as jnp

    from torchtpu.runtime import devices

    torch.tpu.init()
    array = jnp.ones((300, 300)) @ jnp.ones((300, 300))
    devices.note(0, array)
    event = torch.tpu.Event()
    event.record()
    event.synchronize()
    torch.tpu.synchronize()
    assert array.is_ready() and event.query() and devices.query(0)
    assert len(devices._state.pending[0]) == 0
    devices._fence(devices.device(0))


@pytest.mark.parametrize("wait", ["device", "event", "accelerator"])
def test_waiting_raises_failed_checks(wait):
    import jax.numpy as jnp

    from torchtpu.runtime import checks

    torch.tpu.init()
    event = torch.tpu.Event()
    checks.note(jnp.asarray([77]), (("index {value} is out of range", IndexError),), "test")
    event.record()
    action = {"device": torch.tpu.synchronize, "event": event.synchronize, "accelerator": torch.accelerator.synchronize}
    with pytest.raises(IndexError, match="index 77 is out of range"):
        action[wait]()
    torch.tpu.synchronize()


def test_deferred_work_is_enqueued_before_waiting():
    from torchtpu.runtime import devices

    torch.tpu.init()
    calls = []
    devices.on_flush(calls.append)
    try:
        torch.tpu.synchronize()
        assert calls == [0]
        torch.tpu.Event().record()
        assert calls == [0, 0]
    finally:
        devices._flushers.remove(calls.append)


def test_dynamo_interface():
    from torch._dynamo.device_interface import get_interface_for_device

    from torchtpu.device import dynamo

    dynamo.register()
    interface = get_interface_for_device("tpu")
    assert interface is get_interface_for_device("tpu:0") is dynamo.TpuInterface
    assert interface.is_available() and interface.current_device() == 0
    assert interface.current_stream() == torch.tpu.current_stream()
    assert interface.Worker.get_device_properties().total_memory > 0
    with interface.device(0):
        interface.synchronize()
