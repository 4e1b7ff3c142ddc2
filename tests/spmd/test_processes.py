"""A mesh over the devices of two processes does what one device does, and processes that differ are told so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import finish, free_port, start

from torchtpu.runtime import meshes

PROGRAM = Path(__file__).parent / "processes.py"
WORKS = (
    "training",
    "batches_by_parts",
    "saved_and_loaded",
    "random_numbers",
    "from_meta_and_from_the_device",
    "values_read",
    "mesh_within_a_process",
    "sizes_of_meshes",
)


def run(folder: Path, *checks: str, **environment: str) -> list[dict[str, str]]:
    """For each process, the traceback of each check, empty where it passed."""
    environment = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHTPU_CPU_DEVICES": "2", **environment}
    processes = start(2, [str(PROGRAM), *checks], folder, MASTER_PORT=str(free_port()), **environment)
    codes, outputs = finish(processes, folder, 300)
    assert codes == [0, 0], outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("processes"), *WORKS, TORCHTPU_SPMD_TIMEOUT="120")


@pytest.mark.parametrize("check", WORKS)
def test_equals_one_device(check: str, found: list[dict[str, str]]) -> None:
    assert [f[check] for f in found] == ["", ""]


@pytest.mark.heavy
@pytest.mark.parametrize("check", ["operator_by_operator", "compiled", "generate", "experts", "checkpoint"])
def test_also(check: str, tmp_path: Path) -> None:
    if check in ("generate", "experts"):
        pytest.importorskip("transformers")
    assert [f[check] for f in run(tmp_path, check, TORCHTPU_SPMD_TIMEOUT="120")] == ["", ""]


def test_a_process_that_reads_alone(tmp_path: Path) -> None:
    reader, other = run(tmp_path, "lone_reader", TORCHTPU_SPMD_TIMEOUT="6")
    assert other["lone_reader"] == ""
    error = reader["lone_reader"]
    assert "CollectiveTimeout: reading a tensor of size [64, 16] (float32, 4,096 bytes)" in error
    assert "rank 1 did not come within 6 s" in error
    where = [n for n, line in enumerate(PROGRAM.read_text().splitlines(), 1) if line.endswith("# alone")]
    assert f"processes.py:{where[0]}," in error
    assert f"rank 1: running {PROGRAM}:{where[0] + 1}" in error


def test_processes_that_differ(tmp_path: Path) -> None:
    for text, check in (("values", "other_values"), ("programs", "other_programs")):
        folder = tmp_path / check
        folder.mkdir()
        for process in run(folder, check, TORCHTPU_SPMD_TIMEOUT="20"):
            assert "MismatchError" in process[check]
            assert f"different {text}" in process[check]
            assert "rank 0: " in process[check] and "rank 1: " in process[check]


def test_one_device_in_each_of_several_processes_of_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RuntimeError, match=r"start one process on each host \(torchrun --nproc-per-node 1\)"):
        meshes.make({"fsdp": 64})
