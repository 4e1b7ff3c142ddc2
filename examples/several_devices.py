"""Several devices in one process: a model whose layers live on four devices trains as it does on one.

    python examples/several_devices.py

On a machine without TPUs, TORCHTPU_CPU_DEVICES makes XLA:CPU pretend to be several. It is read when the device starts.
"""

import os

os.environ.setdefault("TORCHTPU_CPU_DEVICES", "4")

import torch
from torch import nn

WIDTH = 64


class Pipeline(nn.Module):
    """Equal blocks, one a device; activations are copied from each device to the next."""

    def __init__(self, devices: list[str]):
        super().__init__()
        self.devices = devices
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()).to(d) for d in devices)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for device, block in zip(self.devices, self.blocks, strict=True):
            x = block(x.to(device))
        return x


def train(devices: list[str], steps: int = 5) -> list[float]:
    """Losses of a few steps of gradient descent."""
    torch.manual_seed(0)
    model = Pipeline(devices)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    x, target = torch.randn(32, WIDTH), torch.randn(32, WIDTH)
    losses = []
    for _ in range(steps):
        loss = nn.functional.mse_loss(model(x), target.to(devices[-1]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    count = torch.tpu.device_count()
    devices = [f"tpu:{i}" for i in range(count)]
    print(f"{count} devices: {', '.join(devices)} ({torch.tpu.get_device_name(0)})")
    spread, cpu = train(devices), train(["cpu"] * count)
    for step, (ours, theirs) in enumerate(zip(spread, cpu, strict=True)):
        print(f"step {step}  loss on the devices {ours:.6f}  on PyTorch CPU {theirs:.6f}")
    torch.testing.assert_close(spread, cpu, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    main()
