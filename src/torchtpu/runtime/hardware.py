"""Which accelerators this machine has, told from device files alone: no driver is opened, nothing initialised."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

GOOGLE_VENDOR = "0x1ae0"

# PCI device id of a TPU chip: (generation, devices PJRT makes of one chip).
TPU_CHIPS = {
    "0x0027": ("v3", 2),  # v2 has the same id
    "0x005e": ("v4", 1),
    "0x0062": ("v5p", 1),
    "0x0063": ("v5e", 1),
    "0x006f": ("v6e", 1),
    "0x0076": ("v7x", 2),
}


@dataclass(frozen=True)
class Chip:
    """A TPU chip on the PCI bus.

    Attributes:
        address: such as ``"0000:00:04.0"``.
        device: its PCI device id, a key of ``TPU_CHIPS``.
        driver: the kernel driver it is bound to; None if there is none.
    """

    address: str
    device: str
    driver: str | None


def device_nodes(root: str | Path = "/") -> list[Path]:
    """The files through which a process reaches TPU chips, as this machine or container has them."""
    dev = Path(root) / "dev"
    return sorted([*dev.glob("accel[0-9]*"), *dev.glob("vfio/[0-9]*")])


def pci_chips(root: str | Path = "/") -> list[Chip]:
    """The TPU chips on the PCI bus, whether or not they can be reached: a container sees its host's bus."""
    found = []
    for vendor in sorted((Path(root) / "sys/bus/pci/devices").glob("*/vendor")):
        folder = vendor.parent
        if _read(vendor) == GOOGLE_VENDOR and (device := _read(folder / "device")) in TPU_CHIPS:
            driver = folder / "driver"
            found.append(Chip(folder.name, device, os.readlink(driver).split("/")[-1] if driver.is_symlink() else None))
    return found


def tpu_chips(root: str | Path = "/") -> list[str]:
    """PCI device ids of the TPU chips attached to this machine; empty if there is none.

    Args:
        root: where ``dev`` and ``sys`` are; other than "/" in tests.
    """
    if not device_nodes(root):  # what nearly every machine is: do not walk sysfs
        return []
    return [chip.device for chip in pci_chips(root)]


def tpu_devices(root: str | Path = "/") -> int:
    """How many devices PJRT will make of the attached chips this process may use."""
    chips = tpu_chips(root)
    if not chips:
        return 0
    visible = os.environ.get("TPU_VISIBLE_CHIPS") or os.environ.get("TPU_VISIBLE_DEVICES")
    if visible:
        chips = chips[: len([part for part in visible.split(",") if part.strip()])]
    return sum(TPU_CHIPS[chip][1] for chip in chips)


def other_accelerator(root: str | Path = "/") -> str | None:
    """The accelerator that this build of torch can use on this machine ("cuda", "xpu", "mps"), if there is one.

    Looks at the build and at device files only: asking ``torch.cuda.is_available()`` could initialise CUDA, after which
    the process cannot fork.
    """
    import torch

    dev = Path(root) / "dev"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1")
    if torch.version.cuda and not hidden and any((dev / name).exists() for name in ("nvidiactl", "nvidia0", "dxg")):
        return "cuda"
    if torch.version.hip and (dev / "kfd").exists():
        return "cuda"
    if getattr(torch.version, "xpu", None) and any(dev.glob("dri/renderD*")):
        return "xpu"
    if sys.platform == "darwin" and torch.backends.mps.is_built():
        return "mps"
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # a device can go away while its folder is read
        return ""
