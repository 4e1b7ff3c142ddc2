"""Ranks that do not agree, or do not come: every rank gets an error that says who did what, and no group hangs."""

import datetime
import os
import re
import time

import torch
import torch.distributed as dist

from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, MismatchError

DEVICE = torch.device("tpu", int(os.environ["LOCAL_RANK"]))


def error_of(kind, function, seconds=20):
    """The message of the error that ``function`` must raise, within some seconds."""
    start = time.monotonic()
    try:
        function()
    except kind as error:
        assert time.monotonic() - start < seconds
        return str(error)
    raise AssertionError("no error")


def names_both(message, first, second):
    assert first in message and second in message, message
    assert len(re.findall(r"disagreements\.py:\d+", message)) >= 2, message


def check_different_sizes():
    group = dist.new_group()
    for size in (3, 3000):
        group = dist.new_group()
        x = torch.ones(size + dist.get_rank(), device=DEVICE)
        message = error_of(MismatchError, lambda g=group, x=x: dist.all_reduce(x, group=g))
        names_both(message, f"float32[{size}]", f"float32[{size + 1}]")


def check_different_dtypes():
    group = dist.new_group()
    x = torch.ones(3, device=DEVICE, dtype=torch.float32 if dist.get_rank() else torch.int32)
    names_both(error_of(MismatchError, lambda: dist.all_reduce(x, group=group)), "int32[3]", "float32[3]")


def check_different_collectives():
    group = dist.new_group()
    x = torch.ones(3, device=DEVICE)

    def call():
        if dist.get_rank():
            dist.all_reduce(x, group=group)
        else:
            dist.broadcast(x, 0, group=group)

    names_both(error_of(MismatchError, call), "all_reduce(SUM)", "broadcast")
    message = error_of(CollectiveError, lambda: dist.all_reduce(x, group=group))
    assert "cannot be used any more" in message


def check_different_operations():
    group = dist.new_group()
    x = torch.ones(3, device=DEVICE)
    op = dist.ReduceOp.MAX if dist.get_rank() else dist.ReduceOp.SUM
    names_both(error_of(MismatchError, lambda: dist.all_reduce(x, op=op, group=group)), "(SUM)", "(MAX)")


def check_splits_that_do_not_fit():
    group = dist.new_group()
    n, r = dist.get_world_size(), dist.get_rank()
    take = [1] * n
    give = [1] * n
    if r == 0:
        take[1] = 2
    message = error_of(
        MismatchError,
        lambda: dist.all_to_all_single(
            torch.empty(sum(take), device=DEVICE), torch.ones(sum(give), device=DEVICE), take, give, group=group
        ),
    )
    assert "rank 1 of the group sends 1 elements to rank 0, which expects 2" in message


def check_a_message_of_another_size():
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.send(torch.ones(4, device=DEVICE), 1, group=group)
    elif dist.get_rank() == 1:
        y = torch.empty(5, device=DEVICE)
        assert "another size or dtype" in error_of(MismatchError, lambda: dist.recv(y, 0, group=group))
    dist.barrier()


def stay_away(seconds):
    time.sleep(seconds)


def check_a_rank_that_does_not_come():
    for later in (False, True):
        group = dist.new_group(timeout=datetime.timedelta(seconds=3))
        x = torch.ones(3, device=DEVICE)
        if dist.get_rank() == 1:
            stay_away(6)
        else:

            def call(group=group, x=x, later=later):
                work = dist.all_reduce(x, group=group, async_op=later)
                if work is not None:
                    work.wait()

            message = error_of(CollectiveTimeout, call)
            assert "did not finish in time" in message and "rank 1: running" in message, message
            assert re.search(r"rank 1: running \S*disagreements\.py:\d+", message), message
        dist.barrier()


def check_wait_with_a_time_limit():
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    x = torch.ones(3, device=DEVICE)
    if dist.get_rank() == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        error_of(CollectiveTimeout, lambda: work.wait(datetime.timedelta(seconds=1)), 3)
        work.wait()
    else:
        stay_away(3)
        dist.all_reduce(x, group=group)
    assert x.tolist() == [float(dist.get_world_size())] * 3


def check_an_input_on_another_device():
    try:
        dist.all_gather_into_tensor(torch.empty(4, device=DEVICE), torch.ones(3, device=DEVICE))
    except ValueError as error:
        assert "times the elements of the input" in str(error)
    else:
        raise AssertionError("accepted")
    dist.barrier()
