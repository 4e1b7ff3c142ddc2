"""Programs compiled for TPUs that are not there."""

import importlib.util
import os
import signal

import jax
import jax.numpy as jnp
import pytest

from torchtpu.aot import TOPOLOGIES, Compiler, compile_for, libtpu_missing, lower_for_tpu
from torchtpu.lowering.families import linalg

needs_libtpu = pytest.mark.skipif(libtpu_missing() is not None, reason=libtpu_missing() or "")
SQUARE = jax.ShapeDtypeStruct((8, 8), jnp.float32)


@needs_libtpu
@pytest.mark.parametrize("topology", TOPOLOGIES.values())
def test_compiles_for_every_generation(topology: str) -> None:
    """A product with 64-bit operands, which a TPU emulates, compiles."""
    result = compile_for(lambda x, n: (x @ x) * n, [SQUARE, jax.ShapeDtypeStruct((), jnp.int64)], topology)
    assert result.ok, result.message
    assert result.code_bytes > 0


@needs_libtpu
def test_refusals_carry_the_compilers_words() -> None:
    """What the compiler refuses is told apart from what JAX cannot lower."""
    with Compiler() as compiler:
        refused = compiler.compile("module { func.func public @main() { return } ", "v6e:2x2")
        assert refused.status == "fail" and refused.message
        assert compiler.compile(lower_for_tpu(jnp.sin, [SQUARE]), "no such topology").status == "fail"
    on_host = compile_for(lambda x: jax.pure_callback(lambda y: y, SQUARE, x), [SQUARE])
    assert on_host.status == "lower" and "platform" in on_host.message


@needs_libtpu
def test_a_dead_child_is_reported_and_replaced() -> None:
    """The death of the compiler's process is a result; the next program gets a new one."""
    text = lower_for_tpu(jnp.sin, [SQUARE])
    with Compiler() as compiler:
        assert compiler.compile(text, "v6e:2x2").ok
        assert compiler._process is not None
        os.kill(compiler._process.pid, signal.SIGKILL)
        compiler._process.wait()
        assert compiler.compile(text, "v6e:2x2").status == "crash"
        assert compiler.compile(text, "v6e:2x2").ok
        compiler.timeout = 0.0
        assert compiler.compile(text, "v6e:2x2").status == "timeout"


@pytest.mark.parametrize(("size", "full"), [((5, 5), False), ((2, 6, 3), True), ((3, 6), False)])
def test_svd_for_tpu(size: tuple[int, ...], full: bool) -> None:
    """The form that the TPU gets multiplies back to the matrix; its place in the operator compiles."""
    a = jax.random.normal(jax.random.key(0), size)
    u, s, vh = linalg._svd_in_32_bits(a, full)
    k = s.shape[-1]
    assert jnp.allclose((u[..., :k] * s[..., None, :]) @ vh[..., :k, :], a, atol=1e-5)
    assert u.shape[-1] == (size[-2] if full else k)
    if libtpu_missing() is None:
        result = compile_for(lambda x: linalg.linalg_svd(x, full), [jax.ShapeDtypeStruct(size, jnp.float32)])
        assert result.ok, result.message


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without libtpu the error names the extra that brings it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"torchtpu\[tpu\]"):
        Compiler()
