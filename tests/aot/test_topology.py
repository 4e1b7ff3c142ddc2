"""The table of TPU generations and the names of machines."""

import json
import os
import subprocess
import sys

import pytest

from torchtpu.aot import TOPOLOGIES, Topology, libtpu_missing, standard_topologies
from torchtpu.aot.chips import CHIPS
from torchtpu.aot.compile import _ENVIRONMENT


def test_parse() -> None:
    """A name gives chips, devices, hosts and which dimensions are rings."""
    pod = Topology.parse("v6e:8x16")
    assert (pod.name, pod.chips, pod.devices, pod.hosts, pod.wraparound) == ("v6e:8x16", 128, 128, 32, (False, True))
    cube = Topology.parse("tpu7x:4x4x8")
    assert (cube.chips, cube.devices, cube.hosts, cube.wraparound) == (128, 256, 32, (True, True, True))
    assert Topology.parse("v5p:2x2x4").wraparound == (False, False, False)  # not a whole cube
    assert Topology.parse("v5e:1x1").hosts == 1
    assert not pod.notes and not cube.notes and not Topology.parse("v5p:4x8x12").notes


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("h100:2x2", r"known are v4, v5e, v5p, v6e, tpu7x"),
        ("v6e", r"2 dimensions, such as v6e:4x4"),
        ("v6e:2x2x1", r"2 dimensions"),
        ("tpu7x:2x2", r"3 dimensions, such as tpu7x:8x8x"),
        ("v6e:2xb", r"2 dimensions"),
        ("v6e:0x2", r"empty"),
        ("v6e:3x3", r"hosts of 2x2 chips"),
    ],
)
def test_errors_say_what_is_wanted(name: str, says: str) -> None:
    """An unknown generation lists the known ones, a bad extent says the form."""
    with pytest.raises(ValueError, match=says):
        Topology.parse(name)


def test_unusual_sizes_get_a_note() -> None:
    """They compile, so they are no error."""
    assert "not a usual size" in Topology.parse("v6e:2x8").notes[0]
    assert "larger than a pod" in Topology.parse("v6e:32x32").notes[0]
    assert "larger than a pod" in Topology.parse("tpu7x:16x32x32").notes[0]


@pytest.mark.parametrize("generation", CHIPS)
def test_standard_sizes_go_up_to_the_pod(generation: str) -> None:
    """From the smallest to the pod, each without a note."""
    sizes = standard_topologies(generation)
    assert [t.chips for t in sizes] == sorted(t.chips for t in sizes)
    assert sizes[-1].chips == CHIPS[generation].pod
    assert not any(t.notes for t in sizes)


def test_rates() -> None:
    """A device's peak depends on the numbers; what has no rate of its own runs as bfloat16 does."""
    chip = CHIPS["v6e"]
    assert chip.peak("int8") == 2 * chip.peak("bfloat16") == 2 * chip.peak("float8_e4m3fn")
    seventh = CHIPS["tpu7x"]
    assert seventh.peak("float8_e5m2") == 2 * seventh.peak("bfloat16") == 2307e12
    assert seventh.peak("int8") == seventh.peak("float32") == seventh.peak("bfloat16")
    assert all(0.9 < c.usable_hbm_bytes / c.hbm_bytes < 1 for c in CHIPS.values())


@pytest.mark.skipif(libtpu_missing() is not None, reason=libtpu_missing() or "")
def test_devices_are_those_of_the_compiler() -> None:
    """Their number, kind, hosts and order are what libtpu says."""
    names = [*TOPOLOGIES.values(), "v4:2x2x2", "v5p:2x4x4", "v6e:4x8", "v5e:1x1", "tpu7x:4x4x4"]
    script = """
import json, sys
from jax.experimental import topologies
for name in sys.argv[1:]:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    kinds, hosts = {d.device_kind for d in devices}, {d.process_index for d in devices}
    print(json.dumps([list(kinds), len(hosts), [d.coords for d in devices]]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env={**os.environ, **_ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        topology = Topology.parse(name)
        kinds, hosts, coordinates = json.loads(line)
        assert kinds == [topology.chip.kind] and hosts == topology.hosts
        padded = [(*at, 0)[:3] for at in topology.coordinates()]
        assert [tuple(at) for at in coordinates] == padded
