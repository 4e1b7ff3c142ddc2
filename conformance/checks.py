"""Compile a training step of every model of the zoo, cut down in size, for each supported generation of TPU.

``python -m conformance.checks run`` adds what is missing to ``results/checks/models.jsonl``; ``report`` writes
docs/tpu-models.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from torchtpu import zoo
from torchtpu.aot import TOPOLOGIES, Compiler, Topology
from torchtpu.aot import check as checks
from torchtpu.aot.graph import GraphError
from torchtpu.sharding import PlanError, parse

TESTED = ("llama", "qwen3", "qwen3_moe", "gpt2", "bert", "vit", "resnet", "whisper")
"""The models of the test suite (tests/models/zoo.py), which trains each on the device and compares it with the CPU."""
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models"))
RESULTS = Path(__file__).parent / "results" / "checks" / "models.jsonl"
DOCUMENT = Path(__file__).parents[1] / "docs" / "tpu-models.md"
PLAN, PLAN_OF_TESTS = "fsdp,tp=2", "fsdp=2,tp"  # the batches of the test suite have two samples
KINDS = ("train",)
_HEAD = """# Models compiled for TPUs

Every model of the zoo, with its dimensions cut down and its structure kept (plan `{plan}`), and every model of the
test suite (`zoo:NAME` is in tests/models/zoo.py; plan `{plan_of_tests}`), as a training step, compiled by the TPU's own
compiler for one host of each generation. Made without a TPU by

    python -m conformance.checks run
    python -m conformance.checks report

{ok} of {total} compile.

"""


def names() -> list[str]:
    """The models: those of the zoo, and those of the test suite as factories."""
    return [*zoo.names(), *(f"zoo:{name}" for name in TESTED)]


def _read() -> dict[tuple[str, str, str], dict[str, Any]]:
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    records = map(json.loads, lines)
    return {(r["model"], r["kind"], r["topology"]): r for r in records}


def run(arguments: argparse.Namespace) -> int:
    """Compile what is not recorded."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    known = {} if arguments.redo else _read()
    with Compiler(arguments.timeout) as compiler, RESULTS.open("a") as file:
        for name in names():
            for kind in KINDS:
                if all((name, kind, t) in known for t in TOPOLOGIES.values()):
                    continue
                for record in _records(name, kind, compiler, arguments.timeout):
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    print(record["model"], record["kind"], record["topology"], record["status"], file=sys.stderr)
    return 0


def _records(name: str, kind: str, compiler: Compiler, timeout: float) -> list[dict[str, Any]]:
    """A model for each topology."""
    found = []
    try:
        source = zoo.resolve(name).tiny()
        traced = checks.trace(checks.Request(source, kind, batch=8, sequence=256, dtype=_dtype(name), timeout=timeout))
    except (zoo.ModelError, GraphError) as error:
        return [_record(name, kind, t, "fail", str(error)) for t in TOPOLOGIES.values()]
    for topology in map(Topology.parse, TOPOLOGIES.values()):
        try:
            report = checks.check(
                traced, topology, parse(PLAN_OF_TESTS if ":" in name else PLAN, topology.devices), compiler=compiler
            )
            found.append(_record(name, kind, topology.name, report.status, report.message))
        except PlanError as error:
            found.append(_record(name, kind, topology.name, "fail", str(error)))
    return found


def _dtype(name: str) -> torch.dtype:
    """A factory's model keeps its own."""
    return torch.float32 if ":" in name else torch.bfloat16


def _record(model: str, kind: str, topology: str, status: str, message: str) -> dict[str, Any]:
    return {"model": model, "kind": kind, "topology": topology, "status": status, "message": message[:400]}


def report(arguments: argparse.Namespace) -> int:
    """Write the table."""
    records = _read()
    topologies = list(TOPOLOGIES.values())
    lines = ["| model | step | " + " | ".join(topologies) + " |", "|---|---|" + "---|" * len(topologies)]
    reasons = []
    for name in names():
        for kind in KINDS:
            found = [records.get((name, kind, t)) for t in topologies]
            lines.append(f"| {name} | {kind} | " + " | ".join(r["status"] if r else "not run" for r in found) + " |")
            reasons += [
                f"- {name}, {kind}, {r['topology']}: {r['message']}" for r in found if r and r["status"] != "ok"
            ]
    total = len(names()) * len(KINDS) * len(topologies)
    ok = sum(r["status"] == "ok" for r in records.values())
    text = _HEAD.format(plan=PLAN, plan_of_tests=PLAN_OF_TESTS, ok=ok, total=total) + "\n".join(lines) + "\n"
    DOCUMENT.write_text(text + ("\n" + "\n".join(reasons) + "\n" if reasons else ""))
    print(f"{ok} of {total} compile; wrote {DOCUMENT}")
    return 0


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m conformance.checks", description=__doc__)
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="compile what is not recorded")
    runs.add_argument("--redo", action="store_true", help="run again what is recorded")
    runs.add_argument("--timeout", type=float, default=600.0, help="seconds for one compile")
    runs.set_defaults(function=run)
    commands.add_parser("report", help="write docs/tpu-models.md").set_defaults(function=report)
    arguments = parser.parse_args()
    status: int = arguments.function(arguments)
    return status


if __name__ == "__main__":
    sys.exit(main())
