"""Collectives that nobody waits for: two ranks' watches on one store, in one process, with programs that never end."""

import datetime
import time

import pytest
import torch.distributed as dist

from torchtpu.distributed import pending
from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, MismatchError
from torchtpu.distributed.pending import Pending
from torchtpu.distributed.watch import Call, Watch


class Marker:
    def __init__(self, ready):
        self.ready = ready

    def is_ready(self):
        return self.ready

    def block_until_ready(self):
        return self


@pytest.fixture
def ranks():
    store = dist.TCPStore("127.0.0.1", 0, 2, True, datetime.timedelta(seconds=20), wait_for_workers=False)
    watches = [Watch(store, rank) for rank in range(2)]
    groups = [Pending("group 0", [0, 1], lambda error, call: error) for _ in watches]
    for watch, group in zip(watches, groups, strict=True):
        watch.pending.add(group)
    yield watches, groups
    for group in groups:
        group.error = None
    for watch in watches:
        watch.stop()


def call(text, number=0, ago=0.0):
    return Call("group 0", number, text, "train.py:1", started=time.time() - ago)


def error_of(group, seconds=15):
    end = time.monotonic() + seconds
    while group.error is None and time.monotonic() < end:
        time.sleep(0.05)
    return group.error


def test_ranks_that_call_different_collectives(ranks):
    _, groups = ranks
    for group, text in zip(groups, ("all_reduce(SUM) float32[3]", "broadcast float32[3] from rank 0"), strict=True):
        group.enqueued(group.begin(call(text), 60), Marker(False))
    for group in groups:
        error = error_of(group)
        assert isinstance(error, MismatchError) and "all_reduce" in str(error) and "broadcast" in str(error)
    with pytest.raises(MismatchError):
        pending.wait(Marker(False))


def test_what_finishes_is_no_error(ranks):
    _, groups = ranks
    for number in range(3):
        for group, text in zip(groups, ("a", "b"), strict=True):
            group.enqueued(group.begin(call(text, number, ago=5), 60), Marker(True))
    end = time.monotonic() + 15
    while any(g.oldest() is not None for g in groups) and time.monotonic() < end:
        time.sleep(0.05)
    assert all(g.oldest() is None and g.error is None for g in groups)
    pending.wait(Marker(True))


def test_a_rank_that_does_not_come(ranks):
    _, (group, _) = ranks
    group.enqueued(group.begin(call("a"), 0.5), Marker(False))
    assert isinstance(error_of(group), CollectiveTimeout)


def test_a_rank_that_left_before_it_came_to_the_collective(ranks):
    (_, other), (group, absent) = ranks
    absent.enqueued(absent.begin(call("a", 6), 60), None)
    other.stop()
    group.enqueued(group.begin(call("a", 6), 60), Marker(False))
    time.sleep(2.5)
    assert group.error is None  # it took part in this one
    group.enqueued(group.begin(call("a", 7), 60), Marker(False))
    group._entries.popleft()
    error = error_of(group)
    assert isinstance(error, CollectiveError) and "rank 1 has gone" in str(error)


def test_a_failed_program_is_an_error(ranks):
    class Failed(Marker):
        def block_until_ready(self):
            raise RuntimeError("the link is down\nmore")

    _, (group, _) = ranks
    group.enqueued(group.begin(call("a"), 60), Failed(True))
    assert "the link is down" in str(error_of(group))
