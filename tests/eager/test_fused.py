"""Fused mode: what is recorded, when it runs, and that a loop compiles once."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from torch.testing import assert_close

import torchtpu  # noqa: F401
from torchtpu.eager.cache import RecompileWarning
from torchtpu.runtime.compiler import statistics


@pytest.fixture(autouse=True)
def mode():
    """These tests are about one mode."""
    with torch.tpu.set_eager_mode("fused"):
        yield "fused"


def test_a_chain_is_one_program_and_runs_when_read():
    x = torch.arange(8.0, device="tpu")
    torch.tpu.synchronize()
    before = torch.tpu.compile_stats()
    y = ((x * 2 + 1).sin().relu() - 3).sum()
    assert torch.tpu.compile_stats()["flushes"] == before["flushes"]
    y.item()
    after = torch.tpu.compile_stats()
    assert after["flushes"] == before["flushes"] + 1
    assert after["operators"] == before["operators"] + 6
    assert after["compiles"] == before["compiles"] + 1


def train(make, steps: int, device: str = "tpu", scaler: bool = False, accumulate: int = 1):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.0), torch.nn.GELU(), torch.nn.Linear(8, 3))
    model.to(device)
    optimizer = make(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps + 1, cycle_momentum=False)
    scale = torch.amp.GradScaler(device, enabled=scaler)
    data = torch.linspace(-1, 1, 24).reshape(4, 6).to(device)
    compiles, losses = [], []
    for _ in range(steps):
        for _ in range(accumulate):
            loss = model(data).square().mean()
            scale.scale(loss).backward()
        scale.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale.step(optimizer)
        scale.update()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        compiles.append(statistics.compiles)
    return losses, compiles


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW per tensor": lambda p: torch.optim.AdamW(p, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "RMSprop": lambda p: torch.optim.RMSprop(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_training_compiles_nothing_after_the_second_step(name):
    losses, compiles = train(OPTIMIZERS[name], 8)
    assert compiles[1:] == [compiles[1]] * 7
    expected, _ = train(OPTIMIZERS[name], 8, "cpu")
    assert losses == pytest.approx(expected, rel=1e-3)


def test_scaler_and_accumulation_compile_nothing_after_the_second_step():
    losses, compiles = train(OPTIMIZERS["SGD"], 7, scaler=True, accumulate=3)
    assert compiles[1:] == [compiles[1]] * 6
    expected, _ = train(OPTIMIZERS["SGD"], 7, "cpu", scaler=True, accumulate=3)
    assert losses == pytest.approx(expected, rel=1e-3)


def test_a_loop_that_never_reads_a_value_is_cut_into_equal_pieces():
    weight = torch.eye(4, device="tpu")
    x = torch.ones(4, device="tpu")
    for k in range(3000):
        x = weight @ x + k % 2
        if k == 1500:
            before = statistics.compiles
    assert statistics.compiles <= before + 1
    assert x[0].item() == 1 + 1500


def test_only_what_is_referenced_is_returned_and_old_buffers_are_reused():
    x = torch.zeros(1 << 20, device="tpu")
    torch.tpu.synchronize()
    pointers = set()
    for _ in range(4):
        x.add_(1)
        torch.tpu.synchronize()
        from torchtpu import _C

        pointers.add(_C.get_value(x)[0].unsafe_buffer_pointer())
    assert len(pointers) == 1  # the sum was written where the addend had been
    assert x.sum().item() == 4 * (1 << 20)


def test_shared_values_are_not_given_away():
    x = torch.zeros(1000, device="tpu")
    y = x.clone()
    z = x.detach().clone()
    torch.tpu.synchronize()
    x.add_(1)
    torch.tpu.synchronize()
    assert (x.sum().item(), y.sum().item(), z.sum().item()) == (1000, 0, 0)


def test_a_small_value_does_not_wait_for_what_it_does_not_need():
    weights = torch.randn(600, 600)
    left = torch.tensor([3, 1], device="tpu")
    w, total = weights.to("tpu"), torch.zeros(600, 600, device="tpu")
    torch.tpu.synchronize()
    for step in range(3):
        before = torch.tpu.compile_stats()
        total += w @ w.T
        left -= 1
        scaled = w * left.sum()  # reads what the flag needs, too
        done = (left < step).any()
        assert done.item() == (step == 1 or step == 2)
        after = torch.tpu.compile_stats()
        assert after["flushes"] == before["flushes"] + 1
        assert after["compiles"] == before["compiles"] + (2 if step == 0 else 0)  # the flag's program, and the rest
        wanted = weights * (4 - 2 * (step + 1))
        assert_close(scaled.cpu(), wanted)
    assert left.tolist() == [0, -2]
    assert_close(total.cpu(), 3 * (weights @ weights.T), rtol=1e-4, atol=1e-3)


def test_a_small_value_read_early_hides_no_wrong_index():
    table = torch.zeros(1000, 400, device="tpu")
    index = torch.tensor([1000], device="tpu")
    flag = torch.zeros(1, device="tpu")
    torch.tpu.synchronize()
    rows = torch.nn.functional.embedding(index, table) + table
    with pytest.raises(IndexError):  # at once if that program has finished by then
        assert (flag + 1).item() == 1
        rows.sum().item()


def test_recompiles_say_why():
    def run(n: int) -> None:
        x = torch.ones(n, device="tpu")
        for _ in range(30):
            x = x * 1.5 + 1
        x.sum().item()

    w = torch.ones(4, device="tpu")

    def variant(dim: int) -> None:
        x = w
        for _ in range(30):
            x = x * 1.5 + 1
        x.softmax(0).reshape(2, 2).sum(dim).tolist()

    run(4)
    variant(0)
    with pytest.warns(RecompileWarning, match=r"operator \d+ of \d+.*sum"):
        variant(1)
    assert any("sum" in m for m in torch.tpu.compile_stats()["misses"])
    with warnings.catch_warnings():
        warnings.simplefilter("error", RecompileWarning)
        variant(1)


def test_memory_stays_flat_over_a_long_loop():
    x = torch.ones(64, 64, device="tpu")
    loss = torch.zeros((), device="tpu")
    for _ in range(3000):  # every trace that the loop makes has been compiled then
        loss = loss * 0.5 + (x * 2).sum()
    loss.item()
    gc.collect()
    start = torch.tpu.memory_allocated()
    objects = len(gc.get_objects())
    for _ in range(10_000):
        loss = loss * 0.5 + (x * 2).sum()
    loss.item()
    gc.collect()
    assert torch.tpu.memory_allocated() == start
    assert len(gc.get_objects()) < objects + 2000


def test_an_exception_in_the_middle_loses_nothing():
    x = torch.ones(3, device="tpu")
    y = x + 1
    with pytest.raises(RuntimeError):
        y @ torch.ones(4, device="tpu")
    assert_close((y * 2).cpu(), torch.full((3,), 4.0))


def test_a_failed_program_says_so_where_its_values_are_read():
    huge = torch.empty(1 << 42, device="tpu")
    total = huge.fill_(1.0).sum()
    with pytest.raises(torch.OutOfMemoryError):
        torch.tpu.synchronize()
    with pytest.raises(torch.OutOfMemoryError):
        total.item()
    assert torch.ones(2, device="tpu").sum().item() == 2


def test_out_of_memory_names_the_largest_tensors_and_where_they_were_made():
    weights = [torch.ones(1 << 19, device="tpu") for _ in range(3)]  # made here
    product = weights[0][:1024, None] * weights[1][:1024]
    torch.tpu.synchronize()
    huge = torch.empty(1 << 42, device="tpu")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        huge.add_(1.0).sum().item()
    here = __file__
    line = test_out_of_memory_names_the_largest_tensors_and_where_they_were_made.__code__.co_firstlineno
    assert f"6.00 MiB: 3 x float32[524288], aten.ones.default, {here}:{line + 1}" in str(caught.value)
    assert f"4.00 MiB: 1 x float32[1024, 1024], aten.mul.Tensor, {here}:{line + 2}" in str(caught.value)
    assert product.sum().item() == 1 << 20


def test_peak_memory_counts_what_a_program_needs():
    x = torch.ones(1 << 18, device="tpu")
    torch.tpu.synchronize()
    torch.tpu.reset_peak_memory_stats()
    held = torch.tpu.memory_allocated()
    y = (x + 1).sin()
    torch.tpu.synchronize()
    assert held + y.nbytes <= torch.tpu.max_memory_used() <= held + y.nbytes + 4096
    torch.tpu.reset_peak_memory_stats()
    for _ in range(3):
        x.mul_(2)  # in place: nothing is held twice
        torch.tpu.synchronize()
    assert torch.tpu.max_memory_used() <= held + y.nbytes + 4096


def test_random_numbers_do_not_depend_on_the_mode():
    torch.manual_seed(5)
    a = torch.randn(7, device="tpu"), torch.nn.functional.dropout(torch.ones(50, device="tpu"), 0.5)
    with torch.tpu.set_eager_mode("strict"):
        torch.manual_seed(5)
        b = torch.randn(7, device="tpu"), torch.nn.functional.dropout(torch.ones(50, device="tpu"), 0.5)
    assert_close(a, b)
