"""Operations and bytes counted from jaxprs, against PyTorch's counter and against arithmetic done by hand."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.experimental.pallas.ops.tpu.megablox import gmm
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask
from jax.sharding import AxisType, PartitionSpec
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from torchtpu.aot.count import Counts, count
from torchtpu.aot.scope import split_scope
from torchtpu.export.trace import trace_program

transformers = pytest.importorskip("transformers")
F32, BF16 = jnp.float32, jnp.bfloat16


def struct(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    """A type."""
    return jax.ShapeDtypeStruct(shape, dtype)


def counted(function: Callable[..., Any], *types: Any) -> Counts:
    """Counts of a function of arrays."""
    return count(jax.make_jaxpr(function)(*types))


def llama() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Grouped-query attention, gated MLP, a head."""
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), (torch.randint(0, 200, (2, 48)),)


def vit() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Patches by convolution."""
    config = transformers.ViTConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    return transformers.ViTForImageClassification(config), (torch.randn(2, 3, 32, 32),)


def whisper() -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    """Convolutions over time, an encoder and a decoder with cross-attention."""
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=128, num_mel_bins=16, max_source_positions=20,
        max_target_positions=16, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, begin_suppress_tokens=None,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config), (
        torch.randn(2, 16, 40),
        torch.randint(3, 128, (2, 10)),
    )


class Output(torch.nn.Module):
    """A model whose result is a tensor, and whose input is data."""

    def __init__(self, model: torch.nn.Module, keyword: str | None) -> None:
        super().__init__()
        self.model, self.keyword = model, keyword

    def forward(self, first: torch.Tensor, second: torch.Tensor | None = None) -> torch.Tensor:
        """The logits."""
        return self.model(first, **({self.keyword: second} if self.keyword else {})).logits


@pytest.mark.parametrize(("make", "keyword"), [(llama, None), (vit, None), (whisper, "decoder_input_ids")])
def test_models_as_pytorch_counts_them(
    make: Callable[[], tuple[torch.nn.Module, tuple[torch.Tensor, ...]]], keyword: str | None
) -> None:
    """Products of the forward and of the backward pass are within 1 % of ``FlopCounterMode``."""
    torch.manual_seed(0)
    model, inputs = make()
    wrapped = Output(model.train(False), keyword)
    # PyTorch's counter does not know the CPU's fused attention
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as forward:
        loss = wrapped(*inputs).float().sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    with torch.no_grad():
        program = torch.export.export(wrapped, inputs, strict=False)
    traced = trace_program(program, None, None)
    weights, *rest = traced.arguments
    trained = {k: w for k, w in weights.items() if jnp.issubdtype(w.dtype, jnp.floating)}
    fixed = {k: jnp.zeros(w.shape, w.dtype) for k, w in weights.items() if k not in trained}

    def loss_of(trained: dict[str, jax.Array], *inputs: jax.Array) -> jax.Array:
        return traced.function({**trained, **fixed}, *inputs)["outputs"][0].astype(F32).sum()

    with jax.enable_x64(True):
        once = counted(loss_of, trained, *rest)
        both = counted(jax.value_and_grad(loss_of), trained, *rest)
    assert once.mxu_flops() == pytest.approx(forward.get_total_flops(), rel=0.01)
    assert both.mxu_flops("backward") == pytest.approx(backward.get_total_flops(), rel=0.01)
    assert both.mxu_flops("forward") == pytest.approx(once.mxu_flops(), rel=0.01)
    assert not both.mxu_flops("recompute") and not both.assumptions


def test_scopes_and_phases() -> None:
    """Transforms are stripped from the names; what ``jax.checkpoint`` computes again is told apart."""

    def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
        with jax.named_scope("layer"), jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        with jax.named_scope("model"):
            return lax.scan(jax.checkpoint(layer), x, ws)[0].sum()

    found = counted(jax.value_and_grad(loss), struct(3, 8, 8), struct(4, 8))
    product = 3 * 2 * 4 * 8 * 8
    assert {(x.scope, x.phase): x.mxu_flops for x in found.by_scope() if x.mxu_flops} == {
        ("model/layer/mlp", "forward"): product,
        ("model/layer/mlp", "recompute"): product,
        ("model/layer/mlp", "backward"): 2 * product,
    }
    assert {x.scope for x in found.by_scope(depth=1)} == {"model"}
    assert all(x.executions == 3 for x in found.ops if x.is_mxu)
    json.dumps(dataclasses.asdict(found))


@pytest.mark.parametrize(
    ("stack", "scope", "phase"),
    [
        ("", "", "forward"),
        ("jvp(model)/loss", "model/loss", "forward"),
        ("transpose(jvp(vmap(model)))/layers.0/mlp", "model/layers.0/mlp", "backward"),
        ("jit(step)/transpose(jvp(model))/while/body/checkpoint/rematted_computation/mlp", "model/mlp", "recompute"),
        ("jit(f)/jvp()/jit(silu)/cond/branch_1_fun/a", "a", "forward"),
    ],
)
def test_split_scope(stack: str, scope: str, phase: str) -> None:
    """Of an equation and of an HLO instruction."""
    assert split_scope(stack) == (scope, phase)


def test_loops_and_conditionals() -> None:
    """A loop with known bounds counts its rounds, another one round; a conditional its larger branch."""
    w = struct(8, 8)
    product = 2 * 8**3

    def times(n: Any) -> Callable[[jax.Array], jax.Array]:
        return lambda x: lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 2, c[1] @ c[1]), (1, x))[1]

    assert counted(times(8), w).mxu_flops() == 4 * product
    assert counted(lambda x: lax.fori_loop(0, 5, lambda i, c: c @ c, x), w).mxu_flops() == 5 * product
    unknown = counted(lambda x: times(x[0, 0].astype(int))(x), w)
    assert unknown.mxu_flops() == product and "depends on values" in unknown.assumptions[0]
    either = counted(lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, lambda y: y @ y, x), w)
    assert either.mxu_flops() == 2 * product and "branches" in either.assumptions[0]
    nested = counted(lambda x: lax.fori_loop(0, 3, lambda i, c: lax.fori_loop(0, 4, lambda j, d: d @ d, c), x), w)
    assert nested.mxu_flops() == 12 * product


def test_what_is_not_used_is_not_counted() -> None:
    """Also in the body of a loop, where a result may only feed itself."""

    def body(carry: tuple[jax.Array, jax.Array], w: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        kept, dropped = carry
        return (kept @ w, dropped @ w), dropped @ dropped

    def program(x: jax.Array, ws: jax.Array) -> jax.Array:
        x @ x
        return lax.scan(body, (x, x), ws)[0][0]

    assert counted(program, struct(8, 8), struct(3, 8, 8)).mxu_flops() == 3 * 2 * 8**3


def test_shard_map_counts_all_shards() -> None:
    """The body is one shard's part: the total is that of the whole product."""
    mesh = jax.sharding.AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split, whole = PartitionSpec("x", "y"), PartitionSpec("y", None)
    sharded = jax.shard_map(
        lambda a, b: lax.psum(a @ b, "y"), mesh=mesh, in_specs=(split, whole), out_specs=PartitionSpec("x", None)
    )
    found = counted(sharded, struct(16, 8), struct(8, 32))
    assert found.mxu_flops() == found.model_flops() == 2 * 16 * 8 * 32
    rows = PartitionSpec("x")
    repeated = jax.shard_map(lambda a: a @ a.T, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    found = counted(repeated, struct(16, 8))
    assert found.mxu_flops() == 2 * found.model_flops() == 2 * 4 * (2 * 4 * 4 * 8)  # "y" does the same twice
    partly = jax.shard_map(
        lambda a: a @ a.T, mesh=mesh, in_specs=rows, out_specs=rows, axis_names={"x"}, check_vma=False
    )
    assert counted(partly, struct(16, 8)).mxu_flops() == 4 * (2 * 4 * 4 * 8)  # "y" is left to the compiler


def test_products() -> None:
    """FLOPs, passes of the matrix unit and types of each kind of product."""
    highest = counted(lambda a, b: jnp.matmul(a, b, precision="highest"), struct(4, 8), struct(8, 16)).ops[0]
    assert (highest.flops, highest.passes, highest.dtype) == (2 * 4 * 8 * 16, 6, "float32")
    half = counted(jnp.matmul, struct(4, 8, dtype=BF16), struct(8, 16, dtype=BF16))
    assert half.mxu_flops_by_dtype() == {"bfloat16": 2 * 4 * 8 * 16} and half.ops[0].passes == 1
    grouped = (struct(64, 8), struct(4, 8, 16), struct(4, dtype=jnp.int32))
    assert counted(lax.ragged_dot, *grouped).mxu_flops() == 2 * 64 * 8 * 16
    loss = jax.value_and_grad(lambda a, b, n: lax.ragged_dot(a, b, n).sum(), (0, 1))
    assert counted(loss, *grouped).mxu_flops() == 3 * 2 * 64 * 8 * 16

    def strided(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, (2, 2), "VALID", feature_group_count=2)

    x, w = struct(2, 4, 9, 9), struct(6, 2, 3, 3)
    forward = 2 * (2 * 6 * 4 * 4) * (2 * 3 * 3)
    assert counted(strided, x, w).mxu_flops() == forward
    backward = counted(jax.grad(lambda x, w: strided(x, w).sum(), (0, 1)), x, w).mxu_flops("backward")
    assert backward == pytest.approx(2 * forward, rel=0.3)  # positions at the border differ


def test_kernels() -> None:
    """Splash attention by its mask, megablox by its own estimate; what is unknown is said."""
    heads, length, width, block = 2, 1024, 128, 128
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((length, length))] * heads)
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1)
    types = [struct(3, heads, length, width, dtype=BF16)] * 3
    blocks = length // block
    area = blocks * (blocks + 1) / 2 * block**2
    once = 2 * 3 * heads * area * width
    attention = jax.value_and_grad(lambda q, k, v: jax.vmap(kernel)(q, k, v).astype(F32).sum(), (0, 1, 2))
    found = {x.primitive: x for x in counted(attention, *types).ops if x.primitive.startswith("splash")}
    assert {name: x.flops / once for name, x in found.items()} == {
        "splash_mha_fwd_residuals": 2, "splash_mha_dkv_no_residuals": 4, "splash_mha_dq_no_residuals": 3
    }  # fmt: skip
    assert found["splash_mha_fwd_residuals"].phase == "forward"
    rows = (struct(512, 256, dtype=BF16), struct(4, 256, 128, dtype=BF16), struct(4, dtype=jnp.int32))
    assert counted(gmm, *rows).mxu_flops() == 2 * 512 * 256 * 128

    def own(x: jax.Array) -> jax.Array:
        return jax.experimental.pallas.pallas_call(lambda a, b: None, out_shape=x, name="mine")(x)

    assert "kernel mine" in counted(own, struct(8, 128)).assumptions[0]


def test_bytes_of_fusions() -> None:
    """Values count where they cross between fusions, in units of one array."""
    n = 64
    unit = n * n * 4

    def units(function: Callable[..., Any], *types: Any) -> float:
        return counted(function, *types).bytes() / unit

    x = struct(n, n)
    assert units(lambda a: jnp.sin(a) * 2 + a, x) == 2  # read once, written once
    assert units(lambda a, b: jnp.tanh(a @ b), x, x) == 3  # the tanh is part of the product
    assert units(lambda a, b: jnp.tanh(a) @ b, x, x) == 3  # or computed as it is read
    assert units(lambda a, b: jnp.tanh(a @ b) @ b, x, x) == 6
    assert units(lambda a, b, c: (a + b + c) @ jnp.exp(a + b + c), x, x, x) == 4
    assert units(lambda a, b, c: [jnp.outer(y, y) for y in [(a * b * c).sum(i) for i in (0, 1)]], x, x, x) > 6
    assert units(lambda a, b: a.T.reshape(n, n) @ b, x, x) == 3  # views are free
    assert units(lambda a: a + jnp.arange(n)[:, None], x) == 2
    assert units(lambda a: (a - a.max()) * 2, x) == pytest.approx(3, rel=0.01)  # twice over the argument
    assert units(lambda a: a[:8] * 2, x) == 2 * 8 / n
    assert units(lambda a: a[:8] @ a[8:].T, x) == 1 + 8 * (n - 8) / n**2  # each part of it
    assert units(lambda a, b: lax.dynamic_update_slice(a, b, (3, 0)), x, struct(1, n)) == pytest.approx(2 / n)
    assert units(lambda t, i: t[i], x, struct(n // 2, dtype=jnp.int32)) == pytest.approx(1, rel=0.1)
    table = counted(lambda ws, a: lax.scan(lambda c, w: (c @ w, None), a, ws)[0], struct(5, n, n), x)
    assert table.bytes() / unit == 5 * 3  # the carry is read and written in each round
    once = counted(lambda a: jax.nn.softmax(a, -1), x)
    assert once.bytes() / unit == pytest.approx(4, rel=0.05)  # read for the maximum, the sum and the result
    assert np.isclose(sum(op.transcendentals for op in once.ops), n * n)


def test_the_branch_of_a_tpu_is_counted() -> None:
    def program(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cpu=lambda x: x @ x @ x @ x, default=lambda x: x @ x)

    counted = count(jax.make_jaxpr(program)(jnp.ones((64, 64), jnp.bfloat16)))
    assert counted.mxu_flops() == 2 * 64**3
    assert not counted.assumptions
