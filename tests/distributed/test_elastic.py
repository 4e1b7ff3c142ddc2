"""A rank is killed, and torchrun's restart resumes. ``python -m conformance.failures`` does it many times."""

import pytest

from conformance import failures


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    return failures.undisturbed(tmp_path_factory.mktemp("undisturbed") / "job")


# In a collective while torchrun does not look, so that the others must notice; and while a checkpoint is written.
CASES = [(2, "collective", 6.0), pytest.param(0, "checkpoint", 0.1, marks=pytest.mark.heavy)]


@pytest.mark.parametrize(("victim", "point", "interval"), CASES)
def test_killed_and_resumed(losses, tmp_path, victim, point, interval):
    run = failures.disturb(failures.Run(0, victim, point, 0.0, interval), tmp_path / "job", losses)
    assert not run.problems, "\n".join(run.problems)
    assert run.resumed == 2
    if interval > 1:
        assert set(run.others.values()) <= {"error", "ended by torchrun"} and "error" in run.others.values()
