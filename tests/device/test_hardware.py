"""Recognising accelerators from device files, on made-up machines."""

import pytest

from torchtpu.runtime import hardware


@pytest.fixture
def machine(tmp_path):
    """A function that makes files below the root of a made-up machine."""

    def make(**files):
        for name, content in files.items():
            path = tmp_path / name.replace("__", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
        return tmp_path

    return make


def chip(number, device, vendor="0x1ae0"):
    folder = f"sys__bus__pci__devices__0000:00:0{number}.0__"
    return {f"{folder}vendor": f"{vendor}\n", f"{folder}device": f"{device}\n"}


def test_no_accelerator(machine):
    root = machine(dev__null="")
    assert hardware.tpu_chips(root) == []
    assert hardware.tpu_devices(root) == 0


@pytest.mark.parametrize("node", ["dev__accel0", "dev__vfio__0"])
def test_tpu_by_either_driver(machine, node):
    root = machine(**{node: ""}, **chip(4, "0x0063"), **chip(5, "0x0063"))
    assert hardware.tpu_chips(root) == ["0x0063"] * 2
    assert hardware.tpu_devices(root) == 2


def test_chips_with_two_devices(machine, monkeypatch):
    root = machine(dev__vfio__0="", **chip(4, "0x0076"), **chip(5, "0x0076"))
    assert hardware.tpu_devices(root) == 4
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "1")
    assert hardware.tpu_devices(root) == 2


def test_other_vendors_accelerators_are_not_tpus(machine):
    assert hardware.tpu_chips(machine(dev__accel0="", **chip(4, "0x0063", vendor="0x8086"))) == []


def test_google_devices_that_are_not_tpus(machine):
    assert hardware.tpu_chips(machine(dev__vfio__0="", **chip(4, "0x0042"))) == []


def test_cuda_needs_a_build_and_a_device(machine, monkeypatch):
    import torch

    root = machine(dev__nvidiactl="")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert hardware.other_accelerator(root) is None
    monkeypatch.setattr(torch.version, "cuda", "12.9")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert hardware.other_accelerator(root) == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.other_accelerator(root) is None
