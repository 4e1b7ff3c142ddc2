"""Write what works today into README.md: counted from the operator table and from a test run, never typed.

    python -m pytest  # writes build/results.xml
    python docs/generate_status.py build/results.xml

The counts are kept in docs/status.json. Without a results file the table is written anew from those.
"""

from __future__ import annotations

import argparse
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
STATUS = ROOT / "docs" / "status.json"
README = ROOT / "README.md"
CONFORMANCE = ROOT / "conformance" / "results" / "summary.json"
BEGIN, END = "<!-- status: written by docs/generate_status.py -->", "<!-- end of status -->"

AREAS = {
    "lowering": "operators against PyTorch CPU, without the device",
    "eager": "views, in-place and out= variants, modes, fusion, errors, files, threads",
    "device": "`torch.tpu`, `torch.accelerator`, devices, memory, random numbers, processes",
    "conformance": "a fixed slice of PyTorch's operator database on the device",
    "aot": "compiles for a TPU topology on a machine without one",
    "zoo": "models by name: published parameter counts, small variants that run, factories and configurations",
    "compile": "`torchtpu.explain`, the logger and structured traces",
    "export": "packages: saved, damaged, loaded without the model's code, run in plain JAX; torch.export",
    "models": "whole models: forward, gradients, optimizer steps",
    "cli": "`torchtpu demo` and `torchtpu doctor`",
    "examples": "the programs in `examples/`",
    "smoke": "the slice that also runs on the newest supported torch",
    "docs": "the documentation's commands, code and tables",
}


def count_operators() -> dict[str, int]:
    """How many aten overloads run on the device, by the way they do."""
    import torch

    import torchtpu  # noqa: F401
    from torchtpu.eager.schema import derive
    from torchtpu.lowering.apply import decomposition, short_name
    from torchtpu.lowering.registry import find

    torch.tpu.init()
    counts: Counter[str] = Counter()
    for qualified in torch._C._dispatch_get_all_op_names():
        namespace, _, name = qualified.partition("::")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None) if namespace == "aten" else None
        if packet is None or (overload or "default") not in packet.overloads():
            continue
        op = getattr(packet, overload or "default")
        derived = derive(op) if op._schema.is_mutable else None
        if find(short_name(op)) is not None:
            counts["lowered"] += 1
        elif derived is not None and find(short_name(derived.functional)) is not None:
            counts["derived"] += 1
        elif torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd"):
            counts["composite"] += 1
        elif decomposition(derived.functional if derived is not None else op) is not None:
            counts["decomposed"] += 1
    return dict(counts)


def read_results(path: Path) -> dict[str, Any]:
    """Counts by test folder, and the parameters of the model tests that passed, from pytest's JUnit file."""
    areas: dict[str, Counter[str]] = {}
    models: dict[str, list[str]] = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        parts = case.get("classname", "").split(".")
        if len(parts) < 3 or parts[0] != "tests":
            continue
        outcome = _outcome(case)
        areas.setdefault(parts[1], Counter())[outcome] += 1
        name, _, parameter = case.get("name", "").partition("[")
        if parts[1] == "models" and outcome == "passed":
            models.setdefault(name, [])
            if parameter:
                models[name].append(parameter.removesuffix("]"))
    return {"areas": {k: dict(v) for k, v in sorted(areas.items())}, "models": models}


def _outcome(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is None:
        return "passed"
    return "expected to fail" if skipped.get("type") == "pytest.xfail" else "skipped"


def render(status: dict[str, Any]) -> str:
    """The part of the README between the markers."""
    operators = status["operators"]
    lines = [
        f"Counted with torch {status['torch']} and jax {status['jax']} on {status['platform']}.",
        "",
        "| aten operators (overloads) | |",
        "|---|---:|",
        f"| with a lowering of their own | {operators.get('lowered', 0)} |",
        f"| in-place and out= variants derived from those | {operators.get('derived', 0)} |",
        f"| through PyTorch's decompositions | {operators.get('decomposed', 0)} |",
        f"| composed by PyTorch of other operators | {operators.get('composite', 0)} |",
        "",
        "| tests | passed | failed | expected to fail | skipped |",
        "|---|---:|---:|---:|---:|",
    ]
    outcomes = ("passed", "failed", "expected to fail", "skipped")
    for area, counts in status["areas"].items():
        title = f"{area}: {AREAS[area]}" if area in AREAS else area
        lines.append(f"| {title} | " + " | ".join(str(counts.get(outcome, 0)) for outcome in outcomes) + " |")
    lines += _conformance()
    if status["models"]:
        lines += ["", "| models tested against PyTorch CPU | |", "|---|---|"]
        for name, parameters in status["models"].items():
            what = name.removeprefix("test_").replace("_", " ").replace("cpu", "CPU")
            lines.append(f"| {what} | {', '.join(parameters) or 'yes'} |")
    return "\n".join(lines)


def _conformance() -> list[str]:
    """One row per suite of the committed conformance run, with its picture."""
    if not CONFORMANCE.exists():
        return []
    lines = [
        "",
        "![The device on PyTorch's own test databases](docs/images/conformance.svg)",
        "",
        "| PyTorch's databases ([report](docs/conformance.md)) | in the database | pass | other | not run yet |",
        "|---|---:|---:|---:|---:|",
    ]
    for suite, counts in json.loads(CONFORMANCE.read_text()).items():
        total, waiting = sum(counts.values()), counts.get("not run", 0)
        good = counts.get("pass", 0) + counts.get("host", 0)
        lines.append(f"| {suite} | {total} | {good} | {total - good - waiting} | {waiting} |")
    return lines


def update(readme: str, status: dict[str, Any]) -> str:
    """The README with its status part written anew."""
    pattern = re.compile(re.escape(BEGIN) + ".*?" + re.escape(END), re.DOTALL)
    if not pattern.search(readme):
        raise ValueError(f"README.md has no lines {BEGIN} and {END}")
    return pattern.sub(lambda _: f"{BEGIN}\n{render(status)}\n{END}", readme)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, help="JUnit file of a run of all tests")
    options = parser.parse_args()
    if options.results:
        import jax
        import torch

        status = {"operators": count_operators(), "torch": torch.__version__, "jax": jax.__version__}
        status["platform"] = torch.tpu.get_device_name()
        status |= read_results(options.results)
        STATUS.write_text(json.dumps(status, indent=1) + "\n")
    README.write_text(update(README.read_text(), json.loads(STATUS.read_text())))


if __name__ == "__main__":
    main()
