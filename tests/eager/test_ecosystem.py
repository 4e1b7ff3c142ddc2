"""The device under PyTorch's own machinery: files, pickles, loaders, threads, autocast, hooks, several devices."""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
import threading

import pytest
import torch
from torch.testing import assert_close

import torchtpu  # noqa: F401


def test_save_and_load(tmp_path):
    model = torch.nn.Linear(3, 2).to("tpu")
    path = tmp_path / "m.pt"
    torch.save(model.state_dict(), path)
    on_cpu = torch.load(path, map_location="cpu")
    assert {t.device.type for t in on_cpu.values()} == {"cpu"}
    for location in ("tpu", "tpu:0", torch.device("tpu")):
        loaded = torch.load(path, map_location=location)
        assert {str(t.device) for t in loaded.values()} == {"tpu:0"}
        assert_close({k: v.cpu() for k, v in loaded.items()}, on_cpu)
    assert {t.device.type for t in torch.load(path).values()} == {"tpu"}
    base = torch.arange(6.0, device="tpu")
    buffer = io.BytesIO()
    torch.save((base, base[2:].view(2, 2)), buffer)
    buffer.seek(0)
    whole, view = torch.load(buffer, map_location="tpu")
    view.add_(10)
    assert_close(whole.cpu(), torch.tensor([0.0, 1, 12, 13, 14, 15]))


def test_safetensors(tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = {
        "a": torch.randn(3, 2).to("tpu"),
        "b": torch.arange(4).to("tpu"),
        "c": torch.randn(2).bfloat16().to("tpu"),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    loaded = load_file(tmp_path / "x.safetensors", device="cpu")
    assert_close(loaded, {k: v.cpu() for k, v in tensors.items()})
    moved = {k: v.to("tpu") for k, v in loaded.items()}
    assert_close({k: v.cpu() for k, v in moved.items()}, loaded)


def test_copies_and_pickles():
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)).to("tpu")
    twin = copy.deepcopy(model)
    twin[0].weight.data.zero_()
    assert model[0].weight.abs().sum().item() > 0
    x = torch.randn(2, 3).to("tpu")[:, 1:]
    y = pickle.loads(pickle.dumps(x))
    assert y.device == x.device and torch.equal(x, y) and y.stride() == x.stride()
    assert torch.equal(copy.deepcopy(x), x)


def test_moving_a_module_keeps_its_parameters():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    before = model[0].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.to("tpu")
    assert model[0].weight is before is model[1].weight and before.is_tpu
    model(torch.ones(1, 2, device="tpu")).sum().backward()
    optimizer.step()
    model.cpu()
    assert before.device.type == "cpu"
    assert model.tpu()[0].weight.is_tpu


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers):
    torch.ones(1, device="tpu")  # the workers are forked from a process that uses the device
    data = torch.utils.data.TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    total = 0.0
    for x, y in torch.utils.data.DataLoader(data, batch_size=2, num_workers=workers, pin_memory=True):
        assert x.is_pinned()
        total += (x.to("tpu", non_blocking=True).sum() + y.to("tpu", non_blocking=True).sum()).item()
    assert total == 66 + 15


def test_threads():
    errors = []

    def work(seed: int) -> None:
        try:
            x = torch.full((16, 16), float(seed), device="tpu")
            for k in range(20):
                x = x + k % 3
                x[k % 16].mul_(1.0)
            assert x.sum().item() == 256 * (seed + sum(k % 3 for k in range(20)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(s,)) for s in range(6)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert not errors, errors


def test_autocast_and_scaler():
    def run(device: str):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 1)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=4.0, growth_interval=1)
        x = torch.linspace(-1, 1, 32).reshape(4, 8).to(device)
        for _ in range(3):
            with torch.autocast(device, dtype=torch.bfloat16):
                y = model(x)
                assert y.dtype is torch.bfloat16
                loss = torch.nn.functional.mse_loss(y.float(), torch.ones(4, 1, device=device))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return loss.item(), scaler.get_scale()

    (loss, scale), (expected, expected_scale) = run("tpu"), run("cpu")
    assert loss == pytest.approx(expected, rel=0.02) and scale == expected_scale
    assert torch.tpu.fallback_count() == 0


def test_gradient_hooks_checkpoint_and_functional():
    from torch.utils.checkpoint import checkpoint

    x = torch.randn(4, 4).to("tpu").requires_grad_()
    seen = []
    x.register_hook(lambda g: seen.append(g.device.type))
    checkpoint(lambda t: (t @ t).relu(), x, use_reentrant=False).sum().backward()
    assert seen == ["tpu"]
    y = torch.func.grad(lambda t: (t**3).sum())(x.detach())
    assert_close(y.cpu(), 3 * x.detach().cpu() ** 2)
    z = torch.func.vmap(lambda row: row.softmax(0))(x.detach())
    assert_close(z.cpu(), x.detach().cpu().softmax(1))
    _, tangent = torch.func.jvp(torch.sin, (x.detach(),), (torch.ones_like(x),))
    assert_close(tangent.cpu(), x.detach().cpu().cos())
    assert torch.autograd.gradcheck(
        lambda t: (t * t).sum(), torch.randn(3, dtype=torch.float64, device="tpu", requires_grad=True)
    )


def test_default_device():
    with torch.device("tpu"):
        x = torch.ones(2)
        model = torch.nn.Linear(2, 2)
    assert x.is_tpu and model.weight.is_tpu
    with torch.device("meta"):
        skeleton = torch.nn.Linear(2, 2)
    skeleton.to_empty(device="tpu").load_state_dict(model.state_dict())
    assert_close(skeleton(x).cpu(), model(x).cpu())


def run_python(code: str, status: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done.stdout


def test_several_devices():
    code = """
import torch
assert torch.tpu.device_count() == 8
x = torch.arange(6.0, device="tpu:1").reshape(2, 3)
y = x.t().to("tpu:7")
assert y.device == torch.device("tpu:7") and torch.equal(y.cpu(), x.cpu().t()) and y.stride() == (1, 3)
z = torch.empty(3, 2, device="tpu:2").copy_(y)
assert (z + 1).device.index == 2
with torch.tpu.device(3):
    assert torch.ones(1, device="tpu").device.index == 3
try:
    x + z.t()
except RuntimeError as error:
    assert "tpu:1 and tpu:2" in str(error)
else:
    raise AssertionError
w = torch.ones(2, device="tpu:4", requires_grad=True)
(w.to("tpu:5") * 3).sum().backward()
assert w.grad.device.index == 4 and w.grad.tolist() == [3, 3]
torch.manual_seed(0); a = torch.rand(3, device="tpu:6")
torch.manual_seed(0); b = torch.rand(3, device="tpu:6")
assert torch.equal(a, b)
model = torch.nn.Linear(2, 2).to("tpu:1")
assert model(torch.ones(1, 2, device="tpu:1")).device.index == 1
torch.tpu.synchronize("tpu:1")
print("done")
"""
    assert "done" in run_python(code, TORCHTPU_CPU_DEVICES="8")


def test_backward_first_on_the_cpu_then_on_the_device():
    # The autograd engine sizes its queues at the first backward of the process.
    code = """
import torch
torch.ones(1, requires_grad=True).sum().backward()
x = torch.ones(2, device="tpu", requires_grad=True)
(x * 2).sum().backward()
assert x.grad.tolist() == [2, 2]
print("done")
"""
    assert "done" in run_python(code)


def test_forked_child_gets_a_clear_error():
    code = """
import os, torch
x = torch.ones(2, device="tpu")
pid = os.fork()
if pid == 0:
    try:
        torch.ones(1, device="tpu")
    except RuntimeError as error:
        assert "spawn" in str(error), error
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
assert x.sum().item() == 2
print("done")
"""
    assert "done" in run_python(code)


def test_out_of_memory_says_how_much():
    free, total = torch.tpu.mem_get_info()
    assert 0 < free <= total
    huge = torch.empty(1 << 42, device="tpu")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"tpu:0 out of memory. Tried to allocate 16384.00 GiB. Of .* are free"
    ):
        huge.fill_(1.0).sum().item()


def test_an_operator_without_any_kernel_names_itself():
    from torchtpu.eager import fallback

    fallback.reset_fallbacks()  # it warns once
    x = torch.ones(2, 2, device="tpu")
    message = r"aten._cudnn_rnn_flatten_weight.*neither for the tpu device"
    with pytest.warns(UserWarning), pytest.raises(NotImplementedError, match=message):
        torch.ops.aten._cudnn_rnn_flatten_weight([x], 1, 2, 2, 2, 0, 1, False, False)
    fallback.reset_fallbacks()


def test_ctrl_c_during_a_compile():
    code = """
import os, signal, threading, time, torch
os.environ["TORCHTPU_REPEATS"] = "0"  # compiled in pieces it would take no time
from torchtpu.runtime import compiler, devices
import jax
x = torch.ones(8, device="tpu")

def long(a):  # minutes of compile
    for k in range(6000):
        a = jax.numpy.sin(a) * (a[::-1] + k)
    return [a]

def interrupt():
    while not any(t.name == "torchtpu-compile" for t in threading.enumerate()):
        time.sleep(0.05)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    compiler.compile_program(long, [jax.numpy.ones(8)], devices.device(0), "a long program")
except KeyboardInterrupt:
    assert any(t.name == "torchtpu-compile" for t in threading.enumerate()), "the compile was over before the interrupt"
    assert (x + 1).sum().item() == 16
    print("interrupted", flush=True)
"""
    assert "interrupted" in run_python(code, status=130)
