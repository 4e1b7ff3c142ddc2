"""Meshes of eight processes."""

import pytest
from launcher import names, run

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module", params=["host", "xla"])
def outcome(request, tmp_path_factory):
    return run("eight", 8, tmp_path_factory.mktemp("job"), seconds=900, TORCHTPU_COLLECTIVES=request.param)


@pytest.mark.parametrize("check", names("eight"))
def test_eight(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])
