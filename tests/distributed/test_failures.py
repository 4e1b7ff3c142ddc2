"""Nothing hangs silently: ranks that disagree, that do not come, that die."""

import signal

import pytest
from launcher import JOBS, finish, free_port, names, run, start


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    return run("disagreements", 2, tmp_path_factory.mktemp("job"))


@pytest.mark.parametrize("check", names("disagreements"))
def test_disagreements(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])


@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_rank_is_an_error_on_every_other(tmp_path, victim):
    processes = start(4, [str(JOBS / "killed.py"), str(victim)], tmp_path, MASTER_PORT=str(free_port()))
    codes, outputs = finish(processes, tmp_path, 90)
    assert codes[victim] == -signal.SIGKILL
    for rank in set(range(4)) - {victim}:
        assert codes[rank] == 3, outputs[rank]
        assert "all_reduce(SUM) float32[2000], collective" in outputs[rank]
        assert "killed.py:" in outputs[rank] and f"rank {victim}:" in outputs[rank]
