"""Compiled programs on disk: a second process compiles nothing, and nothing on disk can do harm."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "device"))
from processes import run  # the tests' helper for processes of their own

PROGRAM = """
import json, warnings
import torch, torchtpu
torch.manual_seed(0)
layers = torch.nn.Linear(6, 8), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(8, 3)
model = torch.nn.Sequential(*layers).to("tpu")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.linspace(-1, 1, 24).reshape(4, 6).to("tpu")
losses = []
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(3):
        loss = model(x).square().mean() + torch.linalg.cholesky(torch.eye(3, device="tpu") * 4).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.tpu.set_eager_mode("strict"):
        losses.append((x * 3).sum().item())
stats = torch.tpu.compile_stats()
print(json.dumps([losses, stats["compiles"], stats["disk_hits"], [str(w.message) for w in caught]]))
"""


def outcome(folder: Path, **environment: str) -> list:
    """Losses, compiles, disk hits and warnings of one process."""
    environment = {"TORCHTPU_CACHE_LIMIT": "100", "TORCHTPU_CPU_DEVICES": "1", **environment}
    build = Path(__import__("torchtpu")._build.cache_dir())
    for built in build.iterdir():  # the extension is not what is tested here
        target = folder / built.name
        if built.name != "programs":
            with contextlib.suppress(FileExistsError):  # another thread was first
                target.symlink_to(built)
    return json.loads(run(PROGRAM, TORCHTPU_CACHE_DIR=str(folder), **environment).stdout.splitlines()[-1])


@pytest.fixture(autouse=True)
def mode():
    """The processes choose their modes."""
    return "fused"


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A folder that one process has filled, and that process's outcome."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, outcome(folder)


def files(folder: Path) -> list[Path]:
    return [p for p in folder.glob("programs/*/*") if p.is_file()]


def test_a_second_process_compiles_nothing(warm):
    folder, (losses, compiles, hits, _) = warm
    assert compiles > 0
    assert hits == 0
    again, compiles_again, hits_again, caught = outcome(folder)
    assert (again, compiles_again, hits_again, caught) == (losses, 0, compiles, [])


def test_flags_and_versions_are_part_of_the_key(warm):
    folder, (losses, compiles, _, _) = warm
    other, compiled, hits, _ = outcome(folder, XLA_FLAGS="--xla_cpu_enable_fast_min_max=true")
    assert (compiled, hits) == (compiles, 0)
    assert other == pytest.approx(losses)


def test_damaged_files_are_discarded(warm):
    folder, (losses, compiles, _, _) = warm
    damaged = files(folder)
    for n, path in enumerate(damaged):
        data = path.read_bytes()
        path.write_bytes([b"", data[: len(data) // 2], data[:-1] + b"?"][n % 3])
    again, compiled, hits, caught = outcome(folder)
    assert (again, compiled, hits) == (losses, compiles, 0)
    assert all("damaged cache file" in w for w in caught)
    assert caught
    assert outcome(folder)[1] == 0


def test_limit_zero_keeps_nothing(tmp_path):
    _, compiles, hits, _ = outcome(tmp_path, TORCHTPU_CACHE_LIMIT="0")
    assert compiles > 0
    assert hits == 0
    assert not files(tmp_path)


def test_processes_share_a_folder(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = [f.result() for f in [pool.submit(outcome, tmp_path) for _ in range(3)]]
    assert all(r[0] == results[0][0] and r[3] == [] for r in results)
    assert outcome(tmp_path)[1] == 0


def test_the_least_recently_used_go_first(tmp_path, monkeypatch):
    import os

    from torchtpu.runtime import disk_cache

    monkeypatch.setenv("TORCHTPU_CACHE_LIMIT", "1")
    folder = tmp_path / "version"
    folder.mkdir()
    for n in range(6):
        (folder / str(n)).write_bytes(b"x" * 2**18)
        os.utime(folder / str(n), (n, n))
    disk_cache._sweep(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["3", "4", "5"]


def test_a_wrong_limit_says_so(monkeypatch):
    from torchtpu.runtime import disk_cache

    monkeypatch.setenv("TORCHTPU_CACHE_LIMIT", "lots")
    with pytest.raises(ValueError, match="number of MiB"):
        disk_cache.limit()
