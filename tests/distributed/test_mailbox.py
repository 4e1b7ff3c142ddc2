"""Mailboxes: what every rank posted is what every rank reads, and a rank that has gone is noticed."""

import subprocess
import sys
import time

import pytest
import torch.distributed as dist
from launcher import environment_of, free_port

from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout
from torchtpu.distributed.mailbox import Mailboxes
from torchtpu.distributed.shared import SharedMemory

PEER = """
import sys, time
import torch.distributed as dist
from torchtpu.distributed.mailbox import Mailboxes
from torchtpu.distributed.shared import SharedMemory
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), 2, False)
boxes = Mailboxes(store, SharedMemory(store, 1, 2), 64)
for turn in range(500):
    boxes.own()[:2] = (turn % 250, 1)
    boxes.post()
    assert [tuple(m[:2]) for m in boxes.read(time.monotonic() + 60)] == [(turn % 250, 0), (turn % 250, 1)]
if sys.argv[2] == "close":
    boxes.close()
    time.sleep(60)
"""


@pytest.mark.parametrize(("end", "words"), [("exit", "has gone"), ("close", "has left")])
def test_messages_and_a_rank_that_goes(tmp_path, end, words):
    port = free_port()
    command = [sys.executable, "-c", PEER, str(port), end]
    peer = subprocess.Popen(command, env=environment_of(1, 2, tmp_path))
    try:
        store = dist.TCPStore("127.0.0.1", port, 2, True, wait_for_workers=False)
        boxes = Mailboxes(store, SharedMemory(store, 0, 2), 64)
        for turn in range(500):
            boxes.own()[:2] = (turn % 250, 0)
            boxes.post()
            assert [tuple(m[:2]) for m in boxes.read(time.monotonic() + 60)] == [(turn % 250, 0), (turn % 250, 1)]
        boxes.post()
        with pytest.raises(CollectiveError, match=words):
            boxes.read(time.monotonic() + 60)
    finally:
        peer.kill()
        peer.wait()


def test_a_rank_that_does_not_come(tmp_path):
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    boxes = Mailboxes(store, SharedMemory(store, 0, 1), 64)
    boxes.post()
    assert len(boxes.read(time.monotonic() + 1)) == 1
    boxes.turn += 1  # a message that nobody posts, this rank's own included
    with pytest.raises(CollectiveTimeout):
        boxes._await(0, time.monotonic() + 0.3)
