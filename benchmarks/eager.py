"""``python -m benchmarks.eager``: the eager device against PyTorch CPU.

Prints tables of ratios and writes ``eager.json`` and ``eager.md``. Run it on an idle machine; the two sides of every
measure take turns, so a busy one spoils the times more than the ratios.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TORCHTPU_PLATFORM", "cpu")
os.environ.setdefault("TORCHTPU_CACHE_LIMIT", "0")  # compiles are measured

from benchmarks.measure import Measure
from benchmarks.models import MODELS, measure_gpt2, measure_minilm, measure_models, measure_training
from benchmarks.operators import measure_operators
from benchmarks.process import measure_import, measure_start, measure_tenth_step, measure_transfer
from benchmarks.report import measure_sections

SECTIONS: dict[str, tuple[str, tuple[str, str]]] = {
    "import": ("`import torch`", ("with the device", "without")),
    "operators": ("Host time of a small operator, strict mode", ("tpu", "PyTorch CPU")),
    "recording": ("Host time of a small operator, fused mode", ("tpu", "PyTorch CPU")),
    "minilm": ("A real model", ("tpu", "PyTorch CPU")),
    "transfer": ("Moving parameters", ('`.to("tpu")`', "`torch.clone`")),
    "models": ("Transformers models, small configurations", ("tpu", "PyTorch CPU")),
    "gpt2": ("A published size", ("tpu", "PyTorch CPU")),
    "training": ("A larger model", ("tpu", "the other")),
    "start": ("A second process, with programs on disk", ("first step", "steady step")),
    "tenth": ("From nothing to the tenth step", ("fused", "strict")),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.eager", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=[*SECTIONS], default=[*SECTIONS], help="sections to measure")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS], help="models to measure")
    parser.add_argument("--quick", action="store_true", help="few rounds: to see that it runs, not to be quoted")
    parser.add_argument("--output", type=Path, help="folder for eager.json and eager.md; nothing is written without it")
    options = parser.parse_args()
    quick = options.quick
    run: dict[str, Callable[[], list[Measure]]] = {
        "import": lambda: measure_import(2 if quick else 9),
        "operators": lambda: measure_operators("strict", 50 if quick else 300, 2 if quick else 9),
        "recording": lambda: measure_operators("fused", 50 if quick else 300, 2 if quick else 9),
        "minilm": measure_minilm,
        "transfer": lambda: measure_transfer(1 if quick else 3),
        "models": lambda: measure_models(options.models, 2 if quick else 7),
        "gpt2": lambda: measure_gpt2(2 if quick else 7),
        "training": lambda: measure_training(2 if quick else 7),
        "start": measure_start,
        "tenth": measure_tenth_step,
    }
    sections = {name: (*SECTIONS[name], run[name]) for name in options.only}
    measure_sections("eager", "Eager benchmarks", sections, options.output)


if __name__ == "__main__":
    main()
