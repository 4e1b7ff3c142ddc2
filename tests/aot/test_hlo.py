"""The reader of optimised HLO, on a stored sample and on what the compiler makes of sharded programs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchtpu.aot import libtpu_missing
from torchtpu.aot.compile import _ENVIRONMENT
from torchtpu.aot.hlo import Hlo, read_hlo
from torchtpu.aot.hlo_types import arrays, parse_groups

SAMPLE = Path(__file__).with_name("data") / "step.hlo.txt"
MIB = 1 << 20


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}", ((0, 2), (1, 3))),
        ("{}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=4,'b'=2] {'a'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=4] {'b':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", ((0, 2), (1, 3))),
        ("@mesh<a=2,b=2>{a,b}", ((0, 1, 2, 3),)),
    ],
)
def test_groups(text: str, groups: tuple[tuple[int, ...], ...]) -> None:
    """Lists, iotas and axes of meshes."""
    assert parse_groups(text, 8) == groups


def test_groups_of_an_unknown_form_are_refused() -> None:
    """They are not guessed."""
    with pytest.raises(ValueError, match="unknown form"):
        parse_groups("mash", 8)


def test_types() -> None:
    """Sizes, layouts, memory spaces and padding of what XLA prints."""
    a, b, c = arrays("(bf16[3,65]{1,0:T(8,128)(2,1)S(1)}, f32[65,3]{0,1:T(8,128)}, pred[])")
    assert (a.shape, a.order, a.tile, a.space, a.tiling) == ((3, 65), (1, 0), (8, 128), 1, "T(8,128)(2,1)")
    assert (a.bytes, a.padded_bytes) == (3 * 65 * 2, 8 * 128 * 2)
    assert (b.bytes, b.padded_bytes) == (3 * 65 * 4, 8 * 128 * 4)
    assert (c.bytes, c.padded_bytes) == (1, 1)
    assert arrays("s4[10]")[0].bytes == 5 and arrays("c64[2]")[0].bytes == 16 and not arrays("()")


def test_sample() -> None:
    """All kinds of collective with groups, rounds of loops and origin; copies; padding; traffic with memory."""
    hlo = read_hlo(SAMPLE)
    assert (hlo.name, hlo.partitions, hlo.loops, hlo.assumptions) == ("jit_step", 8, {"region_body": 3}, [])
    array, mlp = MIB, "model/layer/mlp"
    assert [
        (c.kind, c.bytes, c.group_size, c.groups[0], c.executions, c.asynchronous, c.scope, c.phase)
        for c in hlo.collectives
    ] == [
        ("all-reduce", array, 2, (0, 1), 3, True, mlp, "forward"),
        ("reduce-scatter", MIB // 2, 4, (0, 2, 4, 6), 1, False, mlp, "backward"),
        ("all-gather", MIB // 2, 2, (0, 4), 3, False, "model", "forward"),
        ("all-to-all", array, 4, (0, 2, 4, 6), 1, False, "model/moe", "forward"),
        ("collective-permute", array, 2, (0, 2), 1, True, "model/moe", "backward"),
        ("all-reduce", 4, 4, (0, 2, 4, 6), 1, False, "model/loss", "forward"),
    ]
    json.dumps([c.as_dict() for c in hlo.collectives])
    copies = {c.name: (c.kind, c.bytes, c.executions, c.scope) for c in hlo.layout_copies}
    assert copies == {"copy.14": ("layout", 2 * array, 1, "model/moe"), "copy-start.4": ("move", 2 * array, 1, "")}
    (padding,) = hlo.padding
    assert (padding.what, padding.bytes, padding.padded_bytes) == ("table", 4096 * 65 * 4, 4096 * 128 * 4)
    memory = {(m.scope, m.phase): m.bytes for m in hlo.memory}
    slice_of = 256 * 512 * 2
    # Each round reads and writes the activations and reads a slice of the weights, which another fusion takes out.
    assert memory[mlp, "forward"] == 3 * (2 * array + slice_of)
    assert memory["model", "forward"] == pytest.approx(3 * 2 * slice_of, rel=1e-3)  # and the index
    assert memory["model/moe", "forward"] == 2 * array


def test_a_reshape_that_the_compiler_left_moves_the_array() -> None:
    """One that moves nothing is printed as a bitcast."""
    text = SAMPLE.read_text()
    for opcode, expected in (("reshape", [("layout", "reshape", 2 * MIB)]), ("bitcast", [])):
        lines = text.replace("copy(%get-tuple-element.172)", f"{opcode}(%get-tuple-element.172)").splitlines()
        found = [(c.kind, c.opcode, c.bytes) for c in read_hlo(lines).layout_copies if c.name == "copy.14"]
        assert found == expected


def test_lines_and_what_is_not_a_module() -> None:
    """A text may come in lines; one without a module is an error."""
    with SAMPLE.open() as lines:
        assert len(read_hlo(lines).collectives) == 6
    with pytest.raises(ValueError, match="no HLO module"):
        read_hlo(["%a (x: f32[]) -> f32[] {"])


VARIANTS = """HloModule m, is_scheduled=true, num_partitions=4
%body (p: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %p = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%p), index=1
  %gs = (f32[8,128]{1,0:T(8,128)}, f32[32,128]{1,0:T(8,128)}) all-gather-start(%x), replica_groups={}, dimensions={0}
  %g = f32[32,128]{1,0:T(8,128)} all-gather-done(%gs)
  %rs = f32[8,128]{1,0:T(8,128)} all-reduce-start(%x), replica_groups=[2,2]<=[4], to_apply=%add
  %r = f32[8,128]{1,0:T(8,128)} all-reduce-done(%rs)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %t = (s32[], f32[8,128]{1,0:T(8,128)}) tuple(%i, %r)
}
%c (p.1: (s32[], f32[8,128])) -> pred[] {
  %p.1 = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  ROOT %q = pred[] custom-call(%p.1), custom_call_target="x"
}
%left (l: f32[8,128]) -> f32[8,128] {
  %l = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %lr = f32[8,128]{1,0:T(8,128)} ragged-all-to-all(%l, %l, %l, %l, %l, %l), replica_groups={{0,1,2,3}}
}
%right (k: f32[8,128]) -> f32[8,128] {
  ROOT %k = f32[8,128]{1,0:T(8,128)} parameter(0)
}
ENTRY %main (a: (s32[], f32[8,128]), b: s32[]) -> f32[8,128] {
  %a = (s32[], f32[8,128]{1,0:T(8,128)}) parameter(0)
  %b = s32[] parameter(1)
  %w.1 = (s32[], f32[8,128]{1,0:T(8,128)}) while(%a), condition=%c, body=%body, x={"known_trip_count":{"n":"7"}}
  %w.2 = (s32[], f32[8,128]{1,0:T(8,128)}) while(%w.1), condition=%c, body=%body
  %y = f32[8,128]{1,0:T(8,128)} get-tuple-element(%w.2), index=1
  ROOT %z = f32[8,128]{1,0:T(8,128)} conditional(%b, %y, %y), branch_computations={%left, %right}
}
"""


def test_variants() -> None:
    """Asynchronous pairs, rounds that the text says or does not, and branches."""
    hlo = read_hlo(VARIANTS.splitlines(keepends=True))
    once = 8 * 128 * 4
    found = [(c.kind, c.bytes, c.group_size, c.executions, c.asynchronous) for c in hlo.collectives]
    assert sorted(found) == [
        ("all-gather", 4 * once, 4, 1, True),
        ("all-gather", 4 * once, 4, 7, True),
        ("all-reduce", once, 2, 1, True),
        ("all-reduce", once, 2, 7, True),
        ("ragged-all-to-all", once, 4, 1, False),
    ]
    assert len(hlo.assumptions) == 2
    assert "no bound" in " ".join(hlo.assumptions) and "conditional" in " ".join(hlo.assumptions)


PROGRAM = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

def compile_step(name, shape, folder):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    mesh = Mesh(np.array(devices).reshape(shape), ("data", "model"))

    def struct(size, *spec):
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    def layer(x, w):
        with jax.named_scope("layer"), jax.named_scope("mlp"):
            y = jax.nn.gelu(x @ w[0]) @ w[1]
            return lax.with_sharding_constraint(x + y, NamedSharding(mesh, P("data"))), None

    @jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    def exchange(x):
        return lax.all_to_all(x, "data", 1, 1, tiled=True)

    def loss(ws, x):
        with jax.named_scope("model"):
            x = lax.scan(jax.checkpoint(layer), x, ws)[0]
            with jax.named_scope("moe"):
                x = exchange(x)
            return jnp.mean(x.astype(jnp.float32) ** 2)

    ws = struct((3, 256, 512), None, "data", "model"), struct((3, 512, 256), None, "model", "data")
    step = jax.jit(jax.value_and_grad(loss)).trace(ws, struct((16, 128, 256), "data")).lower()
    step.compile(compiler_options={"xla_dump_to": folder, "xla_dump_hlo_as_text": True})

for argument in sys.argv[2:]:
    name, shape = argument.split("=")
    compile_step(name, [int(n) for n in shape.split(",")], sys.argv[1] + "/" + name)
"""
CASES = {"v6e:2x2": (2, 2), "v6e:4x4": (4, 4), "tpu7x:2x2x1": (4, 2)}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Hlo]:
    """A train step of three layers under ``lax.scan``, read as the compiler wrote it for each machine."""
    if libtpu_missing() is not None:
        pytest.skip(libtpu_missing() or "")
    folder = tmp_path_factory.mktemp("hlo")
    cases = [f"{name}={','.join(map(str, shape))}" for name, shape in CASES.items()]
    command = [sys.executable, "-c", PROGRAM, str(folder), *cases]
    done = subprocess.run(command, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return {name: read_hlo(next((folder / name).glob("*after_optimizations.txt"))) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_compiled(compiled: dict[str, Hlo], name: str) -> None:
    """Loops go round three times; what is exchanged in them and outside has the groups of the mesh's axes."""
    hlo, (data, model) = compiled[name], CASES[name]
    assert hlo.partitions == data * model and set(hlo.loops.values()) == {3} and not hlo.assumptions
    rows = [tuple(range(i * model, (i + 1) * model)) for i in range(data)]
    columns = [tuple(range(i, data * model, model)) for i in range(model)]
    for c in hlo.collectives:
        if c.kind != "collective-permute":
            assert sorted(c.groups) in (sorted(rows), sorted(columns), [tuple(range(data * model))]), c
    activations = 16 // data * 128 * 256 * 2
    reduced = [c for c in hlo.collectives if c.kind == "all-reduce" and c.bytes == activations and c.executions == 3]
    assert {(c.scope, c.phase, c.group_size) for c in reduced} >= {("model/layer/mlp", "forward", model)}
    exchanged = [c for c in hlo.collectives if c.kind == "all-to-all"]
    assert {c.scope for c in exchanged} == {"model/moe"}
    assert {(c.bytes, c.group_size, c.executions) for c in exchanged} == {(activations, data, 1)}
    assert hlo.layout_copies and sum(m.bytes for m in hlo.memory) > activations  # little: vector memory holds most


COUNTED = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from torchtpu.aot.count import count

D, F = 2048, 8192
device = topologies.get_topology_desc(platform="tpu", topology_name="v6e:1x1").devices[0]

def struct(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=SingleDeviceSharding(device))

def loss(w, x):
    y = x.astype(jnp.float32)
    x = (y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True))).astype(x.dtype)
    x = x + (jax.nn.silu(x @ w["gate"]) * (x @ w["up"])) @ w["down"]
    return jax.nn.log_softmax((x @ w["head"]).astype(jnp.float32), -1)[..., 0].mean()

weights = {"gate": struct(D, F), "up": struct(D, F), "down": struct(F, D), "head": struct(D, 8 * D)}
traced = jax.jit(loss).trace(weights, struct(8192, D))
done = traced.lower().compile(compiler_options={"xla_dump_to": sys.argv[1], "xla_dump_hlo_as_text": True})
counts = count(traced.jaxpr)
print(json.dumps({"flops": done.cost_analysis()["flops"], "counted": counts.flops(), "bytes": counts.bytes()}))
"""


@pytest.mark.skipif(libtpu_missing() is not None, reason=libtpu_missing() or "")
def test_counts_agree_with_the_compiler(tmp_path: Path) -> None:
    """Of a layer without loops on one device: FLOPs within 5 %, bytes of the model of fusion within half."""
    command = [sys.executable, "-c", COUNTED, str(tmp_path)]
    done = subprocess.run(command, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["counted"] == pytest.approx(found["flops"], rel=0.05)
    hlo = read_hlo(next(tmp_path.glob("*after_optimizations.txt")))
    assert found["bytes"] == pytest.approx(sum(m.bytes for m in hlo.memory), rel=0.5)


def test_attributes_of_several_lines_do_not_end_a_computation() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=2

ENTRY %main (x: bf16[128,128]) -> bf16[128,128] {
  %x = bf16[128,128]{1,0} parameter(0)
  %k = bf16[128,128]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={
"a":"{\\"block\\": 512}"
}}, metadata={op_name="jit(f)/kernel"}
  ROOT %r = bf16[128,128]{1,0} all-reduce(%k), channel_id=1, replica_groups={{0,1}}, to_apply=%add
}
"""
    assert [c.kind for c in read_hlo(text.splitlines(keepends=True)).collectives] == ["all-reduce"]
