"""What a process learns from its launcher, and what happens without one."""

import subprocess
import sys

import pytest
from launcher import environment_of

from torchtpu.runtime import processes

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def job(monkeypatch, **given):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    return processes.job()


STORE = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def test_a_process_on_its_own(monkeypatch):
    assert job(monkeypatch) is None
    assert job(monkeypatch, RANK="0", WORLD_SIZE="1", **STORE) is None


def test_torchrun(monkeypatch):
    found = job(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", **STORE)
    assert (found.rank, found.size, found.local_rank, found.local_size) == (5, 8, 1, 4)


def test_a_launcher_that_says_nothing_of_the_host(monkeypatch):
    found = job(monkeypatch, RANK="1", WORLD_SIZE="2", **STORE)
    assert (found.local_rank, found.local_size) == (1, 2)


@pytest.mark.parametrize("wrong", [{"RANK": "2"}, {"RANK": "x"}, {"LOCAL_RANK": "3"}])
def test_contradictions(monkeypatch, wrong):
    with pytest.raises(ValueError, match="RANK"):
        job(
            monkeypatch,
            **{"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", **STORE, **wrong},
        )


def test_each_process_of_a_tpu_host_gets_a_chip(monkeypatch):
    found = job(monkeypatch, RANK="2", WORLD_SIZE="4", LOCAL_RANK="2", LOCAL_WORLD_SIZE="4", **STORE)
    variables = processes.libtpu_environment(found)
    assert variables["TPU_VISIBLE_CHIPS"] == "2" and variables["TPU_PROCESS_BOUNDS"] == "2,2,1"
    assert variables["TPU_PROCESS_ADDRESSES"].split(",")[2].endswith(variables["TPU_PROCESS_PORT"])
    several = job(monkeypatch, RANK="2", WORLD_SIZE="8", LOCAL_RANK="2", LOCAL_WORLD_SIZE="4", **STORE)
    with pytest.raises(RuntimeError, match="TPU_VISIBLE_CHIPS"):
        processes.libtpu_environment(several)


def program(text, folder, **environment):
    """Standard error of a program that no launcher started, which must fail."""
    env = {k: v for k, v in environment_of(0, 1, folder).items() if k not in NAMES}
    done = subprocess.run(
        [sys.executable, "-c", text], env=env | environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    return done.stderr


def test_the_device_was_used_too_early(tmp_path):
    text = (
        "import torch, torchtpu, torch.distributed as dist\n"
        "torch.ones(2, device='tpu')\n"
        f"dist.init_process_group('tpu', init_method='file://{tmp_path}/store', rank=0, world_size=2)\n"
    )
    assert "the tpu device was used before init_process_group" in program(text, tmp_path, TORCHTPU_COLLECTIVES="xla")


def test_a_wrong_transport(tmp_path):
    text = (
        "import torch, torchtpu, torch.distributed as dist\n"
        f"dist.init_process_group('tpu', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
    )
    assert "TORCHTPU_COLLECTIVES must be 'xla' or 'host'" in program(text, tmp_path, TORCHTPU_COLLECTIVES="mpi")


def test_registering_imports_nothing(tmp_path):
    text = (
        "import sys, torch, torchtpu, torch.distributed as dist\n"
        "assert dist.is_backend_available('tpu') and dist.is_backend_available('tpu_dist')\n"
        "assert not any(m.startswith('torchtpu.distributed.') for m in sys.modules) and 'jax' not in sys.modules\n"
        "raise SystemExit(1)\n"
    )
    assert program(text, tmp_path) == ""
