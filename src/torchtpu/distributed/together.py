"""Processes that run the same programs on the devices of all of them (``torchtpu.spmd`` under a launcher).

XLA asks of such processes that each enqueues the same programs in the same order; one that does not leaves the others
waiting inside the runtime. So each process keeps a running digest of the programs it has enqueued and of the numbers it
gave them. The digests are compared where the processes meet: before a program runs for the first time, and before a
value that is divided over them is read. Between two meetings nothing is waited for: once a second the watch compares
what its neighbour has published, and it looks at programs that do not finish.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torchtpu.distributed import create, launch
from torchtpu.distributed.errors import CollectiveError, CollectiveTimeout, MismatchError
from torchtpu.distributed.pending import Pending
from torchtpu.distributed.watch import Call, Watch, user_line

__all__ = ["Together", "together"]

_KEPT = 16
"""Programs of the past that a process publishes, so that the first one that differs can be named."""
_MILESTONE = 64
"""Every so many programs one is kept for longer: digests are running ones, so any later one tells that two differ."""
_NOTICE = 30.0
"""Seconds of waiting at a meeting before it is said on standard error for whom."""
_LOOK = 1.0
"""Seconds between two looks at who is missing."""


def timeout() -> float:
    """``TORCHTPU_SPMD_TIMEOUT``: seconds that processes wait for each other.

    Raises:
        ValueError: it is no positive number.
    """
    given = os.environ.get("TORCHTPU_SPMD_TIMEOUT", "600")
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise ValueError(f"TORCHTPU_SPMD_TIMEOUT is a number of seconds above 0, not {given!r}")
    return seconds


@functools.cache
def together() -> Together:
    """This process among those of the job; the JAX runtime has been joined."""
    joined = launch.joined()
    assert joined is not None
    store, rank, size = joined
    return Together(store, rank, size)


class Together:
    """One of the processes.

    Args:
        store: one that all processes reach.
        rank, size: this process, and how many there are.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.rank, self.size, self.seconds = rank, size, timeout()
        self.store = dist.PrefixStore("torchtpu/together", store.clone())
        self.ranks = tuple(range(size))
        self.broken: Exception | None = None
        self._meetings = 0
        self._number = 0
        self._programs, self._numbers = b"", b""
        self._met: set[str] = set()
        self.latest: Call | None = None
        self._past: deque[tuple[int, str, str]] = deque(maxlen=_KEPT)
        self._milestones: deque[tuple[int, str, str]] = deque(maxlen=_KEPT // 2)
        self.pending = _Programs(self)
        self.watch.pending.add(self.pending)

    @property
    def watch(self) -> Watch:
        """The process's watch."""
        found = create.current_watch()
        assert found is not None  # who joins the JAX runtime starts it
        return found

    def _raise_broken(self) -> None:
        if self.broken is not None:
            self.pending.heard = True
            raise self.broken

    # ---- programs ---------------------------------------------------------------------------------------------------

    def enqueue(self, digest: str, text: str, numbers: bytes, run: Callable[[], list[Any]]) -> list[Any]:
        """Enqueue a program that has been compiled.

        Args:
            digest: what it computes, from what and to what, the same in every process.
            text: what it is, in words.
            numbers: its operands that are no arrays, random seeds included.
            run: enqueues it and returns its results.

        Returns:
            The results.

        Raises:
            MismatchError: another process runs another program in its place.
            CollectiveTimeout: another process did not come.
        """
        self._raise_broken()
        line = user_line(sys._getframe(1))
        self._programs = hashlib.sha256(self._programs + digest.encode()).digest()
        self._numbers = hashlib.sha256(self._numbers + numbers).digest()
        call = Call("all processes", self._number, text, line, kind="program")
        kept = self._number, (self._programs + self._numbers).hex()[::4], call.describe()
        self._past.append(kept)
        if self._number % _MILESTONE == 0:
            self._milestones.append(kept)
        self._number, self.latest = self._number + 1, call
        if digest not in self._met:
            self.meet(f"the first run of {text}", line)
            self._met.add(digest)
        entry, marker = self.pending.begin(call, self.seconds), None
        try:
            values = run()
            marker = _Marker(values[-1]) if values else None
        finally:
            self.pending.enqueued(entry, marker)
        return values

    def past(self) -> list[tuple[int, str, str]]:
        """The latest programs: number, running digest and description."""
        return sorted({*self._milestones, *self._past})

    # ---- meetings ---------------------------------------------------------------------------------------------------

    def meet(self, what: str, line: str | None = None, digest: str = "") -> None:
        """Wait until all processes are here, and have done the same so far.

        Args:
            what: what they are going to do, in words; it must be the same in all of them.
            line: the user's line that asks for it.
            digest: of what else must agree.

        Raises:
            MismatchError: a process is about to do something else, or has run other programs.
            CollectiveTimeout: a process did not come in time.
            CollectiveError: a process has ended.
        """
        self._raise_broken()
        line = line or user_line(sys._getframe(1))
        try:
            self._meet(what, line, digest)
        except CollectiveError as error:
            self.broken = error
            raise
        except dist.DistStoreError as error:
            self.broken = CollectiveError(f"{what}, at {line}: the job's store, on rank 0, does not answer: {error}")
            raise self.broken from error

    def _meet(self, what: str, line: str, digest: str) -> None:
        n, store = self._meetings, self.store
        self._meetings += 1
        mine = [what, digest, self._programs.hex(), self._numbers.hex(), line]
        store.set(f"{n}/{self.rank}", json.dumps(mine))
        same = hashlib.sha256(json.dumps(mine[:-1]).encode()).hexdigest()
        if store.compare_set(f"{n}/same", "", same).decode() != same:
            store.set(f"{n}/all", "no")
        elif store.add(f"{n}/count", 1) == self.size:
            store.set(f"{n}/all", "yes")
            if n:  # nobody waits at the one before any more
                for name in ("same", "count", "all"):
                    store.delete_key(f"{n - 1}/{name}")
        else:
            self._wait(n, what, line)
        if store.get(f"{n}/all") != b"yes":
            raise MismatchError(self._disagreement(n))
        if n:
            store.delete_key(f"{n - 1}/{self.rank}")

    def _wait(self, n: int, what: str, line: str) -> None:
        start, told, pause, look = time.monotonic(), False, 1e-4, _LOOK
        while not self.store.check([f"{n}/all"]):  # a wait that runs out of time prints warnings
            time.sleep(pause)
            pause = min(1.5 * pause, 0.02)
            waited = time.monotonic() - start
            if waited < min(look, self.seconds):
                continue
            look = waited + _LOOK
            missing = [r for r in self.ranks if not self.store.check([f"{n}/{r}"])]
            if self.store.check([f"{n}/all"]):
                return
            gone = [r for r in missing if self.watch.gone(r)]
            if gone or waited > self.seconds:
                names = ", ".join(map(str, gone or missing))
                late = f"did not come within {waited:.0f} s (TORCHTPU_SPMD_TIMEOUT={self.seconds:g})"
                kind, why = (CollectiveError, "has ended") if gone else (CollectiveTimeout, late)
                raise kind(
                    f"{what}, at {line}, is done by all {self.size} processes of the mesh together, and rank {names} "
                    f"{why}. Every process has to run this line; only what follows may differ.\n"
                    f"The other ranks:\n{self.watch.report(self.ranks)}"
                )
            if missing and waited > _NOTICE and not told:
                told = True
                text = f"torchtpu: {what}, at {line}, waits for these ranks:\n{self.watch.report(missing)}"
                print(text, file=sys.stderr, flush=True)

    def _disagreement(self, n: int) -> str:
        """What the processes that are here came for, and where they parted."""
        end = time.monotonic() + 2.0  # one that found out has written what it came for; the others soon do
        while time.monotonic() < end and not all(self.store.check([f"{n}/{r}"]) for r in self.ranks):
            time.sleep(0.02)
        found = {r: json.loads(self.store.get(f"{n}/{r}")) for r in self.ranks if self.store.check([f"{n}/{r}"])}
        different = [len({tuple(x[i : i + 1]) for x in found.values()}) > 1 for i in range(4)]
        if different[0]:
            text = "the processes of a mesh must do the same in the same order, and they are about to do"
        elif different[1]:
            text = (
                "the processes of a mesh were given different values: a model that is built on the CPU needs the same "
                "torch.manual_seed, or the same checkpoint, in every process"
            )
        elif different[2]:
            text = "the processes of a mesh have enqueued different programs"
        else:
            text = "the processes of a mesh gave their programs different numbers or random seeds"
        lines = [text, *(f"  rank {r}: {x[0]}, at {x[4]}" for r, x in found.items())]
        self.watch.publish()
        parted = self.parted(self.watch.read(self.ranks))
        return "\n".join([*lines, *(["The first programs that differ:", *parted] if parted else [])])

    def parted(self, states: dict[int, dict[str, Any]]) -> list[str]:
        """The first program in which another process differs, a line for each process; none where none is known to."""
        mine = {n: (digest, text) for n, digest, text in self.past()}
        first = sys.maxsize
        told: dict[int, str] = {}
        for rank, state in states.items():
            for n, digest, text in state.get("programs", []):
                if n in mine and mine[n][0] != digest and n <= first:
                    told = {**(told if n == first else {}), rank: text}
                    first = n
                    break
        return [f"  rank {r}: {text}" for r, text in {self.rank: mine[first][1], **told}.items()] if told else []


class _Marker:
    """Ready when a program has run. It keeps no result alive: what is referenced decides what later programs take over,
    which must not depend on when the watch looks.
    """

    def __init__(self, array: Any) -> None:
        self._array = weakref.ref(array)

    def _alive(self) -> Any:
        array = self._array()
        return None if array is None or array.is_deleted() else array

    def is_ready(self) -> bool:
        array = self._alive()
        try:
            return array is None or array.is_ready()
        except RuntimeError:
            if array.is_deleted():  # donated meanwhile
                return True
            raise

    def block_until_ready(self) -> None:
        array = self._alive()
        try:
            if array is not None:
                array.block_until_ready()
        except RuntimeError:
            if not array.is_deleted():
                raise


class _Programs(Pending):
    """The programs that have been enqueued and may not have finished."""

    def __init__(self, owner: Together) -> None:
        super().__init__("programs on a mesh of all processes", owner.ranks, self._explained)
        self._owner = owner

    def past(self) -> list[tuple[int, str, str]]:
        return self._owner.past()

    def look(self, watch: Watch) -> None:
        """As ``Pending.look``; what the next rank has published is compared too: programs that differ may finish."""
        super().look(watch)
        owner = self._owner
        if self.error is None and owner.latest is not None:
            problem = self._parted(watch, [(owner.rank + 1) % owner.size])
            if problem is not None:
                self._fail(problem, owner.latest)

    def _parted(self, watch: Watch, ranks: Sequence[int]) -> Exception | None:
        parted = self._owner.parted(watch.read(ranks))
        text = "the processes of a mesh enqueued different programs, or gave them different numbers or random seeds:\n"
        return MismatchError(text + "\n".join(parted)) if parted else None

    def _compare(self, call: Call, watch: Watch) -> Exception | None:
        return self._parted(watch, self.ranks) or super()._compare(call, watch)

    def _explained(self, problem: Exception, call: Call) -> Exception:
        owner = self._owner
        error = type(problem)(
            f"{call.describe()}, failed on rank {owner.rank} after {time.time() - call.started:.1f} s: {problem}\n"
            f"The other ranks:\n{owner.watch.report(owner.ranks)}"
        )
        owner.broken = error
        return error
