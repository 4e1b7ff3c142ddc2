"""Nothing hangs silently: ranks that disagree, that do not come, that die."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import JOBS, environment_of, finish, free_port, names, run, start


@pytest.fixture(scope="module", params=["host", pytest.param("xla", marks=pytest.mark.heavy)])
def outcome(request, tmp_path_factory):
    return run("disagreements", 2, tmp_path_factory.mktemp("job"), TORCHTPU_COLLECTIVES=request.param)


@pytest.mark.parametrize("check", names("disagreements"))
def test_disagreements(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.heavy)])
def test_a_killed_rank_is_an_error_on_every_other(tmp_path, victim):
    processes = start(4, [str(JOBS / "killed.py"), str(victim)], tmp_path, MASTER_PORT=str(free_port()))
    codes, outputs = finish(processes, tmp_path, 180)
    assert codes[victim] == -signal.SIGKILL
    for rank in set(range(4)) - {victim}:
        assert codes[rank] == 3, outputs[rank]
        assert "all_reduce(SUM) float32[2000], collective" in outputs[rank]
        assert "killed.py:" in outputs[rank] and f"rank {victim}:" in outputs[rank]


def test_torchrun_leaves_no_process_behind(tmp_path):
    """One of the processes that torchrun started dies: the others end, and so does torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    # A shell that becomes the interpreter: its number is the one the process keeps.
    program = f'echo $$ >> "{tmp_path}/pids"; exec "{sys.executable}" "{JOBS / "killed.py"}" 1'
    environment = environment_of(0, 1, tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del environment[name]
    done = subprocess.run([*command, "bash", "-c", program], env=environment, capture_output=True, timeout=120)
    assert done.returncode != 0
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()
