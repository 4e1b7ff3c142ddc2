"""Prove a plan's numerics: the same step, laid out by the same plan on a few emulated devices, against PyTorch CPU."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh

from torchtpu.aot.graph import capture
from torchtpu.aot.layout import Layout
from torchtpu.aot.step import ADAMW, Step, build_step
from torchtpu.integrations import experts
from torchtpu.lowering.dtypes import to_jax
from torchtpu.sharding import Plan
from torchtpu.zoo import ModelSource

__all__ = ["LIMIT", "Proof", "emulate", "prove"]

LIMIT = 1e-4
"""Largest difference, relative to the largest gradient of a parameter, that counts as equal in float32."""
_NOTHING = 1e-4
"""A gradient so much smaller than the largest is rounding: that of a key's bias, which softmax does not see."""


@dataclass
class Proof:
    """What came of it.

    Attributes:
        plan: the plan as it ran.
        devices: how many were emulated.
        loss: of the step on the devices.
        expected: PyTorch CPU's.
        worst: (parameter, largest difference of its gradient relative to its largest gradient), the worst first.
    """

    plan: Plan
    devices: int
    loss: float
    expected: float
    worst: list[tuple[str, float]]

    @property
    def ok(self) -> bool:
        """Whether loss and gradients are equal."""
        return math.isclose(self.loss, self.expected, rel_tol=LIMIT) and all(e <= LIMIT for _, e in self.worst)

    def text(self) -> str:
        """For people."""
        mesh = " x ".join(f"{a}={n}" for a, n in self.plan.mesh.items())
        lines = [
            f"plan {self.plan.name or 'given'} as {mesh} on {self.devices} emulated devices, float32",
            f"  loss {self.loss:.7g}, PyTorch CPU {self.expected:.7g}",
        ]
        lines += [f"  gradient of {name}: differs by {e:.1e} of its largest" for name, e in self.worst[:3]]
        lines.append("equal to PyTorch CPU" if self.ok else f"NOT equal to PyTorch CPU (limit {LIMIT:.0e})")
        return "\n".join(lines)


def emulate(devices: int) -> None:
    """Let XLA:CPU be so many devices; before anything has used JAX in this process.

    Raises:
        RuntimeError: JAX runs already with fewer.
    """
    try:
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError:
        if len(jax.devices("cpu")) < devices:
            raise


def prove(source: ModelSource, plan: Plan, *, batch: int, seq: int, seed: int = 0) -> Proof:
    """Run one training step of a model by a plan on emulated devices and compare loss and gradients with PyTorch CPU.

    The model is in evaluation mode: dropout draws other numbers on other devices.

    Args:
        source: the model; its ``tiny()`` is built with random weights in float32.
        plan: how it is divided. Tokens that travel to experts are all kept, whatever its capacity, since dropping
            them is not what PyTorch does.
        batch: samples.
        seq: tokens of each.
        seed: of the weights.

    Raises:
        PlanError: the plan does not divide the model.
        RuntimeError: there are fewer devices than the plan's mesh has.
    """
    small = source.tiny()
    model = small.build("cpu", torch.float32, seed).eval()
    meta = small.build("meta", torch.float32).eval()
    inputs = small.example_inputs("train", batch, seq, "cpu", torch.float32)
    experts.use(meta)
    without = {"use_cache": False} if hasattr(model, "config") and hasattr(model.config, "use_cache") else {}
    shapes = {k: x.to("meta") if isinstance(x, torch.Tensor) else x for k, x in inputs.items()}
    graph = capture(meta, {**shapes, **without})
    plan = dataclasses.replace(plan, capacity=None)
    found = jax.devices("cpu")
    if len(found) < plan.devices:
        raise RuntimeError(f"the plan needs {plan.devices} emulated devices, and there are {len(found)}")
    mesh = Mesh(np.array(found[: plan.devices]).reshape(tuple(plan.mesh.values())), tuple(plan.mesh))
    step = build_step(graph, Layout(plan, mesh, "cpu"), "train")
    state, results = _run(step, model, inputs)
    outputs = model(**inputs, **without)
    loss = small.loss(outputs)
    loss.backward()
    return Proof(plan, plan.devices, float(results["loss"]), float(loss.detach()), _differences(step, state, model))


def _run(step: Step, model: torch.nn.Module, inputs: Any) -> Any:
    """One step with the model's own weights and inputs."""
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values = {v.name: v for v in step.evaluator.values}
    with jax.enable_x64(True):

        def array(name: str, of: Any) -> Any:
            value = values[name]
            parts = [_numpy(held[m]) for m in value.members]
            return jax.device_put(np.stack(parts) if value.stacked else parts[0], of.sharding)

        state = jax.tree.map(lambda t: jax.device_put(np.zeros(t.shape, t.dtype), t.sharding), step.state)
        for part in ("parameters", "buffers"):
            state[part] = {name: array(name, of) for name, of in step.state[part].items()}
        batch = {
            name: jax.device_put(
                np.zeros(of.shape, of.dtype) if name == "seed" else _numpy(inputs[name]).astype(of.dtype), of.sharding
            )
            for name, of in step.batch.items()
        }
        return step.jitted()(state, batch)


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().contiguous()
    return (
        flat.view(torch.uint8).numpy().view(to_jax(tensor.dtype)).reshape(tensor.shape) if flat.ndim else flat.numpy()
    )


def _differences(step: Step, state: Any, model: torch.nn.Module) -> list[tuple[str, float]]:
    """The first moment after one step is the gradient times (1 - beta1)."""
    weights = dict(model.named_parameters(remove_duplicate=False))
    least = _NOTHING * max(float(p.grad.abs().max()) for p in weights.values() if p.grad is not None)
    found = []
    for value in step.evaluator.values:
        if value.name not in state["m"]:
            continue
        moments = np.asarray(state["m"][value.name]) / (1 - ADAMW["beta1"])
        for i, member in enumerate(value.members):
            gradient = weights[member].grad
            actual = moments[i] if value.stacked else moments
            expected = np.zeros_like(actual) if gradient is None else gradient.numpy()
            scale = max(float(np.abs(expected).max()), least)
            found.append((member, float(np.abs(actual - expected).max()) / scale))
    return sorted(found, key=lambda x: -x[1])
