"""FSDP2 training of a small Llama against one process."""

import pytest
from launcher import run

JOBS = [
    pytest.param(2, 3, "host", id="quick"),
    pytest.param(4, 20, "host", id="host", marks=pytest.mark.heavy),
    pytest.param(4, 20, "xla", id="xla", marks=pytest.mark.heavy),
]


@pytest.mark.parametrize(("size", "steps", "transport"), JOBS)
def test_same_losses_as_one_process(tmp_path, size, steps, transport):
    outcome = run("llama", size, tmp_path, seconds=600, STEPS=str(steps), TORCHTPU_COLLECTIVES=transport)
    for problems in outcome.checks.values():
        assert not problems, "\n".join(problems)
    assert set(outcome.codes) == {0}, outcome.outputs
