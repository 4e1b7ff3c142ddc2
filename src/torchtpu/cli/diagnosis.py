"""What ``torchtpu doctor`` finds out without the device: versions, access to chips, caches, the TPU compiler."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import grp
import importlib.metadata
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from torchtpu.runtime import hardware

__all__ = ["Access", "Holder", "Problem", "access", "caches", "compiler", "container", "misfits", "obstacles"]

LOCK = "tmp/libtpu_lockfile"
"""Where libtpu notes that a process uses the TPU: the path is written into the library."""

COMPILE_SECONDS = 30.0
"""After which the tiny compile is given up; it takes about 3 s, more on a busy machine."""

VFIO = ("0x0062", "0x006f", "0x0076")
"""Chips that are reached through vfio-pci, by https://docs.cloud.google.com/tpu/docs/custom-os-image."""

IN_CONTAINER = "docker run --privileged --net=host, or in Kubernetes a request for google.com/tpu"
RUNTIMES = "https://docs.cloud.google.com/tpu/docs/runtimes"


@dataclasses.dataclass
class Problem:
    """Something that is not as it should be.

    Attributes:
        what: the fact.
        remedy: what to do about it.
        broken: whether the device cannot be used because of it; otherwise it is advice.
    """

    what: str
    remedy: str
    broken: bool


@dataclasses.dataclass(frozen=True)
class Holder:
    """Another process that has a TPU open.

    Attributes:
        pid: its number.
        command: its command line, shortened.
        files: the device files and lock file that it has open.
    """

    pid: int
    command: str
    files: tuple[str, ...]


@dataclasses.dataclass
class Access:
    """How this process may reach TPU chips.

    Attributes:
        chips: generations of the chips on the PCI bus.
        nodes: device files.
        closed: those that this process may not open, each with what its permissions are.
        holders: other processes that have them open; those of other users are seen by root alone.
        lock: the state of libtpu's lock file: ``"absent"``, ``"free"``, ``"held"``, or ``"not writable"``.
        container: the kind of container this runs in, or None.
    """

    chips: list[str]
    nodes: list[str]
    closed: dict[str, str]
    holders: list[Holder]
    lock: str
    container: str | None


def misfits(found: Mapping[str, str | None]) -> list[Problem]:
    """Versions that do not fit together, by what torchtpu and JAX say they need.

    Args:
        found: installed versions by distribution, None for what is not installed.
    """
    problems = []
    jax = f"jax {found.get('jax')}"
    for owner, extra, broken in (("torchtpu", "", True), ("jax", "", True), ("jax", "tpu", False)):
        for need in _requirements(owner, extra):
            version = found.get(need.name)
            if version is None or need.specifier.contains(version, prereleases=True):
                continue
            who = f"torchtpu {found.get('torchtpu')}" if owner == "torchtpu" else jax
            what = f"{need.name} {version} is installed, and {who} is made for {need.specifier}"
            if extra:
                what += "; another one may work"
                remedy = f"pip install 'jax[tpu]=={found.get('jax')}' if a TPU does not start or compile"
            else:
                remedy = f"pip install '{need.name}{need.specifier}'"
            problems.append(Problem(what, remedy, broken))
    return problems


def _requirements(owner: str, extra: str) -> list[Requirement]:
    """What a distribution needs of those whose versions matter here; with ``extra``, what that adds."""
    try:
        lines = importlib.metadata.requires(owner) or []
    except importlib.metadata.PackageNotFoundError:  # torchtpu imported from a folder
        return []
    found = []
    for line in lines:
        with contextlib.suppress(InvalidRequirement):
            need = Requirement(line)
            plain = need.marker is None or need.marker.evaluate({"extra": ""})
            wanted = (
                plain if not extra else not plain and need.marker is not None and need.marker.evaluate({"extra": extra})
            )
            if wanted and need.name in ("torch", "jax", "jaxlib", "libtpu"):
                found.append(need)
    return found


def access(root: str | Path = "/", user: int | None = None, groups: set[int] | None = None) -> Access:
    """Look at the chips, their device files, and who has them open.

    Args:
        root: where ``dev``, ``proc``, ``sys`` and ``tmp`` are; other than "/" in tests.
        user: the effective user id; this process's by default.
        groups: ids of its groups; this process's by default.
    """
    root = Path(root)
    user = os.geteuid() if user is None else user
    groups = {os.getegid(), *os.getgroups()} if groups is None else groups
    nodes = hardware.device_nodes(root)
    closed = {}
    for node in nodes:
        why = _closed(node, user, groups)
        if why:
            closed[_name(node, root)] = why
    holders = _holders(root, [*nodes, root / LOCK])
    return Access(
        [hardware.TPU_CHIPS[chip.device][0] for chip in hardware.pci_chips(root)],
        [_name(node, root) for node in nodes],
        closed,
        holders,
        _lock(root, user, groups, holders),
        container(root),
    )


def obstacles(found: Access, root: str | Path = "/") -> list[Problem]:
    """Why a TPU that is there cannot be used, and what to do. Empty on a machine without one."""
    problems = []
    kinds = ", ".join(sorted(set(found.chips)))
    if found.chips and not found.nodes:
        what = (
            f"{len(found.chips)} TPU chip(s) ({kinds}) are on the PCI bus, but there is no /dev/accel* or /dev/vfio/*"
        )
        if found.container:
            what += f" in this container ({found.container})"
            problems.append(Problem(what, f"start it with the devices: {IN_CONTAINER}", broken=True))
        else:
            problems.append(Problem(what, _runtime_remedy(root), broken=True))
    if found.nodes and not found.chips:
        what = f"{found.nodes[0]} exists, but no TPU chip that is known is on the PCI bus"
        remedy = "none is needed if it belongs to another device; a newer torchtpu may know a newer chip"
        problems.append(Problem(what, remedy, broken=False))
        return problems
    for node, why in found.closed.items():
        problems.append(Problem(f"this process may not open {node}: {why}", _permission_remedy(node, why), broken=True))
    taken = {file for holder in found.holders for file in holder.files}
    for holder in found.holders if found.chips else ():
        what = f"process {holder.pid} has {', '.join(holder.files)} open: {holder.command}"
        remedy = f"wait for it, or end it (kill {holder.pid}); TPU_VISIBLE_CHIPS gives each process chips of its own"
        problems.append(Problem(what, remedy, broken=taken.issuperset(found.nodes)))
    if found.chips and found.lock == "not writable":
        what = f"libtpu's lock file /{LOCK} belongs to another user, so libtpu will not start"
        problems.append(Problem(what, f"sudo rm /{LOCK}, unless that user's process still runs", broken=True))
    huge = Path(root) / "sys/kernel/mm/transparent_hugepage/enabled"
    if found.chips and huge.exists() and "[always]" not in huge.read_text():
        what = "transparent huge pages are not always on, so that a TPU takes long to start and to stop"
        remedy = 'sudo sh -c "echo always > /sys/kernel/mm/transparent_hugepage/enabled"'
        problems.append(Problem(what, remedy, broken=False))
    return problems


def _runtime_remedy(root: str | Path) -> str:
    drivers = {chip.driver or "none" for chip in hardware.pci_chips(root)}
    needed = "vfio-pci" if any(chip.device in VFIO for chip in hardware.pci_chips(root)) else "Google's TPU driver"
    return (
        f"the chips' kernel driver is {', '.join(sorted(drivers))}, and they need {needed}: create the VM with the "
        f"runtime version for this generation ({RUNTIMES})"
    )


def _permission_remedy(node: str, why: str) -> str:
    if why.startswith("group "):
        group = why.split()[1].rstrip(":")
        return f"sudo usermod -aG {group} $USER, then log in again"
    return f"run as root, or sudo chmod a+rw {node} (until the next boot)"


def _closed(node: Path, user: int, groups: set[int]) -> str:
    """Why a user may not read and write a file; empty if they may."""
    status = node.stat()
    mode = stat.S_IMODE(status.st_mode)
    if user == 0 or mode & 0o006 == 0o006:
        return ""
    if status.st_uid == user:
        return "" if mode & 0o600 == 0o600 else f"mode {mode:04o}, owned by this user"
    if mode & 0o060 == 0o060:
        if status.st_gid in groups:
            return ""
        return f"group {_group(status.st_gid)}: its members may (mode {mode:04o}), and this user is not one"
    return f"mode {mode:04o}, owned by user {status.st_uid} and group {_group(status.st_gid)}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def _holders(root: Path, files: list[Path]) -> list[Holder]:
    """Other processes that have any of the files open."""
    names = {_name(file, root) for file in files}
    found = []
    for process in sorted((root / "proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        if int(process.name) == os.getpid():
            continue
        try:
            opened = [os.readlink(link) for link in sorted((process / "fd").iterdir())]
        except OSError:  # it ended meanwhile, or is another user's
            continue
        held = sorted(names.intersection(opened))
        if held:
            found.append(Holder(int(process.name), _command(process), tuple(held)))
    return found


def _command(process: Path) -> str:
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return "?"
    text = " ".join(word for word in words if word)
    return text if len(text) <= 80 else text[:77] + "..."


def _lock(root: Path, user: int, groups: set[int], holders: list[Holder]) -> str:
    file = root / LOCK
    if not file.exists():
        return "absent"
    if any(f"/{LOCK}" in holder.files for holder in holders):
        return "held"
    return "not writable" if _closed(file, user, groups) else "free"


def _name(file: Path, root: Path) -> str:
    """A path as the machine whose root it is has it."""
    return "/" + file.relative_to(root).as_posix()


def container(root: str | Path = "/", environment: Mapping[str, str] | None = None) -> str | None:
    """The kind of container that this process runs in, as far as files tell: None outside of one."""
    root = Path(root)
    environment = os.environ if environment is None else environment
    if environment.get("KUBERNETES_SERVICE_HOST"):
        return "Kubernetes"
    if (root / ".dockerenv").exists():
        return "Docker"
    if (root / "run/.containerenv").exists():
        return "Podman"
    try:
        groups = (root / "proc/1/cgroup").read_text()
    except OSError:
        return None
    for mark, kind in (("kubepods", "Kubernetes"), ("docker", "Docker"), ("containerd", "containerd"), ("lxc", "LXC")):
        if mark in groups:
            return kind
    return None


def caches(problems: list[Problem]) -> dict[str, Any]:
    """What is kept on disk: compiled programs and builds of the C++ extension."""
    from torchtpu import _build
    from torchtpu.runtime import disk_cache

    folder = _build.cache_dir()
    programs = _sizes(folder.glob("programs/*/*"))
    extensions = _sizes(folder.glob("torch-*/_C.so"))
    limit = None
    try:
        limit = disk_cache.limit()
    except ValueError as error:
        problems.append(Problem(str(error), "correct or unset TORCHTPU_CACHE_LIMIT", broken=True))
    nearest = next((x for x in (folder, *folder.parents) if x.exists()), folder)
    writable = os.access(nearest, os.W_OK)
    if not writable:
        what = f"nothing can be kept in {folder}: every process compiles its programs anew"
        problems.append(Problem(what, "set TORCHTPU_CACHE_DIR to a writable folder", broken=False))
    return {
        "folder": str(folder),
        "writable": writable,
        "programs": len(programs),
        "program_bytes": sum(programs),
        "limit_bytes": limit,
        "extensions": len(extensions),
        "extension_bytes": sum(extensions),
    }


def _sizes(files: Any) -> list[int]:
    found = []
    for file in files:
        with contextlib.suppress(OSError):  # another process removed it
            found.append(file.stat().st_size)
    return found


@functools.cache
def _tiny_program() -> str:
    import jax

    from torchtpu.aot import lower_for_tpu

    matrix = jax.ShapeDtypeStruct((128, 128), "float32")
    return lower_for_tpu(lambda x, y: x @ y, [matrix, matrix])


def compiler(problems: list[Problem], timeout: float = COMPILE_SECONDS) -> dict[str, Any]:
    """Whether libtpu compiles a matrix product for a TPU, in a child process."""
    from torchtpu.aot import TOPOLOGIES, Compiler, libtpu_missing

    missing = libtpu_missing()
    if missing:
        return {"status": "absent", "message": missing}
    topology = TOPOLOGIES["v6e"]
    with Compiler(timeout) as child:
        result = child.compile(_tiny_program(), topology)
    if not result.ok:
        what = f"libtpu does not compile a matrix product for {topology} ({result.status}): {result.message}"
        problems.append(
            Problem(what, "pip install --force-reinstall libtpu, in the version that jax[tpu] asks for", True)
        )
    return {
        "status": result.status,
        "message": result.message,
        "topology": topology,
        "seconds": result.seconds,
        "code_bytes": result.code_bytes,
    }
