"""What the engine promises, operator by operator kind: results, writes, errors, counters."""

from __future__ import annotations

import warnings

import numpy
import pytest
import torch
from torch.testing import assert_close

import torchtpu  # noqa: F401
from torchtpu.runtime.compiler import statistics


def both(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    cpu = torch.randn(*shape).to(dtype)
    return cpu, cpu.to("tpu")


def test_transfer_copies_in_both_directions():
    source = torch.zeros(64)
    moved = source.to("tpu")
    source.add_(1)
    assert moved.sum().item() == 0
    back = moved.cpu()
    moved.add_(2)
    assert back.sum().item() == 0 and moved.sum().item() == 128
    back.add_(1)
    assert moved.sum().item() == 128


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float64, torch.complex64]
)
def test_round_trip(dtype):
    cpu = torch.randint(0, 2, (3, 4, 5)).to(dtype).transpose(0, 2)
    assert_close(cpu.to("tpu").cpu(), cpu)
    assert cpu.to("tpu").stride() == cpu.to("cpu", copy=True).stride()


def test_scalars_are_operands():
    _, x = both(5, 7)
    (x * 1.5 + 2).cpu()
    before = statistics.compiles
    for k in range(20):
        (x * (k / 3) + k).cpu()
    assert statistics.compiles == before


def test_moving_slices_compile_once():
    cpu, x = both(40, 6)
    for i in range(1, 40):
        if i == 4:
            before = statistics.compiles
        assert_close(x[i].mul(2).cpu(), cpu[i] * 2)
        x[i].add_(1)
        cpu[i].add_(1)
    assert statistics.compiles == before
    assert_close(x.cpu(), cpu)


def test_promotion_follows_pytorch():
    i = torch.arange(4)
    for build in (
        lambda t: t + 1.5,
        lambda t: t * True,
        lambda t: t / 2,
        lambda t: t > 1.5,
        lambda t: t.bool() + 1,
        lambda t: t + 1j,
    ):
        assert_close(build(i.to("tpu")).cpu(), build(i))
    h = torch.randn(4).bfloat16()
    assert_close(
        (h.to("tpu") + torch.tensor(1.0, dtype=torch.float64)).cpu(), h + torch.tensor(1.0, dtype=torch.float64)
    )


def test_out_arguments():
    cpu, x = both(3, 4)
    out = torch.empty(0, device="tpu")
    result = torch.add(x, x, out=out)
    assert result is out
    assert_close(out.cpu(), cpu + cpu)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.mul(x, x, out=torch.empty(2, device="tpu"))
    assert any("resized" in str(w.message) for w in caught)
    with pytest.raises(RuntimeError, match="can't be cast"):
        torch.add(x, x, out=torch.empty(3, 4, dtype=torch.int32, device="tpu"))
    values, indices = torch.empty(0, device="tpu"), torch.empty(0, dtype=torch.int64, device="tpu")
    torch.max(x, 1, out=(values, indices))
    assert_close((values.cpu(), indices.cpu()), tuple(cpu.max(1)))
    window = torch.zeros(6, 8, device="tpu")
    torch.add(x, 1, out=window[1:4, ::2])
    assert_close(window[1:4, ::2].cpu(), cpu + 1)
    assert window.count_nonzero().item() <= 12


def test_in_place_checks_the_result_type():
    x = torch.arange(3, device="tpu")
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        x.add_(1.5)


FILLS = {
    "masked_fill": lambda x, v: x.masked_fill(torch.ones_like(x, dtype=torch.bool), v),
    "masked_fill of a tensor": lambda x, v: x.masked_fill(
        torch.ones_like(x, dtype=torch.bool), torch.tensor(v, device=x.device)
    ),
    "fill_": lambda x, v: x.fill_(v),
    "fill_ of a tensor": lambda x, v: x.fill_(torch.tensor(v, device=x.device)),
    "index_fill": lambda x, v: x.index_fill(0, torch.tensor([0], device=x.device), v),
    "full_like": lambda x, v: torch.full_like(x, v),
}


@pytest.mark.parametrize("fill", FILLS)
@pytest.mark.parametrize(
    "dtype, values",
    [
        (torch.uint8, (300, -255, -300, 2.5)),
        (torch.int32, (2**31, -(2**31))),
        (torch.int64, (-5, 1e30, 1j)),
        (torch.float16, (1e5, float("inf"), 300)),
        (torch.bool, (300, 1e30)),
    ],
    ids=str,
)
def test_numbers_that_do_not_fit_raise_as_on_cpu(fill, dtype, values):
    def result(device, value):
        try:
            filled = FILLS[fill](torch.zeros(2, dtype=dtype, device=device), value).cpu()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return filled.tolist()

    for value in values:
        if "tensor" in fill and fill.startswith("fill_") and isinstance(value, float) and dtype is torch.int64:
            continue  # a copy of a float beyond int64 is undefined in C++
        assert result("tpu", value) == result("cpu", value), value


def test_booleans_are_not_subtracted():
    def message(f, device):
        with pytest.raises(RuntimeError, match="Subtraction, the `-` operator, with") as raised:
            f(torch.ones(2, device=device), torch.ones(2, dtype=torch.bool, device=device))
        return str(raised.value).splitlines()[0]

    for f in (
        lambda x, flag: x - True,
        lambda x, flag: x.sub_(flag),
        lambda x, flag: 1 - flag,
        lambda x, flag: flag - flag,
        lambda x, flag: torch._foreach_sub_([x], True),
        lambda x, flag: torch._foreach_sub([x], [flag]),
    ):
        assert message(f, "tpu") == message(f, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32], ids=str)
def test_too_large_a_number_becomes_the_largest_of_float8_e4m3fn(dtype):
    x = torch.tensor([1e6, -1e6, 470, 448, 3, 0]).to(dtype)
    if dtype.is_floating_point:
        x = torch.cat([x, torch.tensor([float("inf"), float("nan")], dtype=dtype)])
    y = torch.zeros(x.shape, dtype=torch.float8_e4m3fn, device="tpu").copy_(x.to("tpu"))
    for result in (x.to("tpu").to(torch.float8_e4m3fn), y):
        assert_close(result.cpu().float(), x.to(torch.float8_e4m3fn).float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32], ids=str)
def test_scaled_mm_computes_in_the_dtype_of_its_out(dtype):
    x, y = (torch.randn(16, 16).mul(40).to(torch.float8_e4m3fn) for _ in range(2))
    results = []
    for device in ("cpu", "tpu"):
        out, one = torch.zeros(16, 16, dtype=dtype, device=device), torch.ones((), device=device)
        torch._scaled_mm(x.to(device), y.to(device).t(), one, one, out=out)
        results.append(out.cpu().float())
    assert_close(results[1], results[0], rtol=1e-2, atol=1e-2)
    with pytest.raises(ValueError, match="out_dtype must match"):
        torch._scaled_mm(
            x.to("tpu"),
            y.to("tpu").t(),
            one,
            one,
            out_dtype=torch.float16,
            out=torch.zeros(16, 16, dtype=dtype, device="tpu"),
        )


def test_shape_errors_read_like_pytorch():
    for f in (lambda a, b: a + b, torch.mm, lambda a, b: torch.cat([a, b], 1)):
        a, b = torch.ones(2, 3), torch.ones(4, 5)
        with pytest.raises(RuntimeError) as cpu:
            f(a, b)
        with pytest.raises(RuntimeError) as tpu:
            f(a.to("tpu"), b.to("tpu"))
        assert str(cpu.value).splitlines()[0][:40] == str(tpu.value).splitlines()[0][:40]


def test_mixed_devices_say_which_argument_is_where():
    with pytest.raises(RuntimeError, match=r"tpu:0 and cpu.*'self' is on tpu:0.*'other' is on cpu"):
        torch.ones(2, device="tpu") + torch.ones(2)
    with pytest.raises(RuntimeError, match="found at least two devices"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2, device="tpu"))
    assert (torch.ones(2, device="tpu") + torch.tensor(1.0)).sum().item() == 4


def test_index_errors_come_no_later_than_the_next_synchronisation():
    x = torch.arange(5.0, device="tpu")
    bad = x[torch.tensor([0, 7], device="tpu")]
    with pytest.raises(IndexError, match="index 7 is out of bounds for dimension 0 with size 5"):
        bad.cpu()
    assert x.sum().item() == 10
    torch.nn.functional.embedding(torch.tensor([9], device="tpu"), torch.ones(4, 2, device="tpu"))
    with pytest.raises(IndexError, match="index out of range in self"):
        torch.tpu.synchronize()
    x.gather(0, torch.tensor([3, -1, 8], device="tpu"))
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        x.sum().item()


def test_debug_mode_raises_on_the_line(mode):
    x = torch.arange(5.0, device="tpu")
    assert torch.tpu.eager_mode == mode
    with torch.tpu.set_eager_mode("debug"), pytest.raises(IndexError):
        assert torch.tpu.eager_mode == "debug"
        x[torch.tensor([7], device="tpu")]
    assert torch.tpu.eager_mode == mode
    with pytest.raises(ValueError, match="unknown eager mode"):
        torch.tpu.set_eager_mode("fast").__enter__()


def test_masks():
    cpu, x = both(4, 5)
    mask = cpu > 0
    assert_close(x[mask.to("tpu")].cpu(), cpu[mask])
    assert_close(x[mask].cpu(), cpu[mask])
    assert_close(x[:, mask[0].to("tpu")].cpu(), cpu[:, mask[0]])
    x[mask.to("tpu")] = 3.0
    cpu[mask] = 3.0
    rows = torch.tensor([True, False, True, False])
    x[rows.to("tpu")] = torch.zeros(5, device="tpu")
    cpu[rows] = torch.zeros(5)
    x[rows.to("tpu"), 1] = torch.tensor([7.0, 8.0], device="tpu")
    cpu[rows, 1] = torch.tensor([7.0, 8.0])
    assert_close(x.cpu(), cpu)
    assert_close(x.nonzero().cpu(), cpu.nonzero())
    assert_close(torch.masked_select(x, x > 1).cpu(), torch.masked_select(cpu, cpu > 1))
    with pytest.raises(IndexError, match="mask"):
        x[torch.tensor([True, False], device="tpu")]


def test_fallback_counts_and_says_so():
    from torchtpu.eager import fallback

    fallback.reset_fallbacks()
    op = torch.ops.aten._test_optional_intlist.default  # PyTorch's own test operator: nobody will give it a lowering
    values = torch.ones(2, dtype=torch.int32)
    with pytest.warns(UserWarning, match="runs on the CPU"):
        assert_close(op(values.to("tpu"), [3, 4]).cpu(), op(values, [3, 4]))
    assert torch.tpu.fallback_count() == 1
    assert torch.tpu.fallbacks() == {"aten._test_optional_intlist.default": 1}
    fallback.reset_fallbacks()


def test_storage_resize_set_and_bytes():
    x = torch.arange(6.0, device="tpu")
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(24)
    x.copy_(torch.arange(6.0))
    assert_close(x.cpu(), torch.arange(6.0))
    x.resize_(8)
    assert_close(x[:6].cpu(), torch.arange(6.0))
    y = torch.empty(0, device="tpu").set_(x.untyped_storage(), 2, (2, 2), (2, 1))
    assert_close(y.cpu(), torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
    y.mul_(2)
    assert_close(x[:6].cpu(), torch.tensor([0.0, 1.0, 4.0, 6.0, 8.0, 10.0]))
    b = x.view(torch.uint8)
    b[:4] = 0
    assert_close(x[:6].cpu(), torch.tensor([0.0, 1.0, 4.0, 6.0, 8.0, 10.0]))
    assert_close(x.view(torch.int32).cpu(), x.cpu().view(torch.int32))


def test_conjugate_and_negative_views():
    cpu = torch.randn(3, 4, dtype=torch.complex64)
    x = cpu.to("tpu")
    assert_close(x.conj().cpu(), cpu.conj())
    assert_close((x.conj() * 2).cpu(), cpu.conj() * 2)
    assert_close(x.conj().imag.cpu(), cpu.conj().imag)
    x.conj().mul_(1j)
    cpu.conj().mul_(1j)
    assert_close(x.cpu(), cpu)
    x.real.add_(1)
    cpu.real.add_(1)
    assert_close(x.cpu(), cpu)


def test_printing():
    x = torch.arange(3.0, device="tpu")
    assert repr(x) == "tensor([0., 1., 2.], device='tpu:0')"
    assert "grad_fn" in repr(x.clone().requires_grad_() * 2)
    assert repr(torch.ones(2, dtype=torch.int64, device="tpu")) == "tensor([1, 1], device='tpu:0')"


def test_numpy_and_dlpack_refuse_as_cuda_does():
    x = torch.ones(2, device="tpu")
    with pytest.raises(TypeError, match="can't convert tpu:0 device type tensor to numpy"):
        x.numpy()
    with pytest.raises((BufferError, RuntimeError)):
        numpy.from_dlpack(x)
    assert x.tolist() == [1.0, 1.0] and float(x[0]) == 1.0 and x.any().item() is True


def test_random_numbers_follow_the_seed():
    torch.manual_seed(3)
    a = torch.randn(100, device="tpu"), torch.rand(5, device="tpu"), torch.randperm(10, device="tpu")
    torch.manual_seed(3)
    before = statistics.compiles
    b = torch.randn(100, device="tpu"), torch.rand(5, device="tpu"), torch.randperm(10, device="tpu")
    assert statistics.compiles == before
    assert_close(a, b)
    assert not torch.equal(torch.randn(100, device="tpu"), a[0])
    g = torch.Generator("tpu").manual_seed(1)
    x = torch.empty(1000, device="tpu").normal_(2.0, 3.0, generator=g)
    assert abs(x.mean().item() - 2) < 0.4 and abs(x.std().item() - 3) < 0.3
    assert torch.equal(
        x, torch.empty(1000, device="tpu").normal_(2.0, 3.0, generator=torch.Generator("tpu").manual_seed(1))
    )
    with pytest.raises(RuntimeError, match="generator"):
        torch.empty(3, device="tpu").normal_(generator=torch.Generator())


def test_autograd_through_views_and_in_place():
    def run(device):
        torch.manual_seed(0)
        x = torch.randn(4, 6).to(device).requires_grad_()
        y = x * 2
        y[1:3, ::2] += x[0, :3]
        y.t()[2].mul_(3)
        (y.sin() * torch.arange(6.0, device=device)).sum().backward()
        return x.grad.cpu()

    assert_close(run("tpu"), run("cpu"))


def test_overlapping_writes_are_refused():
    x = torch.zeros(3, device="tpu")
    with pytest.raises(RuntimeError, match="single memory location"):
        x.expand(2, 3).add_(1)
    with pytest.raises(RuntimeError, match="single memory location"):
        x[1:].add_(x[:-1])
    nothing = torch.zeros(1, 0, device="tpu").expand(3, 0)
    assert nothing.add_(1) is nothing and nothing.copy_(nothing.clone()) is nothing


def test_emulated_dtypes_warn_once_on_a_tpu(mode, monkeypatch):
    from torchtpu.eager import preconditions

    monkeypatch.setattr(preconditions.devices, "platform", lambda: "tpu")
    monkeypatch.setattr(preconditions, "_warned", set())
    x = torch.ones(2, len(mode), 1, 3, dtype=torch.float64, device="tpu")  # a size new in each mode
    with pytest.warns(UserWarning, match="float64 is emulated on TPU, many times slower than float32"):
        x + 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x * 2
        torch.ones(3, device="tpu") + 1


@pytest.mark.parametrize(
    "write",
    [
        lambda x, i: torch.take(x, i, out=x),
        lambda x, i: torch.cat([x, x], out=x),
        lambda x, i: torch.gather(x, 0, i, out=x),
        lambda x, i: torch.masked_select(x, x > 0, out=x),
        lambda x, i: torch.index_select(x, 0, i[0], out=x),
        lambda x, i: torch.nonzero(i, out=i),
        lambda x, i: x.scatter_(0, i, x),
        lambda x, i: x.index_add_(0, i[0], x),
        lambda x, i: x.index_put_((i[0],), x),
    ],
)
def test_results_that_are_read_out_of_order_cannot_be_arguments(write):
    for device in ("cpu", "tpu"):
        x, i = torch.rand(4, 4).to(device), torch.zeros(4, 4, dtype=torch.long).to(device)
        with pytest.raises(RuntimeError, match="refer to a single memory location"):
            write(x, i)


@pytest.mark.parametrize("name", ["sum", "prod", "cumsum", "cumprod", "nansum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
def test_reductions_compute_in_the_dtype_of_out(name, dtype):
    x = torch.arange(12).reshape(3, 4) * 0.7 - 3
    if name == "nansum":
        x = x.int()
    expected, out = torch.zeros(0, dtype=dtype), torch.zeros(0, dtype=dtype, device="tpu")
    getattr(torch, name)(x, dim=1, out=expected)
    getattr(torch, name)(x.to("tpu"), dim=1, out=out)
    assert_close(out.cpu(), expected)


@pytest.mark.parametrize("size", [(2, 3), (4, 2, 3), (1,), (0,), (2, 2)])
def test_normal_draws_what_its_out_holds(size):
    """With a tensor of means: PyTorch does not resize the out first, as it does elsewhere."""
    found = []
    for device in ("cpu", "tpu"):
        try:
            result = torch.normal(torch.ones(2, 3, device=device), 1e-9, out=torch.zeros(size, device=device))
            found.append(result.cpu())
        except RuntimeError as error:
            found.append(str(error))
    if size in ((0,), (2, 2)):
        assert found[0] == found[1] and "must match the size of tensor b" in found[1]
    else:
        torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["native_batch_norm", "_native_batch_norm_legit"])
def test_batch_norm_with_outs_updates_its_statistics(name):
    function, x = getattr(torch.ops.aten, name).out, torch.randn(4, 3, 5)
    found = []
    for device in ("cpu", "tpu"):
        mean, var, *outs = (torch.zeros(n, device=device) for n in (3, 3, x.shape, 3, 3))
        weight = torch.full((3,), 2.0, device=device)
        arguments = dict(zip(("out", "save_mean", "save_invstd"), outs, strict=True))
        function(x.to(device), weight, None, mean, var, True, 0.1, 1e-5, **arguments)
        found.append([t.cpu() for t in (mean, var, *outs)])
    torch.testing.assert_close(found[1], found[0])
    assert found[0][0].abs().min() > 0


@pytest.mark.parametrize(
    ("driver", "full"),
    [("gels", True), *((d, f) for d in ("gelsy", "gelsd", "gelss") for f in (True, False))],  # gels takes no other
)
def test_least_squares_has_residuals_of_full_rank_only(driver, full):
    a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    if not full:
        a = a[:1].expand(5, 3)
    expected = torch.linalg.lstsq(a, b, driver=driver)
    found = torch.linalg.lstsq(a.to("tpu"), b.to("tpu"), driver=driver)
    torch.testing.assert_close([t.cpu() for t in found], list(expected))


@pytest.mark.parametrize("message", [(), ("three must be less than three",)])
def test_asserted_values_raise_when_the_device_is_waited_for(message):
    x = torch.arange(3, device="tpu")
    torch._assert_async((x < 3).all(), *message)
    torch.tpu.synchronize()
    with pytest.raises(RuntimeError, match=message[0] if message else "Expected Tensor with single nonzero value"):
        torch._assert_async((x < 2).all(), *message)
        torch.tpu.synchronize()
