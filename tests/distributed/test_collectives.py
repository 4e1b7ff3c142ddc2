"""Every collective, over both transports."""

import pytest
from launcher import names, run

JOBS = [
    pytest.param(("host", 2), id="host-2"),
    pytest.param(("xla", 2), id="xla-2"),
    pytest.param(("host", 4), id="host-4", marks=pytest.mark.heavy),
    pytest.param(("xla", 4), id="xla-4", marks=pytest.mark.heavy),
]


@pytest.fixture(scope="module", params=JOBS)
def outcome(request, tmp_path_factory):
    transport, size = request.param
    return run("collectives", size, tmp_path_factory.mktemp("job"), TORCHTPU_COLLECTIVES=transport)


@pytest.mark.parametrize("check", names("collectives"))
def test_collectives(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])


def test_processes_end_well(outcome):
    assert set(outcome.codes) == {0}, outcome.outputs
