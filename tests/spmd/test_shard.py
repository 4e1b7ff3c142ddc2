"""Models divided over two devices of this process do what they do on one."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from small_model import Block, build, train, value_of
from torch import nn

from torchtpu import spmd
from torchtpu.runtime import observe
from torchtpu.sharding import Plan, PlanError, Rule

PLANS = ("tp=2", "fsdp=2", "dp=2")


def spec(t: torch.Tensor):
    parts = list(value_of(t).sharding.spec)
    return tuple(parts + [None] * (t.dim() - len(parts)))


@pytest.fixture(scope="module")
def alone() -> list[float]:
    """Losses on one device."""
    return train(build().to("tpu"))[0]


@pytest.mark.parametrize("plan", PLANS)
def test_training_equals_one_device(plan: str, alone: list[float]) -> None:
    model = spmd.shard(build(), plan)
    losses, optimizer = train(model)
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)
    for share in spmd.table(model):
        p = dict(model.named_parameters()).get(share.name)
        if p is None:
            continue
        assert value_of(p).addressable_shards[0].data.nbytes == share.nbytes
        for state in (p.grad, optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]):
            assert spec(state) == spec(p)


def test_no_step_compiles_anew() -> None:
    model = spmd.shard(build(), "fsdp=2")
    train(model, steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiles = []
    for _ in range(4):
        tokens = torch.ones(4, 6, dtype=torch.long).to("tpu")
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()
        torch.tpu.synchronize()
        compiles.append(torch.tpu.compile_stats()["compiles"])
    assert compiles[1] == compiles[2] == compiles[3]


@pytest.mark.parametrize("mode", ["strict", "debug"])
def test_operator_by_operator(mode: str, alone: list[float]) -> None:
    with torch.tpu.set_eager_mode(mode):
        losses, optimizer = train(spmd.shard(build(), "fsdp=2"), steps=2)
    torch.testing.assert_close(losses, alone[:2], rtol=1e-5, atol=1e-6)
    assert all(spec(s["exp_avg"]) == spec(p) for p, s in optimizer.state.items())


@pytest.mark.parametrize("plan", ["tp=2", "fsdp=2"])
def test_compiled(plan: str, alone: list[float]) -> None:
    torch._dynamo.reset()
    model = spmd.shard(build(), plan)
    losses, _ = train(model, run=torch.compile(model, fullgraph=True))
    torch.testing.assert_close(losses, alone, rtol=1e-5, atol=1e-6)


def test_compiled_for_changing_sizes() -> None:
    """Also the parts of the graph that read nothing divided, and say themselves that they run on the mesh."""
    torch._dynamo.reset()
    one, model = build().to("tpu"), spmd.shard(build(), "fsdp=2")
    run = torch.compile(model, dynamic=True)
    with torch.no_grad():
        for rows in (4, 8, 12):
            tokens = (torch.arange(6 * rows).reshape(rows, 6) % 32).to("tpu")
            torch.testing.assert_close(run(tokens).cpu(), one(tokens).cpu(), rtol=1e-5, atol=1e-6)


def test_dropout_draws_what_one_device_draws() -> None:
    results = []
    for plan in (None, "fsdp=2"):
        model = build(dropout=0.5)
        model = model.to("tpu") if plan is None else spmd.shard(model, plan)
        torch.tpu.manual_seed(3)
        results.append(train(model)[0])
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_backward_after_the_loss_was_read() -> None:
    """The graph of autograd outlives the program of the forward pass; it holds parameters as they are stored."""
    model = spmd.shard(build(), "fsdp=2")
    loss = model(torch.ones(4, 6, dtype=torch.long).to("tpu")).square().mean()
    value = loss.item()
    loss.backward()
    plain = build().to("tpu")
    expected = plain(torch.ones(4, 6, dtype=torch.long).to("tpu")).square().mean()
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(model.up_proj.weight.grad.cpu(), plain.up_proj.weight.grad.cpu(), rtol=1e-4, atol=1e-6)


def test_a_parameter_changed_before_backward_is_an_error() -> None:
    model = spmd.shard(build(), "fsdp=2")
    loss = model(torch.ones(4, 6, dtype=torch.long).to("tpu")).square().mean()
    with torch.no_grad():
        model.down_proj.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_names_classes_and_ties_stay() -> None:
    plain, model = build(), build()
    before = dict(model.named_parameters())
    assert spmd.shard(model, "fsdp=2") is model
    assert list(model.state_dict()) == list(plain.state_dict())
    assert model.lm_head.weight is model.embed_tokens.weight
    assert all(before[n] is p for n, p in model.named_parameters())
    assert type(model.up_proj) is nn.Linear
    assert all(p.device == torch.device("tpu", 0) and p.is_leaf for p in model.parameters())
    model(torch.ones(2, 3, dtype=torch.long).to("tpu"))
    assert isinstance(model.up_proj.weight, nn.Parameter)


def test_parameters_come_back_after_an_error() -> None:
    model = spmd.shard(build(), "fsdp=2")
    with pytest.raises(RuntimeError):
        model.up_proj(torch.ones(2, 3, device="tpu"))
    with pytest.raises((RuntimeError, IndexError)):
        model(torch.full((2, 3), 99).to("tpu"))
        torch.tpu.synchronize()
    assert isinstance(model.up_proj.weight, nn.Parameter)


def test_values_do_not_change() -> None:
    plain, model = build(), spmd.shard(build(), "tp=2")
    for (n, a), b in zip(plain.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(a, b.cpu()), n


def test_from_the_device_and_from_meta() -> None:
    moved = spmd.shard(build().to("tpu"), "fsdp=2")
    assert spec(moved.up_proj.weight) == ("fsdp", None)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
    torch.tpu.manual_seed(5)
    made = spmd.shard(empty, "fsdp=2")
    torch.tpu.manual_seed(5)
    with torch.device("tpu"):
        expected = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8, bias=False))
    for a, b in zip(made.parameters(), expected.parameters(), strict=True):
        assert spec(a)[0] == "fsdp" or spec(a)[1] == "fsdp"
        torch.testing.assert_close(a.cpu(), b.cpu())


def test_meta_needs_a_way_to_initialise() -> None:
    with torch.device("meta"):
        model = Block()
    with pytest.raises(RuntimeError, match=r"Block.*no reset_parameters"):
        spmd.shard(model, "fsdp=2")


def test_state_is_saved_whole_and_loaded_divided() -> None:
    model = spmd.shard(build(), "fsdp=2")
    _, optimizer = train(model, steps=2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, map_location="cpu")
    assert saved["model"]["up_proj.weight"].shape == (64, 16)
    losses = []
    for plan in ("tp=2", None):
        other = build()
        other = other.to("tpu") if plan is None else spmd.shard(other, plan)
        other.load_state_dict(saved["model"])
        new = torch.optim.AdamW(other.parameters(), lr=1e-2)
        new.load_state_dict(copy.deepcopy(saved["optimizer"]))
        tokens = torch.arange(24).reshape(4, 6).to("tpu")
        for _ in range(2):
            loss = nn.functional.cross_entropy(other(tokens).flatten(0, 1), tokens.flatten())
            new.zero_grad()
            loss.backward()
            new.step()
            losses.append(loss.item())
        if plan is not None:
            assert spec(other.up_proj.weight) == ("tp", None)
            assert spec(new.state[other.up_proj.weight]["exp_avg"]) == ("tp", None)
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5, abs=1e-6)


def test_copy_into_a_parameter_keeps_its_place() -> None:
    model = spmd.shard(build(), "fsdp=2")
    with torch.no_grad():
        model.up_proj.weight.copy_(torch.ones(64, 16))
        assert spec(model.up_proj.weight) == ("fsdp", None)
        model.up_proj.weight.copy_(torch.full((64, 16), 2.0).to("tpu"))
    assert spec(model.up_proj.weight) == ("fsdp", None)
    assert model.up_proj.weight.sum().item() == 2 * 64 * 16


def test_batches() -> None:
    model = spmd.shard(build(), "dp=2")
    x = torch.arange(8.0).reshape(4, 2)
    for given in (x, x.to("tpu"), (x.to("tpu") * 1)):
        made = spmd.shard_batch({"x": [given]}, model)["x"][0]
        assert torch.equal(made.cpu(), x)
        assert spec(made) == ("dp", None)
    odd = spmd.shard_batch(torch.ones(3), model)
    assert torch.equal(odd.cpu(), torch.ones(3))


def test_plain_tensors_may_join() -> None:
    """A tensor on one device is copied to all of the mesh; results mix freely afterwards."""
    w = spmd.shard(nn.Linear(4, 4, bias=False), "fsdp=2").weight
    x = torch.arange(16.0).reshape(4, 4)
    assert torch.equal((w.detach() + x.to("tpu")).cpu(), w.detach().cpu() + x)
    y = x.to("tpu")
    y += w.detach()
    assert torch.equal(y.cpu(), x + w.detach().cpu())
    assert w[1].sum().item() == pytest.approx(w.detach().cpu()[1].sum().item())
    assert torch.equal(w.detach().nonzero().cpu(), w.detach().cpu().nonzero())
    assert str(w.detach()[:1, :1].cpu().item()) in str(w.detach()[:1, :1].tolist())


def test_described() -> None:
    text = spmd.describe(spmd.shard(build(), "tp=2"))
    assert "up_proj.weight" in text
    assert "64/tp x 16" in text
    assert "tp=2: " in text


def test_errors() -> None:
    with pytest.raises(RuntimeError, match=r"needs 64 devices, and this process has 2; TORCHTPU_CPU_DEVICES=64"):
        spmd.shard(build(), "fsdp=64")
    with pytest.raises(PlanError, match="does not divide over"):
        spmd.shard(nn.Linear(3, 3), Plan({"tp": 2}, (Rule("weight", (("tp",),)),)))
    model = spmd.shard(build(), "tp=2")
    with pytest.raises(RuntimeError, match="divided already"):
        spmd.shard(model, "tp=2")
    with pytest.raises(RuntimeError, match=r"call torchtpu.spmd.shard"):
        spmd.describe(nn.Linear(2, 2))


class Layer(nn.Module):
    """A residual layer with the parts of a decoder's that plans know."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up_proj = nn.Linear(width, 2 * width)
        self.down_proj = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm(x))))


class Deep(nn.Module):
    """Enough layers for the program to be compiled in pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_repeated_layers_are_compiled_once() -> None:
    gradients = []
    nothing = lambda _: None  # noqa: E731
    for plan in (None, "fsdp=2"):
        torch.manual_seed(0)
        model = Deep()
        model = model.to("tpu") if plan is None else spmd.shard(model, plan)
        programs: list[observe.CompiledProgram] = []
        with observe.observing(programs.append, nothing, nothing):
            model(torch.linspace(-1, 1, 4 * 3 * 8).reshape(4, 3, 8).to("tpu")).square().mean().backward()
            gradients.append([p.grad.cpu() for p in model.parameters()])
        parts = [p.about.name for p in programs if p.about.name.startswith("part")]
        assert 1 < len(parts) < 10, parts
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)
    assert spec(model.layers[0].up_proj.weight.grad) == ("fsdp", None)
