"""Factories and operators that only change metadata."""

import pytest
import torch


def test_empty_has_the_geometry_asked_for():
    x = torch.empty(2, 3, 4, 5, dtype=torch.bfloat16, device="tpu", memory_format=torch.channels_last)
    assert x.is_contiguous(memory_format=torch.channels_last)
    assert x.dtype is torch.bfloat16
    y = torch.empty_strided((2, 3), (1, 4), device="tpu")
    assert y.stride() == (1, 4) and y.untyped_storage().nbytes() == 4 * (1 + 1 + 2 * 4)


def test_the_current_device_is_the_default(two_devices):
    with torch.tpu.device(1):
        assert torch.empty(1, device="tpu").device.index == 1
        assert torch.empty(1, device="tpu:0").device.index == 0
    assert torch.empty(1, device="tpu").device.index == 0


def test_errors_of_factories():
    with pytest.raises(RuntimeError, match="negative dimension"):
        torch.empty(-1, device="tpu")
    with pytest.raises(NotImplementedError, match="strided"):
        torch.empty(2, 2, device="tpu", layout=torch.jagged)
    with pytest.raises(RuntimeError, match="invalid device ordinal 100"):
        torch.empty(1, device="tpu:100")


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.as_strided((2, 2), (1, 3), 1),
        lambda x: x.view(2, -1),
        lambda x: x.reshape(8, 3),
        lambda x: x.unfold(0, 2, 1),
        lambda x: x.transpose(0, 1)[1:, ::2],
        lambda x: x.expand(2, 4, 6),
        lambda x: x.diagonal(),
        lambda x: x.unsqueeze(1).squeeze(1),
        lambda x: x.view(torch.int16),
        lambda x: torch.view_as_complex(x.view(4, 3, 2)),
        lambda x: (
            torch.view_as_real(x.to(torch.complex64))
            if x.device.type == "cpu"
            else torch.view_as_real(torch.empty(4, 6, dtype=torch.complex64, device="tpu"))
        ),
    ],
)
def test_views_have_the_geometry_of_cpu(view):
    here, cpu = view(torch.empty(4, 6, device="tpu")), view(torch.empty(4, 6))
    assert (here.shape, here.stride(), here.storage_offset(), here.dtype) == (
        cpu.shape,
        cpu.stride(),
        cpu.storage_offset(),
        cpu.dtype,
    )


def test_resize_grows_and_never_shrinks_the_storage():
    x = torch.empty(2, 3, device="tpu")
    assert x.resize_(4, 5).shape == (4, 5)
    assert x.untyped_storage().nbytes() == 80
    assert x.resize_(1).untyped_storage().nbytes() == 80
    assert x.resize_((1, 2, 2, 2), memory_format=torch.channels_last).stride() == (8, 1, 4, 2)
    with pytest.raises(RuntimeError, match="negative dimension"):
        x.resize_(-2)


def test_set():
    source = torch.empty(10, device="tpu")
    x = torch.empty(0, device="tpu")
    x.set_(source)
    assert x.is_set_to(source)
    x.set_(source.untyped_storage(), 2, (2, 3), (3, 1))
    assert (x.shape, x.stride(), x.storage_offset()) == ((2, 3), (3, 1), 2)
    x.set_(source.untyped_storage())
    assert x.shape == (10,)
    x.set_()
    assert x.shape == (0,) and x.untyped_storage().nbytes() == 0
    with pytest.raises(RuntimeError, match="device"):
        x.set_(torch.empty(3).untyped_storage(), 0, (3,), (1,))


def test_untyped_storage():
    assert torch.UntypedStorage(16, device="tpu").nbytes() == 16
