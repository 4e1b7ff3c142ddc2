"""DTensor, the plans on it, pipelines, functional collectives and compiled graphs."""

import pytest
from launcher import names, run


@pytest.fixture(scope="module", params=["host", pytest.param("xla", marks=pytest.mark.heavy)])
def outcome(request, tmp_path_factory):
    return run("parallel", 4, tmp_path_factory.mktemp("job"), seconds=400, TORCHTPU_COLLECTIVES=request.param)


@pytest.mark.parametrize("check", names("parallel"))
def test_parallel(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])


def test_processes_end_well(outcome):
    assert set(outcome.codes) == {0}, outcome.outputs
