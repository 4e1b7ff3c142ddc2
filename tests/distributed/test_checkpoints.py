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


def load(folder, tmp_path, size, **environment):
    outcome = run("checkpoints", size, tmp_path / str(size), PHASE="load", CHECKPOINTS=str(folder), **environment)
    for problems in outcome.checks.values():
        assert not problems, "\n".join(problems)


def test_loaded_by_two(saved, folder, tmp_path):
    load(folder, tmp_path, 2)


@pytest.mark.heavy
def test_loaded_by_two_and_saved_again_for_eight(saved, folder, tmp_path):
    load(folder, tmp_path, 2, AGAIN="by two")
    load(folder, tmp_path, 8, SOURCES="saved,saved later,by two")
