"""One rank kills itself; what the others see is printed."""

import datetime
import os
import signal
import sys
import time

import torch
import torch.distributed as dist

import torchtpu  # noqa: F401

device = torch.device("tpu", int(os.environ["LOCAL_RANK"]))
torch.tpu.set_device(device)
dist.init_process_group("tpu", timeout=datetime.timedelta(seconds=20))
x = torch.ones(2000, device=device)
start = time.monotonic()
try:
    # The first one included: the victim may be done with it, and dead, before the others have read its memory.
    for number in range(100):
        dist.all_reduce(x)
        if number == 0 and dist.get_rank() == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
except dist.DistBackendError as error:
    print(f"error after {time.monotonic() - start:.1f} s: {error}", flush=True)
    sys.exit(3)
