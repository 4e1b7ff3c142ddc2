"""Distributed Checkpoint between jobs of different sizes."""

import pytest
from launcher import names, run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def saved(folder, tmp_path_factory):
    return run("checkpoints", 4, tmp_path_factory.mktemp("job"), PHASE="save", CHECKPOINTS=str(folder))


@pytest.mark.parametrize("check", names("checkpoints"))
def test_saved_and_loaded_by_four(saved, check):
    assert not saved.checks[check], "\n".join(saved.checks[check])


@pytest.mark.parametrize("size", [2, pytest.param(8, marks=pytest.mark.heavy)])
def test_loaded_by_others(saved, folder, tmp_path, size):
    outcome = run("checkpoints", size, tmp_path, PHASE="load", CHECKPOINTS=str(folder))
    for problems in outcome.checks.values():
        assert not problems, "\n".join(problems)
