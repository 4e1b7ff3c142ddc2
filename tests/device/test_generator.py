"""Generators: state, seeding, and reserving draws."""

import pytest
import torch

from torchtpu import _C


def test_state_is_seed_and_offset():
    generator = torch.Generator("tpu").manual_seed(7)
    assert generator.device == torch.device("tpu:0")
    assert _C.reserve_draws(generator, 0, 5) == (7, 0)
    assert _C.reserve_draws(generator, 0, 1) == (7, 5)
    state = generator.get_state()
    assert state.dtype is torch.uint8 and state.device.type == "cpu"
    assert state.view(torch.int64).tolist() == [7, 6]
    _C.reserve_draws(generator, 0, 3)
    generator.set_state(state)
    assert _C.reserve_draws(generator, 0, 1) == (7, 6)
    assert generator.manual_seed(8).initial_seed() == 8
    assert _C.reserve_draws(generator, 0, 1) == (8, 0)
    generator.set_offset(4)
    assert generator.get_offset() == 4


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(5, dtype=torch.uint8), "16 contiguous bytes"),
        (torch.zeros(32, dtype=torch.uint8)[::2], "16 contiguous bytes"),
        (torch.zeros(16), "ByteTensor"),
    ],
)
def test_a_wrong_state_is_refused(state, message):
    with pytest.raises((RuntimeError, TypeError), match=message):
        torch.Generator("tpu").set_state(state)


def test_copies_and_shared_state():
    generator = torch.Generator("tpu").manual_seed(3)
    copy, shared = generator.clone_state(), generator.graphsafe_get_state()
    generator.manual_seed(9)
    assert (copy.initial_seed(), shared.initial_seed()) == (3, 9)
    copy.graphsafe_set_state(generator)
    generator.manual_seed(10)
    assert copy.initial_seed() == 10


def test_seeding_all_generators():
    torch.manual_seed(11)
    assert {g.initial_seed() for g in torch.tpu.default_generators} == {11}
    torch.tpu.manual_seed(12)
    assert torch.tpu.initial_seed() == 12
    torch.tpu.manual_seed_all(13)
    states = torch.tpu.get_rng_state_all()
    torch.tpu.seed_all()
    torch.tpu.set_rng_state_all(states)
    assert torch.tpu.initial_seed() == 13
    torch.tpu.seed()
    assert torch.tpu.initial_seed() != 13


def test_default_generators_are_used_and_differ_by_device(two_devices):
    torch.tpu.manual_seed_all(1)
    assert _C.reserve_draws(None, 1, 4) == (1, 0)
    assert _C.reserve_draws(None, 1, 4) == (1, 4)
    assert _C.reserve_draws(None, 0, 4) == (1, 0)
    assert torch.Generator("tpu:1").device.index == 1


def test_fork_rng_restores():
    torch.tpu.manual_seed(5)
    with torch.random.fork_rng(devices=[0], device_type="tpu"):
        torch.tpu.manual_seed(6)
    assert torch.tpu.initial_seed() == 5


def test_a_cpu_generator_is_refused():
    with pytest.raises(RuntimeError, match="Expected a 'tpu' device type for generator but found 'cpu'"):
        _C.reserve_draws(torch.Generator(), 0, 1)
