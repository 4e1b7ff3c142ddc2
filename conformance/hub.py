"""``python -m conformance.hub run | report``: Transformers' model classes, compiled on the device, against the CPU.

Each class is made from its configuration with small sizes and a fixed seed, runs forward on the CPU and, through
``torch.compile``, on the device, and the results are compared. Resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "hub" / "models.jsonl"
PAGE = Path(__file__).parents[1] / "docs" / "transformers.md"

_DATA: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
VISION, AUDIO, BOTH = _DATA["vision"], _DATA["audio"], _DATA["both"]
CLASSES = (*_DATA["text"], *VISION, *AUDIO, *BOTH)
"""Sixty popular ones. ``sizes`` in the data are for whatever of them a configuration has; ``own`` is what else a class
needs to be small, or to be what people use."""


def _shrink(config: Any, name: str) -> Any:
    """The configuration with small sizes, its parts too."""
    own = _DATA["own"].get(name, {})
    for key, value in {**_DATA["sizes"], **own}.items():
        computed = isinstance(getattr(type(config), key, None), property)
        if key in own or (hasattr(config, key) and not computed and not isinstance(getattr(config, key), list)):
            setattr(config, key, value)
    computed = isinstance(getattr(type(config), "layer_types", None), property)
    if not computed and getattr(config, "layer_types", None) and hasattr(config, "num_hidden_layers"):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    for part in ("text_config", "vision_config"):
        if hasattr(config, part) and getattr(config, part) is not None:
            _shrink(getattr(config, part), name)
    return config


def _inputs(model: Any, name: str) -> dict[str, Any]:
    import torch

    ids = torch.randint(4, 250, (2, 16))
    if name in BOTH:
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 32, 32)}
    if name == "WhisperForConditionalGeneration":
        return {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": ids}
    if name in AUDIO:
        wave = torch.randn(2, 64, 32) if name.startswith("AST") else torch.randn(2, 2000)
        return {"input_values": wave}
    if name in VISION:
        return {"pixel_values": torch.randn(2, 3, model.config.image_size, model.config.image_size)
                if hasattr(model.config, "image_size") else torch.randn(2, 3, 64, 64)}  # fmt: skip
    mask = torch.ones_like(ids)
    mask[1, 12:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    return inputs | ({"decoder_input_ids": ids[:, :8]} if model.config.is_encoder_decoder else {})


def check(name: str) -> dict[str, Any]:
    """Make one model, run it on both sides and compare; the record of it."""
    os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import transformers
    from torch.utils._pytree import tree_leaves, tree_map

    import torchtpu  # noqa: F401

    start = time.perf_counter()
    record: dict[str, Any] = {"model": name, "status": "pass"}
    try:
        torch.manual_seed(0)
        cls = getattr(transformers, name)
        config = _shrink(cls.config_class(), name)
        model = cls(config).eval()
        inputs = _inputs(model, name)
        with torch.no_grad():
            expected = model(**inputs)
    except Exception as error:
        return record | {"status": "not made", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    record["parameters"] = sum(p.numel() for p in model.parameters())
    try:
        before = torch._dynamo.utils.counters["graph_break"].total()
        model.to("tpu")
        compiled = torch.compile(model)
        with torch.no_grad():
            actual = compiled(**tree_map(lambda t: t.to("tpu"), inputs))
        pairs = zip(_tensors(tree_leaves(dict(actual))), _tensors(tree_leaves(dict(expected))), strict=True)
        for a, e in pairs:
            torch.testing.assert_close(a.cpu(), e, rtol=1e-3, atol=1e-4)
        record["breaks"] = torch._dynamo.utils.counters["graph_break"].total() - before
        record["compiles"] = torch.tpu.compile_stats()["compiles"]
        if torch.tpu.fallbacks():
            record |= {"status": "fallback", "error": f"on the CPU: {', '.join(torch.tpu.fallbacks())}"}
    except Exception as error:
        record |= {"status": "fail", "error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
    record["seconds"] = round(time.perf_counter() - start, 1)
    return record


def _tensors(leaves: list[Any]) -> list[Any]:
    import torch

    return [t for t in leaves if isinstance(t, torch.Tensor)]


def run(timeout: float) -> int:
    """Check every class that is not recorded, each in a process of its own."""
    done = {r["model"] for r in _records()}
    for name in CLASSES:
        if name in done:
            continue
        try:
            process = subprocess.run(
                [sys.executable, "-m", "conformance.hub", "one", name],
                cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=timeout,
            )  # fmt: skip
            lines = process.stdout.splitlines()
            record = json.loads(lines[-1]) if process.returncode == 0 and lines else None
            record = record or {
                "model": name,
                "status": "fail",
                "error": f"the process ended with {process.returncode}",
            }
        except subprocess.TimeoutExpired:
            record = {"model": name, "status": "fail", "error": f"no result after {timeout:.0f} s"}
        RESULTS.parent.mkdir(exist_ok=True)
        with open(RESULTS, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(record, file=sys.stderr, flush=True)
    return 0


def _records() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def report() -> int:
    """Write the page."""
    import transformers

    records = {r["model"]: r for r in _records()}
    passed = sum(records.get(n, {}).get("status") == "pass" for n in CLASSES)
    lines = [
        "# Transformers models",
        "",
        f"Generated by `python -m conformance.hub report`; do not edit. {len(CLASSES)} model classes of Transformers "
        f"{transformers.__version__}, made small from their configurations, run forward under `torch.compile` on the "
        f"device (XLA:CPU) and compared with PyTorch CPU: **{passed} of {len(CLASSES)} agree**.",
        "",
        "| class | result | graph breaks | programs compiled | reason |",
        "|---|---|---:|---:|---|",
    ]
    for name in CLASSES:
        r = records.get(name, {"status": "not run"})
        reason = r.get("error", "").replace("|", "\\|")
        lines.append(f"| `{name}` | {r['status']} | {r.get('breaks', '')} | {r.get('compiles', '')} | {reason} |")
    PAGE.write_text("\n".join(lines) + "\n")
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m conformance.hub", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    run_command = commands.add_parser("run", help="check the classes that are not recorded yet")
    run_command.add_argument("--timeout", type=float, default=300, help="seconds for one class")
    one = commands.add_parser("one", help="check one class and print its record")
    one.add_argument("name", choices=CLASSES)
    commands.add_parser("report", help="write docs/transformers.md")
    arguments = parser.parse_args()
    if arguments.command == "one":
        print(json.dumps(check(arguments.name)))
        return 0
    return run(arguments.timeout) if arguments.command == "run" else report()


if __name__ == "__main__":
    sys.exit(main())
