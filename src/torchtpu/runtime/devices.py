"""The devices: which platform, when the PJRT client starts, and waiting for it. All through JAX's public interface.

JAX is imported when the first tensor is made, not before: `count()` and `is_available()` can be asked without it.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import importlib.util
import os
import re
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torchtpu.runtime import hardware, processes

_FORKED = "Cannot re-initialize the tpu device in a forked subprocess; use the 'spawn' start method"


@dataclass
class _State:
    """Everything that one process knows about its devices."""

    devices: list[Any] = field(default_factory=list)  # jax devices, once started
    pending: list[collections.deque] = field(default_factory=list)  # per device: weak references to recent outputs
    platform: str | None = None
    starting: bool = False
    shared: bool = False  # see may_share
    bad_fork: bool = False
    lock: Any = field(default_factory=threading.RLock)


_state = _State()
_at_start: list[Callable[[], None]] = []
_before_start: list[Callable[[], None]] = []
_flushers: list[Callable[[int], None]] = []
_waiters: list[Callable[[Any], None]] = []


def _after_fork_in_child() -> None:
    # The client's threads did not survive the fork; a lock another thread held would never be released.
    _state.lock = threading.RLock()
    if _state.devices or _state.starting:
        _state.bad_fork = True
    for device in _state.devices:
        # Destroying the client at exit would wait for those threads for ever: keep one reference that nobody drops.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(device.client))


os.register_at_fork(after_in_child=_after_fork_in_child)


def requested_platform() -> str | None:
    """``TORCHTPU_PLATFORM``: "cpu", "tpu", or None for automatic."""
    value = os.environ.get("TORCHTPU_PLATFORM", "").strip().lower()
    if value in ("", "auto"):
        return None
    if value not in ("cpu", "tpu"):
        raise ValueError(f"TORCHTPU_PLATFORM must be 'cpu' or 'tpu' (or unset: automatic), not {value!r}")
    return value


@functools.cache
def _tpu_usable() -> bool:
    return bool(hardware.tpu_chips()) and importlib.util.find_spec("libtpu") is not None


def choose_platform() -> str:
    """The platform this process uses or would use: "tpu" or "cpu"."""
    if _state.platform is not None:
        return _state.platform
    requested = requested_platform()
    if requested is not None:
        return requested
    excluded = "tpu" not in os.environ.get("JAX_PLATFORMS", "tpu").split(",")
    return "tpu" if _tpu_usable() and not excluded else "cpu"


def is_available() -> bool:
    """Whether there is a TPU, or XLA:CPU has been asked for with ``TORCHTPU_PLATFORM=cpu``."""
    try:
        requested = requested_platform()
    except ValueError:
        return False
    return True if requested == "cpu" else choose_platform() == "tpu" and _tpu_usable()


def cpu_devices() -> int:
    """``TORCHTPU_CPU_DEVICES``: how many devices XLA:CPU pretends to be."""
    value = os.environ.get("TORCHTPU_CPU_DEVICES", "1")
    if not value.isdecimal() or not 1 <= int(value) <= 127:
        raise ValueError(f"TORCHTPU_CPU_DEVICES must be a number from 1 to 127, not {value!r}")
    return int(value)


def count() -> int:
    """Number of devices of this process. Starts nothing and does not import JAX.

    Of several processes on a host each has one device, which every index names: a program written for devices that all
    processes see takes the one of its LOCAL_RANK.
    """
    if _state.devices:
        return len(_state.devices)
    job = processes.job()
    if job is not None and job.local_size > 1:
        return job.local_size
    return cpu_devices() if choose_platform() == "cpu" else hardware.tpu_devices()


def at_start(function: Callable[[], None]) -> None:
    """Call `function` once when the runtime starts (at once if it runs already)."""
    if _state.devices:
        function()
    else:
        _at_start.append(function)


def before_start(function: Callable[[], None]) -> None:
    """Call `function` before the PJRT client starts: the last moment for what JAX is told only then."""
    _before_start.append(function)


def is_initialised() -> bool:
    """Whether the PJRT client runs in this process."""
    return bool(_state.devices) and not _state.starting and not _state.bad_fork


def in_bad_fork() -> bool:
    """Whether this process was forked from one that had started the runtime."""
    return _state.bad_fork


def initialise() -> int:
    """Start the runtime: choose the platform, start its PJRT client, register the operators. Idempotent, thread-safe.

    Returns:
        The number of devices; -1 when called by the thread that is starting the runtime.

    Raises:
        RuntimeError: in a forked child of a process that used the device, or if the platform has no device.
        ValueError: if an environment variable makes no sense.
    """
    if _state.bad_fork:
        raise RuntimeError(_FORKED)
    with _state.lock:
        if _state.starting:
            return -1
        if not _state.devices:
            _start()
        return len(_state.devices)


def _start() -> None:
    _state.starting = True
    try:
        platform = choose_platform()
        for function in _before_start:
            function()
        _state.devices = _cpu_client() if platform == "cpu" else _tpu_client()
        job = processes.job()
        if job is not None and job.local_size > 1:
            _state.devices = _state.devices[:1] * job.local_size
        _state.pending = [collections.deque(maxlen=256) for _ in _state.devices]
        _state.platform = platform
        _state.shared = job is not None and job.local_size == 1 and _processes(platform) > 1
        # Data loaders fork, and what must not happen in their children raises there.
        warnings.filterwarnings("ignore", message=r"os\.fork\(\) was called", category=RuntimeWarning)
        if platform == "cpu" and requested_platform() is None:
            _notice()
        for function in _at_start:
            function()
    except BaseException:
        _state.devices, _state.pending, _state.platform = [], [], None
        raise
    finally:
        _state.starting = False
    _at_start.clear()


def _processes(platform: str) -> int:
    """How many have joined this process's JAX runtime."""
    import jax

    return jax.process_count(platform)


def _notice() -> None:
    if hardware.tpu_chips() and importlib.util.find_spec("libtpu") is None:
        why = "a TPU is attached but libtpu is not installed (pip install libtpu)"
    else:
        why = "no TPU found"
    print(f"torchtpu: {why}; device 'tpu' runs on XLA:CPU (TORCHTPU_PLATFORM=cpu silences this)", file=sys.stderr)


def _cpu_client() -> list[Any]:
    job = processes.job()
    wanted = 1 if job is not None and job.local_size > 1 else cpu_devices()
    import jax

    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms is None:
        # Left to itself JAX starts every platform it finds, and would take the chip, or most of a GPU's memory.
        jax.config.update("jax_platforms", "cpu")
    if wanted > 1:
        try:
            jax.config.update("jax_num_cpu_devices", wanted)
        except RuntimeError:
            present = len(jax.local_devices(backend="cpu"))
            if present < wanted:
                raise RuntimeError(
                    f"TORCHTPU_CPU_DEVICES={wanted}, but this process has already started JAX with {present} CPU "
                    f"device(s): use the tpu device before JAX, or start JAX with jax_num_cpu_devices={wanted}"
                ) from None
    try:
        found = jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise RuntimeError(f"JAX has no CPU platform (JAX_PLATFORMS={platforms}): {error}") from error
    if len(found) < wanted:
        raise RuntimeError(f"TORCHTPU_CPU_DEVICES={wanted}, but JAX has {len(found)} CPU device(s) (see XLA_FLAGS)")
    return found[:wanted]


def _tpu_client() -> list[Any]:
    job = processes.job()
    if job is not None and job.local_size > 1 and "TPU_PROCESS_BOUNDS" not in os.environ:
        os.environ.update(processes.libtpu_environment(job))
    import jax

    try:
        return jax.local_devices(backend="tpu")
    except RuntimeError as error:
        raise RuntimeError(
            f"TORCHTPU_PLATFORM=tpu or a TPU was found, but JAX cannot start it: {error}. "
            "TORCHTPU_PLATFORM=cpu runs the same program on XLA:CPU"
        ) from error


def device(index: int = 0) -> Any:
    """The JAX device behind ``tpu:index``; starts the runtime."""
    if _state.bad_fork or not _state.devices:
        initialise()
    if not 0 <= index < len(_state.devices):
        raise RuntimeError(f"tpu: invalid device ordinal {index}: this process has {len(_state.devices)} tpu device(s)")
    return _state.devices[index]


def own() -> list[Any]:
    """The JAX devices of this process, each once; starts the runtime."""
    device(0)
    return list(dict.fromkeys(_state.devices))


def may_share() -> bool:
    """Whether this process may have a mesh in common with others: a launcher started one on each host, and they have
    joined one JAX runtime. Starts the runtime.
    """
    if not _state.devices:
        initialise()
    return _state.shared


def everywhere() -> list[Any]:
    """The JAX devices that a mesh may have: those of all processes, in the order of their ranks, or of this one. Starts
    the runtime.
    """
    if not may_share():
        return own()
    import jax

    return sorted(jax.devices(platform()), key=lambda d: d.process_index)


def platform() -> str:
    """ "tpu" or "cpu": what the device runs on; starts the runtime."""
    device(0)
    assert _state.platform is not None
    return _state.platform


# ---- waiting --------------------------------------------------------------------------------------------------------


def on_flush(function: Callable[[int], None]) -> None:
    """Call `function(index)` before anyone waits for, queries or times device `index`: it enqueues what was put off."""
    _flushers.append(function)


def on_wait(function: Callable[[Any], None]) -> None:
    """Call `function(array)` before anyone waits for an array: it may wait itself, and raise."""
    _waiters.append(function)


def waiting(array: Any) -> None:
    """Somebody is about to wait for an array."""
    for function in _waiters:
        function(array)


def note(index: int, array: Any) -> None:
    """Remember an output enqueued on a device, for synchronize(). Weakly: it keeps no memory alive."""
    _state.pending[index].append(weakref.ref(array))


def synchronize(index: int) -> None:
    """Wait for everything enqueued on a device.

    Raises:
        The error of a program that failed, or IndexError if one was given an index out of range.
    """
    if _state.bad_fork:
        raise RuntimeError(_FORKED)
    if not _state.devices:
        return
    _wait(index, _enqueued(index))
    _raise_failed_checks()


def query(index: int) -> bool:
    """Whether everything enqueued on a device has finished."""
    return not _state.devices or _ready(_enqueued(index))


def _enqueued(index: int) -> list[weakref.ref]:
    for function in _flushers:
        function(index)
    return list(_state.pending[index])


def _wait(index: int, outputs: list[weakref.ref]) -> None:
    pending = _state.pending[index]
    try:
        if outputs and outputs[-1]() is None and _state.platform == "tpu":
            _fence(_state.devices[index])  # nobody holds the last output any more, but its program may still run
        for reference in outputs:
            array = reference()
            if array is None or array.is_deleted():
                continue
            try:
                waiting(array)
                array.block_until_ready()
            except RuntimeError:
                if not array.is_deleted():  # donated meanwhile: the program that took it was noted after it
                    raise
    finally:
        with _state.lock:
            for reference in outputs:
                if not pending or pending[0] is not reference:
                    break
                pending.popleft()


def _raise_failed_checks() -> None:
    from torchtpu.runtime import checks  # imports JAX, which runs by now

    checks.raise_failed()


def _fence(target: Any) -> None:
    """Run a tiny program on the device and wait for it: a TPU runs its programs in the order they were enqueued."""
    import jax

    (jax.device_put(0, target) + 1).block_until_ready()


def _ready(outputs: list[weakref.ref]) -> bool:
    arrays = [reference() for reference in outputs]
    return all(a is None or a.is_deleted() or a.is_ready() for a in arrays)


class Event:
    """What had been enqueued on a device when an event was recorded, and when that was.

    A timing event waits for that work when it is recorded: only so is the time it notes the time the work took.
    """

    def __init__(self, index: int, timing: bool):
        self.index = index
        self.outputs = _enqueued(index)
        self.time: float | None = None
        if timing:
            _wait(index, self.outputs)
            self.time = time.perf_counter()

    def query(self) -> bool:
        """Whether the work before the event has finished."""
        return _ready(self.outputs)

    def synchronize(self) -> None:
        """Wait for the work before the event; raises what synchronize() raises."""
        _wait(self.index, self.outputs)
        _raise_failed_checks()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to `end`."""
        if self.time is None or end.time is None:
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        return (end.time - self.time) * 1e3


# ---- describing -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DeviceProperties:
    """What ``torch.tpu.get_device_properties`` returns."""

    name: str
    platform: str
    device_kind: str
    total_memory: int
    multi_processor_count: int
    major: int
    minor: int
    index: int
    id: int
    process_index: int
    coords: tuple[int, ...] | None
    core_on_chip: int | None


def device_name(index: int = 0) -> str:
    """ "TPU v5e" and the like; "XLA:CPU" on the host."""
    target = device(index)
    return _tpu_name(target.device_kind) if _state.platform == "tpu" else "XLA:CPU"


def _tpu_name(kind: str) -> str:
    """JAX's device_kind in the names people use: "TPU v5 lite" is a v5e, "TPU v5" a v5p, "TPU7x" a v7x."""
    found = re.fullmatch(r"TPU ?v?(\d+)(\w*)( lite)?", kind.strip(), flags=re.IGNORECASE)
    if found is None:
        return kind
    generation, suffix, lite = found.groups()
    if lite:
        suffix = "e"
    elif not suffix and generation == "5":
        suffix = "p"
    return f"TPU v{generation}{suffix.lower()}"


def properties(index: int = 0) -> DeviceProperties:
    """Describe a device; starts the runtime."""
    target = device(index)
    name = device_name(index)
    generation = re.search(r"v(\d+)", name)
    coords = getattr(target, "coords", None)
    cores = 1 if _state.platform == "tpu" else os.cpu_count() or 1
    return DeviceProperties(
        name=name,
        platform=platform(),
        device_kind=target.device_kind,
        total_memory=memory_info(index)[1],
        multi_processor_count=getattr(target, "num_cores", None) or cores,
        major=int(generation.group(1)) if generation else 0,
        minor=0,
        index=index,
        id=target.id,
        process_index=target.process_index,
        coords=None if coords is None else tuple(coords),
        core_on_chip=getattr(target, "core_on_chip", None),
    )


def memory_info(index: int = 0) -> tuple[int, int]:
    """(free, total) bytes of a device's memory; of the host's for XLA:CPU."""
    stats = device(index).memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"] - stats["bytes_in_use"], stats["bytes_limit"]
    page = os.sysconf("SC_PAGE_SIZE")
    total = page * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/proc/meminfo") as file:
            available = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    except OSError:  # not Linux
        available = None
    free = int(available.group(1)) * 1024 if available else page * os.sysconf("SC_AVPHYS_PAGES")
    return free, total
