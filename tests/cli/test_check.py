"""`torchtpu check`: what it refuses and how, and one real compile of a small model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from torchtpu import aot
from torchtpu.aot import libtpu_missing, topology
from torchtpu.aot.saved import SavedError, load
from torchtpu.cli import main

needs_libtpu = pytest.mark.skipif(libtpu_missing() is not None, reason=libtpu_missing() or "")


@pytest.fixture
def libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if libtpu were installed; nothing in these tests goes as far as to use it."""
    for module in (aot, topology):
        monkeypatch.setattr(module, "libtpu_missing", lambda: None)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command says when it cannot go on: one line, and nothing on standard output."""
    assert main(["check", *arguments]) == 1
    out, error = capsys.readouterr()
    assert out == ""
    return error


def test_without_libtpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "compiling for a TPU needs libtpu, which is not installed (pip install 'torchtpu[tpu]')"
    monkeypatch.setattr(aot, "libtpu_missing", lambda: reason)
    assert refused(capsys, "llama3-8b") == f"torchtpu check: {reason}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama3-8b", "--topology", "v9:2x2"], r"'v9:2x2': no generation 'v9'; known are .*v5e.*v6e.*tpu7x"),
        (["llama3-8b", "--topology", "v6e:3x5"], r"machines of v6e are made of hosts of 2x2 chips"),
        (["llama3-8b", "--topology", "v6e"], r"a topology of v6e has 2 dimensions, such as v6e:"),
        (["llama3-8b", "--topology", "v5e:2x2,v6e:2x2", "--save", "x"], "--save takes one topology"),
        (["llama3-9b"], r"llama3-9b.*llama3-8b"),
        (["llama3-8b", "--shard", "fsdp=8,tp=2"], r"is for 16 devices \(fsdp=8 x tp=2\), the topology has 4"),
        (["llama3-8b", "--shard", "pp=4"], "no preset has an axis pp"),
        (["llama3-8b", "--shard", "absent.json"], r"cannot read the plan absent\.json"),
        (["absent_module:build"], "absent_module"),
    ],
)
def test_refusals(libtpu: None, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    error = refused(capsys, *arguments)
    assert re.search(message, error), error
    assert error.startswith("torchtpu check: ") and error.count("\n") == 1


def test_a_plan_that_does_not_divide(libtpu: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tensor, and of the batch."""
    small = ["llama3-8b", "--tiny", "--seq", "16"]
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"mesh": {"a": 256}, "parameters": [["k_proj.weight$", ["a"]]]}))
    error = refused(capsys, *small, "--topology", "v6e:16x16", "--shard", str(plan))
    assert re.search(r"self_attn\.k_proj\.weight is \[32, 64\]: dimension 0 \(32\) does not divide over a=256", error)
    error = refused(capsys, *small, "--batch", "3")
    assert "input_ids: dimension 0 (the batch, 3) does not divide over fsdp=4: take a batch" in error


def test_a_factory_that_raises(
    libtpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its traceback is shown, then what is wrong in a line."""
    (tmp_path / "broken_factory.py").write_text("def build():\n    return {}['width']\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(capsys, "broken_factory:build")
    assert "Traceback" in error and "broken_factory.py" in error and "return {}['width']" in error
    assert error.splitlines()[-1].startswith("torchtpu check: ") and "KeyError" in error.splitlines()[-1]


def test_inputs_of_a_factory(
    libtpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their batch holds, whatever the default would be; another one that is asked for is refused."""
    (tmp_path / "model_with_inputs.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(4, 2), {'input': torch.ones(6, 4)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(capsys, "model_with_inputs:build", "--infer")
    assert "input: dimension 0 (the batch, 6) does not divide over fsdp=4" in error
    error = refused(capsys, "model_with_inputs:build", "--infer", "--batch", "8")
    assert "has inputs of its own, with a batch of 6, not 8: leave --batch out" in error


def test_a_model_that_cannot_be_traced(
    libtpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "branching_model.py").write_text(
        "import torch\n"
        "class Branches(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x if x.sum() > 0 else -x\n"
        "def build():\n"
        "    return Branches(), {'x': torch.ones(4, 2)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    error = refused(capsys, "branching_model:build", "--infer")
    assert "torch.export cannot trace Branches" in error and "branching_model.py:4" in error


@pytest.mark.parametrize("arguments", [["--batch", "0"], ["--seq", "x"], ["--train", "--infer"], ["--dtype", "int8"]])
def test_options(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["check", "llama3-8b", *arguments])
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err


@needs_libtpu
def test_a_small_llama(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compiled, reported as JSON and as a page, and saved."""
    page, folder = tmp_path / "report.html", tmp_path / "step"
    command = ["check", "llama3-8b", "--tiny", "--topology", "v6e:2x2", "--seq", "128", "--shard", "fsdp=2,tp=2"]
    assert main([*command, "--json", "-", "--html", str(page), "--save", str(folder)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["topology"], report["plan_name"]) == ("ok", "v6e:2x2", "fsdp=2,tp=2")
    assert report["loops"] == [["model.layers", 2]] and report["batch"] == 4 and report["units"] == 4 * 128
    assert report["memory"]["compiled"] and report["memory"]["fits"] and report["memory"]["temporaries"] > 0
    prediction = report["prediction"]
    assert 0 < prediction["mfu_serial"] <= prediction["mfu_overlapped"] < 1
    assert prediction["serial_seconds"] >= prediction["overlapped_seconds"] > 0
    assert report["smallest"] == "v6e:2x2" and report["saved"] == str(folder)
    assert page.read_text().startswith("<!") and "v6e:2x2" in page.read_text()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["mesh"] == {"fsdp": 2, "tp": 2} and len(manifest["coordinates"]) == 4
    assert (folder / "executable.bin").stat().st_size > 10_000
    with pytest.raises(SavedError, match="this machine has no tpu"):
        load(folder)
