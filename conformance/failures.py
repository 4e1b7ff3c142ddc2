"""``python -m conformance.failures``: kill a rank of a training job, and see that torchrun's restart mends it.

Each run starts four ranks of ``conformance.training_job`` under plain torchrun (``--nproc-per-node 4 --max-restarts
2``) and kills one of them (SIGKILL, from outside) at a random time after it came to a point: the start, the first step
(which compiles), a collective, the optimizer's step, the writing of a checkpoint. It then checks that

- every other rank raised an error that names the collective and the dead rank, or was ended by torchrun;
- the restarted ranks resumed from the last whole checkpoint, and every step's loss equals the undisturbed run's;
- no process that descends from the run remains, nor a file in /dev/shm or in the run's folder for temporary files.

In half of the runs torchrun looks at its processes every 0.1 s, as by default; in the others every 6 s, so that the
ranks themselves have to notice.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from conformance.training_job import POINTS

RESULTS = Path(__file__).parent / "results" / "distributed" / "failures.json"
ROOT = Path(__file__).parents[1]
RANKS = 4
_MOMENT = {"init": 8.0, "compile": 1.0, "collective": 0.05, "optimizer": 0.1, "checkpoint": 0.3}
"""Seconds after a point within which the rank is killed: about what follows the point takes."""


@dataclass
class Run:
    """One run.

    Attributes:
        seed: decides the rest.
        victim, point, delay: which rank was killed, and how many seconds after which point.
        interval: seconds between two looks of torchrun at its processes.
        others: how each other rank ended: "error" (its own), "ended by torchrun", "finished".
        resumed: the step from which the restarted ranks went on.
        seconds: how long the run took.
        problems: what was not as it should be; empty if all was well.
        died_in: the point that the victim had come to last when it died, and the step.
    """

    seed: int
    victim: int
    point: str
    delay: float
    interval: float
    others: dict[int, str] = field(default_factory=dict)
    resumed: int = -1
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    died_in: str = ""


def choose(seed: int) -> Run:
    """What a seed stands for; the points take turns."""
    numbers = random.Random(seed)
    point = POINTS[seed % len(POINTS)]
    delay = round(numbers.uniform(0, _MOMENT[point]), 3)
    return Run(seed, numbers.randrange(RANKS), point, delay, numbers.choice((0.1, 6.0)))


def start(folder: Path, kill: str = "", interval: float = 0.1, transport: str = "host") -> subprocess.Popen[bytes]:
    """Start torchrun and the ranks, in a session of their own."""
    (folder / "temporary").mkdir(parents=True)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "TORCHTPU_PLATFORM": "cpu",
        "TORCHTPU_COLLECTIVES": transport,
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(folder / "temporary"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "JOB_FOLDER": str(folder),
        "JOB_KILL": kill,
    }
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "--max-restarts=2"]
    command += [
        f"--master-port={port}",
        f"--monitor-interval={interval}",
        f"--log-dir={folder / 'logs'}",
        "--redirects=3",
    ]
    with open(folder / "torchrun", "wb") as output:
        return subprocess.Popen(
            [*command, "-m", "conformance.training_job"],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def notes(folder: Path, kind: str, attempt: int | None = None) -> list[dict[str, Any]]:
    """What the ranks have told, in the order of time."""
    pattern = f"notes-{'*' if attempt is None else attempt}-*"
    lines = [json.loads(line) for path in folder.glob(pattern) for line in path.read_text().splitlines()]
    return sorted((n for n in lines if kind in ("", n["kind"])), key=lambda n: n["time"])


def descendants(folder: Path) -> dict[int, str]:
    """Processes that live and have the run's folder in their environment, however they were started: what they run."""
    found = {}
    for path in Path("/proc").iterdir():
        if path.name.isdecimal():
            try:
                if f"JOB_FOLDER={folder}\0".encode() in (path / "environ").read_bytes():
                    found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ").strip()
            except OSError:  # it has ended, or belongs to somebody else
                continue
    return found


def shared_memory() -> set[str]:
    """Files in /dev/shm that no living process has open or mapped."""
    files = {str(p) for p in Path("/dev/shm").rglob("*") if p.is_file()}
    for path in Path("/proc").iterdir() if files else ():
        if path.name.isdecimal():
            try:
                files -= {line.split(maxsplit=5)[-1] for line in (path / "maps").read_text().splitlines()}
                files -= {os.readlink(f) for f in (path / "fd").iterdir()}
            except OSError:
                continue
    return files


def finish(process: subprocess.Popen[bytes], folder: Path, seconds: float) -> bool:
    """Wait for a run; one that takes too long is ended with all that belongs to it. Returns whether it ended itself."""
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for pid in descendants(folder):
            os.kill(pid, signal.SIGKILL)
        return False


def disturb(run: Run, folder: Path, expected: list[float], limit: float = 500, transport: str = "host") -> Run:
    """Do a run, and write down in it what came of it.

    Args:
        run: what to do.
        folder: where, a new folder.
        expected: the losses of the undisturbed run.
        limit: seconds that it may take.
        transport: ``TORCHTPU_COLLECTIVES`` of the ranks.
    """
    before, begun = shared_memory(), time.monotonic()
    process = start(folder, f"{run.victim} {run.point}", run.interval, transport)
    told = folder / f"notes-0-{run.victim}"
    while process.poll() is None and time.monotonic() - begun < limit:
        if told.exists() and b"kill me" in told.read_bytes():
            break
        time.sleep(0.01)
    asked = notes(folder, "kill me", 0)
    if process.poll() is None and asked:
        time.sleep(max(asked[0]["time"] + run.delay - time.time(), 0))
        os.kill(asked[0]["pid"], signal.SIGKILL)
    else:
        run.problems.append("the victim never came to the point")
    if not finish(process, folder, max(limit - (time.monotonic() - begun), 10)):
        run.problems.append(f"it had not ended after {limit:.0f} s")
    run.seconds = round(time.monotonic() - begun, 1)
    _judge(run, folder, expected, process.returncode)
    time.sleep(0.2)
    if left := descendants(folder):
        time.sleep(5)
        left = descendants(folder)
        run.problems += [f"process {pid} remains: {what}" for pid, what in left.items()]
    run.problems += [f"{path} remains" for path in sorted(shared_memory() - before)]
    run.problems += [f"{path.name} remains" for path in (folder / "temporary").iterdir()]
    return run


def _judge(run: Run, folder: Path, expected: list[float], code: int) -> None:
    """Compare what the ranks told with what they should have."""
    last = [n for n in notes(folder, "", 0) if n["rank"] == run.victim]
    run.died_in = " ".join(f"{n['point']} {n['step']}" for n in last[-1:] if "point" in n) or (
        last[-1]["kind"] if last else ""
    )
    errors = {n["rank"]: n for n in notes(folder, "error", 0)}
    done = {n["rank"] for n in notes(folder, "finished", 0)}
    for rank in range(RANKS):
        if rank == run.victim:
            continue
        if rank not in errors:
            run.others[rank] = "finished" if rank in done else "ended by torchrun"
            continue
        run.others[rank] = "error"
        text = errors[rank]["text"]
        named = re.search(r", collective \d+ of group .*failed on rank|^group .* could not be made", text, re.DOTALL)
        if not named or f"rank {run.victim}: dead" not in text:
            run.problems.append(f"rank {rank}'s error does not name the collective and rank {run.victim}: {text}")
    again = notes(folder, "resumed", 1)
    run.resumed = max((n["step"] for n in again), default=-1)
    whole = [int(p.parent.name) for p in (folder / "checkpoints").glob("*/.metadata")]
    if code != 0 or not whole:
        run.problems.append(f"torchrun ended with {code}: {(folder / 'torchrun').read_text()[-2000:]}")
    if {n["step"] for n in again} - {run.resumed}:
        run.problems.append(f"the ranks resumed from different steps: {again}")
    if run.point in ("collective", "optimizer", "checkpoint") and run.resumed < 2:
        run.problems.append(f"it resumed from step {run.resumed}, with a checkpoint of step 2 there")
    ends = notes(folder, "finished", 1)
    if len(ends) != RANKS:
        run.problems.append(f"{len(ends)} of {RANKS} ranks finished after the restart")
    run.problems += [f"rank {n['rank']} found {n['losses']}, not {expected}" for n in ends if n["losses"] != expected]


def undisturbed(folder: Path, transport: str = "host") -> list[float]:
    """The losses of a run in which nobody dies."""
    process = start(folder, transport=transport)
    finish(process, folder, 500)
    found = notes(folder, "finished")
    if process.returncode != 0 or len(found) != RANKS:
        raise RuntimeError(f"the undisturbed run failed: {(folder / 'torchrun').read_text()[-3000:]}")
    losses: list[float] = found[0]["losses"]
    return losses


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m conformance.failures", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--redo", action="store_true", help="run again what is recorded")
    parser.add_argument("--transport", choices=("host", "xla"), default="host")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp())
    before = json.loads(arguments.results.read_text()) if arguments.results.exists() and not arguments.redo else {}
    runs = [Run(**r) for r in before.get("runs", []) if not r["problems"]]
    expected = before.get("losses") or undisturbed(work / "undisturbed", arguments.transport)
    done = {r.seed for r in runs}
    for seed in sorted(set(range(arguments.runs)) - done):
        run = disturb(choose(seed), work / str(seed), expected, transport=arguments.transport)
        runs.append(run)
        print(json.dumps(asdict(run)), flush=True)
        if not run.problems:
            shutil.rmtree(work / str(seed))
        _write(arguments.results, arguments.transport, expected, runs)
    wrong = [r for r in runs if r.problems]
    print(f"{len(runs) - len(wrong)} of {len(runs)} runs as they should be")
    if wrong:
        print(f"what the others left is in {work}")
        return 1
    shutil.rmtree(work)
    return 0


def _write(path: Path, transport: str, expected: list[float], runs: list[Run]) -> None:
    lines = ",\n".join(json.dumps(asdict(r)) for r in sorted(runs, key=lambda r: r.seed))
    head = json.dumps({"ranks": RANKS, "transport": transport, "losses": expected})
    path.write_text(f'{head[:-1]}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
