"""What keeps a TPU from being used, on made-up machines; versions that do not fit; what is kept on disk."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchtpu.aot import libtpu_missing
from torchtpu.cli import diagnosis, doctor, main
from torchtpu.runtime import hardware

Machine = Callable[..., Path]
USER, OTHER = 1000, 2000


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Make a machine with chips of one kind, device files, and processes that have files open."""

    def make(
        *,
        chips: int = 0,
        device: str = "0x006f",
        driver: str | None = "vfio-pci",
        nodes: tuple[str, ...] = (),
        mode: int = 0o666,
        processes: dict[int, tuple[str, list[str]]] | None = None,
        files: dict[str, str] | None = None,
    ) -> Path:
        for number in range(chips):
            folder = tmp_path / f"sys/bus/pci/devices/0000:00:{number:02x}.0"
            folder.mkdir(parents=True)
            (folder / "vendor").write_text("0x1ae0\n")
            (folder / "device").write_text(f"{device}\n")
            if driver:
                (folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        for node in nodes:
            file = tmp_path / "dev" / node
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
            file.chmod(mode)
        for pid, (command, opened) in (processes or {}).items():
            folder = tmp_path / f"proc/{pid}"
            (folder / "fd").mkdir(parents=True)
            (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
            for number, target in enumerate(opened):
                (folder / f"fd/{number}").symlink_to(target)
        for name, content in (files or {}).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(content)
        return tmp_path

    return make


def look(root: Path, user: int = USER, groups: set[int] | None = None) -> tuple[diagnosis.Access, list[str]]:
    found = diagnosis.access(root, user, groups or {USER})
    return found, [f"{x.what} -> {x.remedy}" for x in diagnosis.obstacles(found, root) if x.broken]


def test_no_tpu(machine: Machine) -> None:
    found, problems = look(machine(files={"proc/cpuinfo": ""}))
    assert (found.chips, found.nodes, found.lock, problems) == ([], [], "absent", [])


def test_a_tpu_in_order(machine: Machine) -> None:
    root = machine(chips=2, nodes=("vfio/0", "vfio/1"), processes={7: ("sleep 1", ["/dev/null"])})
    found, problems = look(root)
    assert found.chips == ["v6e", "v6e"] and found.nodes == ["/dev/vfio/0", "/dev/vfio/1"] and not problems
    assert [chip.driver for chip in hardware.pci_chips(root)] == ["vfio-pci", "vfio-pci"]


def test_no_device_files(machine: Machine) -> None:
    _, (problem,) = look(machine(chips=4, driver=None))
    assert "4 TPU chip(s) (v6e) are on the PCI bus, but there is no /dev/accel*" in problem
    assert "kernel driver is none, and they need vfio-pci: create the VM with the runtime version" in problem


@pytest.mark.parametrize(
    ("files", "kind"),
    [
        ({".dockerenv": ""}, "Docker"),
        ({"run/.containerenv": ""}, "Podman"),
        ({"proc/1/cgroup": "0::/kubepods/besteffort/pod1"}, "Kubernetes"),
    ],
)
def test_no_device_files_in_a_container(
    machine: Machine, files: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    _, (problem,) = look(machine(chips=1, files=files))
    assert f"in this container ({kind}) -> start it with the devices: docker run --privileged" in problem
    assert diagnosis.container(machine(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) == "Kubernetes"


def test_no_permission(machine: Machine) -> None:
    root = machine(chips=1, device="0x005e", nodes=("accel0",), mode=0o660)
    status = (root / "dev/accel0").stat()
    group = diagnosis._group(status.st_gid)
    stranger = status.st_uid + 1
    _, (problem,) = look(root, stranger, {status.st_gid + 1})
    assert problem.startswith(f"this process may not open /dev/accel0: group {group}: its members may (mode 0660)")
    assert problem.endswith(f"-> sudo usermod -aG {group} $USER, then log in again")
    assert look(root, stranger, {status.st_gid})[1] == []
    assert look(root, 0)[1] == []
    (root / "dev/accel0").chmod(0o600)
    _, (problem,) = look(root, stranger, {status.st_gid})
    assert "mode 0600, owned by user" in problem and "sudo chmod a+rw /dev/accel0" in problem


def test_another_process_has_it(machine: Machine) -> None:
    root = machine(
        chips=1,
        nodes=("vfio/0",),
        processes={
            41: ("python train.py --steps 3", ["/dev/null", "/tmp/libtpu_lockfile", "/dev/vfio/0", "/dev/vfio/0"]),
            os.getpid(): ("this process", ["/dev/vfio/0"]),
        },
        files={"tmp/libtpu_lockfile": ""},
    )
    found, (problem,) = look(root)
    assert found.lock == "held"
    assert problem.startswith("process 41 has /dev/vfio/0, /tmp/libtpu_lockfile open: python train.py --steps 3 -> ")
    assert "kill 41" in problem


def test_another_process_has_other_chips(machine: Machine) -> None:
    root = machine(chips=2, nodes=("vfio/0", "vfio/1"), processes={41: ("serve", ["/dev/vfio/1"])})
    found, broken = look(root)
    assert found.holders == [diagnosis.Holder(41, "serve", ("/dev/vfio/1",))] and not broken
    (advice,) = diagnosis.obstacles(found, root)
    assert not advice.broken and "TPU_VISIBLE_CHIPS" in advice.remedy


def test_a_stale_lock_of_another_user(machine: Machine) -> None:
    root = machine(chips=1, nodes=("vfio/0",), files={"tmp/libtpu_lockfile": ""})
    lock = root / "tmp/libtpu_lockfile"
    lock.chmod(0o644)
    found, (problem,) = look(root, lock.stat().st_uid + 1, {lock.stat().st_gid + 1})
    assert found.lock == "not writable" and problem.endswith(
        "sudo rm /tmp/libtpu_lockfile, unless that user's process still runs"
    )
    lock.chmod(0o666)
    assert look(root)[0].lock == "free" and not look(root)[1]


def test_device_files_of_something_else(machine: Machine) -> None:
    root = machine(nodes=("accel0",))
    found = diagnosis.access(root)
    (advice,) = diagnosis.obstacles(found, root)
    assert not advice.broken and "no TPU chip that is known is on the PCI bus" in advice.what


def test_huge_pages(machine: Machine) -> None:
    root = machine(
        chips=1, nodes=("vfio/0",), files={"sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n"}
    )
    (advice,) = diagnosis.obstacles(diagnosis.access(root), root)
    assert not advice.broken and "echo always" in advice.remedy


def test_doctor_shows_the_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = machine(chips=4, files={".dockerenv": ""})
    monkeypatch.setattr(doctor.diagnosis.hardware, "device_nodes", lambda _="/": [])
    report = doctor.examine(compile=False, root=root)
    text = doctor._text(report)
    assert "TPU chips on the PCI bus: 4 (v6e); device files: none, in a container (Docker)" in text
    # the environment asks for XLA:CPU, so it is advice
    assert "note: 4 TPU chip(s) (v6e) are on the PCI bus" in text and "BROKEN" not in text
    monkeypatch.setenv("TORCHTPU_PLATFORM", "tpu")
    assert any(p["broken"] and "PCI bus" in p["what"] for p in doctor.examine(False, root)["problems"])


REQUIRES = {
    "torchtpu": ["torch<2.16,>=2.13", "jax<0.11,>=0.10.2", "numpy", "libtpu; extra == 'tpu'"],
    "jax": ["jaxlib<=0.10.2,>=0.10.1", "numpy>=2", "libtpu==0.0.42.*; extra == 'tpu'", "jaxlib==0.10.1; extra == 'ci'"],
}
RIGHT = {"torchtpu": "0.1.0", "torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.42.1"}


@pytest.mark.parametrize(
    ("change", "what", "remedy", "broken"),
    [
        ({}, None, "", False),
        ({"libtpu": None}, None, "", False),
        ({"torch": "2.14.0.dev20260101"}, None, "", False),
        (
            {"torch": "2.12.1"},
            "torch 2.12.1 is installed, and torchtpu 0.1.0 is made for <2.16,>=2.13",
            "'torch<2",
            True,
        ),
        ({"jaxlib": "0.9.0"}, "jaxlib 0.9.0 is installed, and jax 0.10.2 is made for", "'jaxlib<=0.10.2", True),
        ({"libtpu": "0.0.52"}, "libtpu 0.0.52 is installed, and jax 0.10.2", "'jax[tpu]==0.10.2' if a TPU", False),
    ],
)
def test_versions_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str | None], what: str | None, remedy: str, broken: bool
) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", REQUIRES.__getitem__)
    problems = diagnosis.misfits({**RIGHT, **change})
    if what is None:
        assert problems == []
    else:
        (problem,) = problems
        assert what in problem.what and remedy in problem.remedy and problem.broken is broken


def test_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHTPU_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHTPU_CACHE_LIMIT", "3")
    problems: list[diagnosis.Problem] = []
    assert diagnosis.caches(problems)["programs"] == 0 and not problems
    for name in ("programs/aa/one.0", "programs/bb/two.0", "torch-2-x/_C.so"):
        file = tmp_path / "cache" / name
        file.parent.mkdir(parents=True)
        file.write_bytes(b"x" * 1000)
    found = diagnosis.caches(problems)
    assert (found["programs"], found["program_bytes"], found["limit_bytes"]) == (2, 2000, 3 << 20)
    assert (found["extensions"], found["extension_bytes"], found["writable"]) == (1, 1000, True)
    assert doctor._cache_line(found).startswith("on disk: 2 compiled programs, 0.0 of 3 MiB; 1 extensions")
    monkeypatch.setenv("TORCHTPU_CACHE_LIMIT", "much")
    assert diagnosis.caches(problems)["limit_bytes"] is None
    assert problems[0].broken and "TORCHTPU_CACHE_LIMIT is a number of MiB" in problems[0].what


def test_compiler() -> None:
    problems: list[diagnosis.Problem] = []
    found = diagnosis.compiler(problems)
    if libtpu_missing():
        assert found["status"] == "absent" and "pip install" in found["message"] and not problems
    else:
        assert found["status"] == "ok" and found["code_bytes"] > 0 and not problems


def test_a_compiler_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtpu import aot

    class Broken:
        def __init__(self, timeout: float) -> None: ...
        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None: ...
        def compile(self, text: str, topology: str) -> aot.Result:
            assert "stablehlo" in text and topology == "v6e:2x2"
            return aot.Result("crash", "the compiler's process ended with status -8")

    monkeypatch.setattr(aot, "libtpu_missing", lambda: None)
    monkeypatch.setattr(aot, "Compiler", Broken)
    problems: list[diagnosis.Problem] = []
    found = diagnosis.compiler(problems)
    assert doctor._compiler_line(found) == "ahead of time: fails (crash)"
    assert problems[0].broken and "ended with status -8" in problems[0].what


def test_no_compile(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", "--no-compile"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["compiler"] == {"status": "skipped"} and report["cache"]["folder"]
    assert report["versions_fit"] == (not diagnosis.misfits(report["versions"]))
