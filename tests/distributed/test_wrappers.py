"""DDP and FSDP2, unmodified, against one process."""

import pytest
from launcher import names, run


@pytest.fixture(scope="module", params=["host", pytest.param("xla", marks=pytest.mark.heavy)])
def outcome(request, tmp_path_factory):
    return run("wrappers", 2, tmp_path_factory.mktemp("job"), TORCHTPU_COLLECTIVES=request.param)


@pytest.mark.parametrize("check", names("wrappers"))
def test_wrappers(outcome, check):
    assert not outcome.checks[check], "\n".join(outcome.checks[check])
