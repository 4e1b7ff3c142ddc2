"""Compiled steps on disk, for XLA:CPU: they run as the step they were made of, and are refused where they cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.sharding import Mesh

from torchtpu.aot import saved
from torchtpu.aot.graph import capture
from torchtpu.aot.layout import Layout
from torchtpu.aot.saved import SavedError, load
from torchtpu.aot.step import Step, build_step
from torchtpu.sharding import preset


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = torch.nn.Embedding(6, 8), torch.nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.linear(self.table(ids)).square().mean()}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Step]:
    """A folder with a training step for two devices, and the step."""
    graph = capture(Model().to("meta"), {"ids": torch.empty(2, 3, dtype=torch.int64, device="meta")})
    mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("fsdp",))
    step = build_step(graph, Layout(preset({"fsdp": 2}), mesh, "cpu"), "train")
    folder = tmp_path_factory.mktemp("saved")
    with jax.enable_x64(True):
        executable = step.jitted().lower(step.state, step.batch).compile().runtime_executable()
        (folder / saved.EXECUTABLE).write_bytes(executable.serialize())
        saved.write_manifest(folder, step, "cpu:2", "a model", (), platform="cpu")
    return folder, step


def arrays(step: saved.SavedStep) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    found = {
        name: rng.random(shape).astype(dtype) if dtype == "float32" else np.zeros(shape, dtype)
        for name, (shape, dtype) in step.arguments.items()
    }
    return found | {"ids": np.array([[0, 1, 2], [3, 4, 5]])}


def test_runs_as_the_step_it_was_made_of(made: tuple[Path, Step]) -> None:
    folder, step = made
    loaded = load(folder)
    assert loaded.arguments["parameters.table.weight"] == ((6, 8), "float32")
    assert loaded.arguments["ids"] == ((2, 3), "int32") and loaded.manifest["topology"] == "cpu:2"
    given = arrays(loaded)
    state: dict[str, Any] = {
        part: types if part == "count" else {name: given[f"{part}.{name}"] for name in types}
        for part, types in step.state.items()
    }
    with jax.enable_x64(True):
        placed = jax.tree.map(
            lambda x, t: jax.device_put(x, t.sharding), {**state, "count": given["count"]}, step.state
        )
        batch = {"ids": jax.device_put(given["ids"].astype(np.int32), step.batch["ids"].sharding)}
        new, results = step.jitted()(placed, batch)
    first = loaded(loaded.place(given))
    assert sorted(first) == sorted([*(n for n in loaded.arguments if n != "ids"), "loss"])
    np.testing.assert_array_equal(first["loss"], results["loss"])
    for name, array in new["parameters"].items():
        ours = first[f"parameters.{name}"]
        np.testing.assert_array_equal(ours, array)
        assert ours.sharding.spec == array.sharding.spec and np.abs(np.asarray(ours) - state["parameters"][name]).max()
    second = loaded({**first, **loaded.place({"ids": given["ids"]})})  # the new state goes in again
    assert int(second["count"]) == 2 and float(second["loss"]) < float(first["loss"])


def test_arguments_that_do_not_fit(made: tuple[Path, Step]) -> None:
    loaded = load(made[0])
    placed = loaded.place(arrays(loaded))
    del placed["ids"], placed["m.linear.bias"]
    with pytest.raises(SavedError, match=r"the step also takes m\.linear\.bias, ids"):
        loaded(placed)
    with pytest.raises(SavedError, match=r"ids has the shape \[2, 4\]; the step takes \[2, 3\]"):
        loaded.place({"ids": np.zeros((2, 4), np.int32)})
    with pytest.raises(SavedError, match=r"takes no 'labels'; it takes .*parameters\.linear\.bias.*ids"):
        loaded.place({"labels": np.zeros(3)})


def changed(made: tuple[Path, Step], folder: Path, **parts: Any) -> Path:
    """A copy with another manifest."""
    shutil.copytree(made[0], folder, dirs_exist_ok=True)
    file = folder / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **parts}))
    return folder


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"versions": {"jaxlib": "0.0.1"}}, r"compiled with jaxlib 0\.0\.1, and \d.* pip install jaxlib==0\.0\.1"),
        ({"versions": {"libtpu-of-another": "1"}}, "and none is installed"),
        ({"mesh": {"fsdp": 4}}, r"is for the 4 devices of cpu:2; this machine has 2"),
        ({"platform": "tpu"}, "this machine has no tpu"),
        ({"format": 2}, "has format 2; this version reads 1"),
    ],
)
def test_another_machine(made: tuple[Path, Step], tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(SavedError, match=message):
        load(changed(made, tmp_path, **parts))


def test_chips_that_are_placed_otherwise(made: tuple[Path, Step], tmp_path: Path) -> None:
    """The order of devices is that of the coordinates it was compiled for."""

    class Device:
        def __init__(self, *coords: int) -> None:
            self.coords = list(coords)

    devices = [Device(0, 0), Device(1, 0), Device(1, 0), Device(0, 0)]
    wanted = {"coordinates": [[1, 0], [0, 0], [1, 0], [0, 0]], "topology": "v6e:2x1"}
    assert saved._ordered(devices, wanted, tmp_path) == [devices[i] for i in (1, 0, 2, 3)]
    with pytest.raises(SavedError, match="is for v6e:2x1; the chips of this machine are placed otherwise"):
        saved._ordered(devices, {**wanted, "coordinates": [[1, 0]] * 3}, tmp_path)


def test_damage(made: tuple[Path, Step], tmp_path: Path) -> None:
    with pytest.raises(SavedError, match="holds no saved step"):
        load(tmp_path)
    folder = changed(made, tmp_path)
    file = folder / saved.EXECUTABLE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(SavedError, match="is damaged: the executable is not the one that was written"):
        load(folder)
    (folder / "manifest.json").write_text("[]")
    with pytest.raises(SavedError, match="holds no saved step"):
        load(folder)
    (folder / "manifest.json").write_text('{"format": 1}')
    with pytest.raises(SavedError, match="holds no saved step"):
        load(folder)
