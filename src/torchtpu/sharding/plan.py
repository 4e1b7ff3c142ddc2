"""A sharding plan: a mesh, and rules that give each parameter and activation its axes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["Plan", "PlanError", "Rule", "Spec"]

Spec = tuple[tuple[str, ...], ...]
"""For each dimension of a tensor, the mesh axes that divide it, the slowest first; none for a dimension kept whole."""


class PlanError(ValueError):
    """A plan that cannot be, or does not fit a tensor; the message names the tensor and the axis."""


@dataclass(frozen=True)
class Rule:
    """What the plan says of some tensors.

    Attributes:
        pattern: a regular expression, searched in the dotted name of a parameter or of a module. Numbers of layers are
            part of the name, so that a rule may be for some of them.
        spec: axes by dimension; the dimensions after the last one are kept whole.
        given: whether the axes were asked for by name. What a preset proposes is left out where it does not divide.
    """

    pattern: str
    spec: Spec
    given: bool = True


@dataclass(frozen=True)
class Plan:
    """How a model is divided over a mesh.

    Attributes:
        mesh: sizes of the axes by name, the slowest first; their product is the number of devices.
        parameters: rules for parameters and buffers; the first that matches holds.
        activations: rules for the results of modules, by the module's name.
        batch: axes that divide the batch.
        sequence: axes that divide the sequence between layers, dimension 1 of hidden states (sequence parallelism).
        heads: axes that divide the heads of attention.
        gathered: axes over which a parameter is stored divided and gathered when it is used (FSDP). A parameter's
            largest dimension that they divide is divided over them besides what its rule says.
        experts: axis that divides the experts of a mixture; tokens travel to them by all-to-all.
        capacity: tokens that each pair of devices may exchange for the experts, as a multiple of the mean; those over
            it are dropped. None keeps every token, with room for the worst case.
    """

    mesh: Mapping[str, int]
    parameters: tuple[Rule, ...] = ()
    activations: tuple[Rule, ...] = ()
    batch: tuple[str, ...] = ()
    sequence: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    experts: str | None = None
    capacity: float | None = None
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for axis, size in self.mesh.items():
            if not re.fullmatch(r"[A-Za-z_]\w*", axis) or not isinstance(size, int) or size < 1:
                raise PlanError(
                    f"the mesh has an axis {axis!r} of size {size!r}: name it with letters, size at least 1"
                )
        used = [*self.batch, *self.sequence, *self.heads, *self.gathered, *([self.experts] if self.experts else [])]
        used += [a for r in (*self.parameters, *self.activations) for axes in r.spec for a in axes]
        unknown = sorted({a for a in used if a not in self.mesh})
        if unknown:
            raise PlanError(f"the plan uses {', '.join(unknown)}, but the mesh has {', '.join(self.mesh) or 'no axis'}")
        if self.capacity is not None and self.capacity <= 0:
            raise PlanError(f"capacity is {self.capacity}: it is a multiple of the mean, such as 1.25, or null")
        for rule in (*self.parameters, *self.activations):
            flat = [a for axes in rule.spec for a in axes]
            twice = sorted({a for a in flat if flat.count(a) > 1})
            if twice:
                raise PlanError(f"the rule {rule.pattern!r} divides by {', '.join(twice)} twice")
            try:
                re.compile(rule.pattern)
            except re.error as error:
                raise PlanError(f"{rule.pattern!r} is not a regular expression: {error}") from error

    @property
    def devices(self) -> int:
        """Devices of the mesh."""
        return math.prod(self.mesh.values())

    def size(self, axes: Sequence[str]) -> int:
        """The number of parts that some axes make."""
        return math.prod(self.mesh[a] for a in axes)

    def bytes(self, shape: Sequence[int], itemsize: int, spec: Spec) -> int:
        """Bytes of a device's part of a tensor, the last part's padding included."""
        return -(-math.prod(shape) * itemsize // math.prod(self.size(axes) for axes in spec))

    def spec(self, name: str, shape: Sequence[int]) -> Spec:
        """Axes by dimension of a parameter.

        Args:
            name: its dotted name.
            shape: its sizes.

        Raises:
            PlanError: a rule that was given does not divide it.
        """
        spec = self._ruled(name, shape)
        rest = tuple(a for a in self.gathered if all(a not in axes for axes in spec))
        parts = self.size(rest)
        if parts == 1:
            return spec
        # The largest part divides most evenly into tiles, and the biggest saving is there.
        for i in sorted(range(len(shape)), key=lambda i: (-shape[i] // self.size(spec[i]), i)):
            if shape[i] % (parts * self.size(spec[i])) == 0:
                return (*spec[:i], (*spec[i], *rest), *spec[i + 1 :])
        return spec

    def used(self, name: str, shape: Sequence[int]) -> Spec:
        """Axes by dimension that a parameter still has once it is gathered for use."""
        return tuple(tuple(a for a in axes if a not in self.gathered) for axes in self.spec(name, shape))

    def activation(self, module: str, shape: Sequence[int]) -> Spec | None:
        """Axes by dimension of a module's result, or None where the plan says nothing.

        Raises:
            PlanError: a rule that was given does not divide it.
        """
        rule = next((r for r in self.activations if re.search(r.pattern, module)), None)
        return None if rule is None else self._fitted(f"the result of {module}", shape, rule)

    def _ruled(self, name: str, shape: Sequence[int]) -> Spec:
        rule = next((r for r in self.parameters if re.search(r.pattern, name)), None)
        return ((),) * len(shape) if rule is None else self._fitted(name, shape, rule)

    def _fitted(self, name: str, shape: Sequence[int], rule: Rule) -> Spec:
        if len(rule.spec) > len(shape):
            if not rule.given:
                return ((),) * len(shape)
            raise PlanError(f"{name} has {len(shape)} dimensions, but the rule {rule.pattern!r} names {len(rule.spec)}")
        spec = list(rule.spec) + [()] * (len(shape) - len(rule.spec))
        for i, axes in enumerate(spec):
            if shape[i] % self.size(axes):
                if rule.given:
                    raise PlanError(
                        f"{name} is {list(shape)}: dimension {i} ({shape[i]}) does not divide over "
                        f"{' x '.join(f'{a}={self.mesh[a]}' for a in axes)} (rule {rule.pattern!r})"
                    )
                spec[i] = ()
        return tuple(spec)

    def scaled(self, devices: int) -> Plan:
        """The same plan on few devices, to try it on emulated ones: axes are halved, the largest first.

        Raises:
            PlanError: the number is not one that halving reaches.
        """
        mesh = dict(self.mesh)
        while math.prod(mesh.values()) > devices:
            axis = max(mesh, key=lambda a: mesh[a])
            if mesh[axis] % 2:
                break
            mesh[axis] //= 2
        if math.prod(mesh.values()) != devices:
            raise PlanError(f"a mesh of {dict(self.mesh)} cannot be halved to {devices} devices")
        return replace(self, mesh=mesh)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, which ``from_dict`` reads."""
        rules = lambda some: [[r.pattern, [list(axes) for axes in r.spec]] for r in some]  # noqa: E731
        return {
            "mesh": dict(self.mesh),
            "parameters": rules(self.parameters),
            "activations": rules(self.activations),
            **{k: list(getattr(self, k)) for k in ("batch", "sequence", "heads", "gathered")},
            "experts": self.experts,
            "capacity": self.capacity,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], name: str = "") -> Plan:
        """A plan from plain data: ``{"mesh": {"fsdp": 4, "tp": 2}, "parameters": [["q_proj", ["tp", "fsdp"]]], …}``.

        A dimension's axes are a name, a list of names, or null.

        Raises:
            PlanError: a part is missing or of another form.
        """
        known = {"mesh", "parameters", "activations", "batch", "sequence", "heads", "gathered", "experts", "capacity"}
        unknown = sorted(set(data) - known)
        if unknown:
            raise PlanError(f"a plan has no {', '.join(map(repr, unknown))}; its parts are {', '.join(sorted(known))}")
        if not isinstance(data.get("mesh"), Mapping):
            raise PlanError('a plan needs "mesh": the sizes of its axes by name, such as {"fsdp": 4, "tp": 2}')
        try:
            return cls(
                mesh=dict(data["mesh"]),
                parameters=tuple(Rule(p, tuple(map(_axes, s))) for p, s in data.get("parameters", ())),
                activations=tuple(Rule(p, tuple(map(_axes, s))) for p, s in data.get("activations", ())),
                **{k: _axes(data.get(k)) for k in ("batch", "sequence", "heads", "gathered")},
                experts=data.get("experts"),
                capacity=data.get("capacity"),
                name=name,
            )
        except (TypeError, ValueError) as error:
            if isinstance(error, PlanError):
                raise
            raise PlanError(
                f'the plan is not of the form {{"parameters": [[pattern, [axes of each dimension]]]}}: {error}'
            ) from error

    @classmethod
    def load(cls, path: str) -> Plan:
        """A plan from a JSON file.

        Raises:
            PlanError: it is not one; the message says why.
        """
        try:
            with open(path, encoding="utf-8") as file:
                data = json.load(file)
        except (OSError, ValueError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from error
        if not isinstance(data, Mapping):
            raise PlanError(f"the plan {path} is not a JSON object")
        return cls.from_dict(data, path)


def _axes(given: Any) -> tuple[str, ...]:
    if given is None:
        return ()
    axes = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(a, str) for a in axes):
        raise PlanError(f"{given!r} is not the name of an axis, a list of names, or null")
    return axes
