"""Times of computation and of collectives, against arithmetic done by hand."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from torchtpu.aot import Topology
from torchtpu.aot.count import Counts, count
from torchtpu.aot.hlo import Collective, Memory, read_hlo
from torchtpu.aot.roofline import predict
from torchtpu.aot.torus import LATENCY, Torus

SAMPLE = Path(__file__).with_name("data") / "step.hlo.txt"
SIZE = 1 << 30
Groups = tuple[tuple[int, ...], ...]


def groups(topology: Topology, *axes: int) -> Groups:
    """Groups of partitions over dimensions of the torus; -1 is the one within a chip."""
    found: dict[tuple[int, ...], list[int]] = {}
    for i, at in enumerate(topology.coordinates()):
        core = i % topology.chip.devices_per_chip
        key = [x for axis, x in enumerate(at) if axis not in axes] + [0 if -1 in axes else core]
        found.setdefault(tuple(key), []).append(i)
    return tuple(tuple(g) for g in found.values())


@pytest.mark.parametrize(
    ("name", "axes", "kind", "volume", "over"),
    [
        # v6e, 100 GB/s: a ring has two links into a chip, the end of a line one.
        ("v6e:16x16", (0,), "all-gather", 15 / 16 / 2, "ring of 16"),
        ("v6e:16x16", (0,), "all-reduce", 2 * 15 / 16 / 2, "ring of 16"),
        ("v6e:16x16", (0, 1), "reduce-scatter", 255 / 256 / 4, "ring of 16 x ring of 16"),
        ("v6e:4x4", (1,), "all-gather", 3 / 4, "line of 4"),
        ("v6e:8x16", (0, 1), "all-gather", 127 / 128 / 3, "line of 8 x ring of 16"),
        ("v6e:16x16", (0,), "all-to-all", 16 / 8, "ring of 16"),
        ("v6e:4x4", (0, 1), "all-to-all", 4 / 4, "line of 4 x line of 4"),
        # TPU7x: two devices share a chip's links; together they take in an array once.
        ("tpu7x:4x4x4", (0,), "all-gather", 2 * 3 / 4 / 2, "ring of 4"),
        ("tpu7x:4x4x4", (0, -1), "all-gather", 3 / 4 / 2, "ring of 4"),
        ("tpu7x:4x4x4", (0, 1, 2, -1), "all-to-all", 2 * 4 / 8, "ring of 4 x ring of 4 x ring of 4"),
    ],
)
def test_collectives(name: str, axes: tuple[int, ...], kind: str, volume: float, over: str) -> None:
    """The share of an array that goes over a link, by kind and torus."""
    topology = Topology.parse(name)
    route = Torus(topology).route(kind, SIZE, groups(topology, *axes))
    assert route.seconds == pytest.approx(volume * SIZE / topology.chip.link_bandwidth)
    assert route.over == over and route.regular


def test_devices_of_a_chip_and_latency() -> None:
    """Nothing goes over a link between the two of a chip; little takes a microsecond a hop."""
    topology = Topology.parse("tpu7x:4x4x4")
    torus = Torus(topology)
    assert torus.route("all-reduce", SIZE, groups(topology, -1)).seconds == 0
    assert torus.route("all-reduce", 4, groups(topology, 0, 1, 2)).seconds == 3 * 2 * LATENCY


def test_published_measurements() -> None:
    """Estimates are below the times that "How to Scale Your Model" shows for v5e, by no more than a factor of three."""
    topology = Topology.parse("v5e:4x8")
    torus, line = Torus(topology), groups(topology, 0)
    for size, measured in ((2048 * 8192 * 2, 680e-6), (256 * 256 * 2, 8e-6)):
        assert measured / 3 < torus.route("all-gather", size, line).seconds < measured


def test_groups_that_share_links() -> None:
    """Every other chip of a ring has half of each link; chips that are no box are priced as a line."""
    topology = Topology.parse("v6e:16x16")
    torus, order = Torus(topology), topology.coordinates()
    at = {place: i for i, place in enumerate(order)}
    sparse = torus.route("all-gather", SIZE, (tuple(at[x, 0] for x in range(0, 16, 2)),))
    assert sparse.seconds == pytest.approx(7 / 8 * SIZE / 100e9) and sparse.over == "ring of 8"
    odd = torus.route("all-gather", SIZE, ((at[0, 0], at[1, 0], at[0, 1]),))
    assert not odd.regular and odd.seconds > torus.route("all-gather", SIZE, ((at[0, 0], at[1, 0]),)).seconds


def test_permutations() -> None:
    """A ring's neighbours are one hop apart, over the edge as well; a line's ends are far."""
    ring, line = Topology.parse("v6e:16x16"), Topology.parse("v6e:4x4")
    for topology, load, hops in ((ring, 1, 1), (line, 1, 3)):
        at = {place: i for i, place in enumerate(topology.coordinates())}
        n = topology.extent[0]
        pairs = tuple((at[x, 0], at[(x + 1) % n, 0]) for x in range(n))
        route = Torus(topology).route("collective-permute", SIZE, pairs)
        assert route.over == f"{hops} hops, {load} on a link"
        assert route.seconds == pytest.approx(load * SIZE / 100e9)
    at = {place: i for i, place in enumerate(ring.coordinates())}
    far = tuple((at[x, 0], at[(x + 8) % 16, 0]) for x in range(16))
    assert Torus(ring).route("collective-permute", SIZE, far).over == "8 hops, 8 on a link"


def test_coordinates_decide_the_way() -> None:
    """The same groups on other chips take other links."""
    topology = Topology.parse("v6e:4x4")
    pairs: Groups = tuple((i, i + 1) for i in range(0, 16, 2))
    near = Torus(topology).route("all-gather", SIZE, pairs)
    spread = [(x, y) for x in range(4) for y in (0, 3, 1, 2)]
    far = Torus(topology, spread).route("all-gather", SIZE, pairs)
    assert far.seconds > 2 * near.seconds
    with pytest.raises(ValueError, match="15 coordinates for the 16 devices"):
        predict(Counts(), [], topology, coordinates=spread[:15])


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    """A product in a scope."""
    with jax.named_scope("mlp"):
        return x @ w


def test_bounds() -> None:
    """Large products wait for the matrix unit, those of few rows for memory, those with much to send for the links."""
    topology = Topology.parse("v6e:2x2")
    large = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
    few = jax.ShapeDtypeStruct((8, 8192), jnp.bfloat16)
    found = predict(count(jax.make_jaxpr(layer)(large, large)), [], topology, tokens=8192)
    ideal = 2 * 8192**3 / 4 / 918e12
    assert found.bound == "MXU" and found.mxu_seconds == pytest.approx(ideal)
    assert found.serial_seconds == found.overlapped_seconds == pytest.approx(ideal)
    assert found.mfu_overlapped == pytest.approx(1) and found.tokens_per_second_serial == pytest.approx(8192 / ideal)
    assert [(x.scope, x.phase) for x in found.scopes] == [("mlp", "forward")]
    counts = count(jax.make_jaxpr(layer)(few, large))
    small = predict(counts, [], topology)
    assert small.bound == "HBM" and small.compute_seconds == pytest.approx(counts.bytes() / 4 / 1638e9)
    assert any("counted too low" in x for x in small.assumptions)
    whole = predict(counts, [], topology, memory=[Memory("mlp", "forward", 8192 * 8192 * 2)])
    assert whole.compute_seconds == pytest.approx(8192 * 8192 * 2 / 1638e9)
    send = Collective("all-reduce", "r", SIZE, "bf16", 2, ((0, 1), (2, 3)), 3, False, "mlp", "forward", "")
    sent = predict(count(jax.make_jaxpr(layer)(large, large)), [send], topology)
    assert sent.bound == "ICI" and sent.ici_seconds == pytest.approx(3 * SIZE / 100e9)
    assert sent.overlapped_seconds == sent.ici_seconds
    assert sent.serial_seconds == pytest.approx(sent.ici_seconds + ideal)
    assert any("100 GB/s" in x for x in sent.assumptions)


def test_recomputation_and_precision_take_time_but_are_no_model_flops() -> None:
    """``jax.checkpoint`` lowers MFU, as do the six passes of float32."""
    topology = Topology.parse("v6e:1x1")
    x = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        inner = jax.checkpoint(lambda x: jnp.tanh(layer(jnp.tanh(layer(x, w)), w)))
        return inner(x).astype(jnp.float32).sum()

    found = predict(count(jax.make_jaxpr(jax.value_and_grad(loss))(x, x)), [], topology)
    assert found.hardware_flops > found.model_flops == pytest.approx(5 * 2 * 4096**3)
    assert found.mfu_overlapped < found.model_flops / found.hardware_flops + 1e-9
    full = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    exact = predict(count(jax.make_jaxpr(lambda a: jnp.matmul(a, a, precision="highest"))(full)), [], topology)
    assert exact.mfu_overlapped == pytest.approx(1 / 6)


def test_is_plain_data() -> None:
    """All of it goes into JSON."""
    hlo = read_hlo(SAMPLE)
    counts = count(jax.make_jaxpr(layer)(*[jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2))
    found = predict(counts, hlo.collectives, Topology.parse("tpu7x:2x2x1"), memory=hlo.memory, tokens=1)
    plain = json.loads(json.dumps(dataclasses.asdict(found)))
    assert plain["estimate"] and len(plain["collectives"]) == 6 and plain["bound"] == "ICI"
