"""Every collective, over both transports."""

import pytest
from launcher import names, run

JOBS = {
    "host-2": (2, {"TORCHTPU_COLLECTIVES": "host"}),
    "xla-2": (2, {"TORCHTPU_COLLECTIVES": "xla"}),
}


@pytest.fixture(scope="module", params=sorted(JOBS))
def outcome(request, tmp_path_factory):
    size, environment = JOBS[request.param]
    return run("collectives", size, tmp_path_factory.mktemp("job"), **environment)


@pytest.mark.parametrize("check", names("collectives"))
def test_collectives(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])


def test_processes_end_well(outcome):
    assert set(outcome.codes) == {0}, outcome.outputs
