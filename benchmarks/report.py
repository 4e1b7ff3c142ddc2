"""Measure sections, print their tables and write them to files."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import torch

import torchtpu
from benchmarks.measure import Measure, markdown

__all__ = ["Section", "measure_sections"]

Section = tuple[str, tuple[str, str], Callable[[], list[Measure]]]
"""A title, the names of the two sides, and what measures them."""


def measure_sections(name: str, title: str, sections: dict[str, Section], output: Path | None) -> None:
    """Measure in turn and print; write ``<name>.md`` and ``<name>.json`` to a folder, if there is one."""
    versions = f"torch {torch.__version__}, jax {jax.__version__}, Python {platform.python_version()}"
    system = f"{versions}, {os.cpu_count()} CPU cores"
    load = os.getloadavg()[0]
    header = (
        f"# {title}\n\n"
        f"Written by `python -m benchmarks.{name} --output benchmarks/results`. torchtpu {torchtpu.__version__}, "
        f"{system}, on {torch.tpu.get_device_name()}; {load:.1f} processes wanted to run when it started. "
        "The ratio is that of the least times.\n"
    )
    print(header, flush=True)
    text, data = [header], {}
    for key, (heading, sides, run) in sections.items():
        print(f"measuring: {key}", file=sys.stderr, flush=True)
        measures = run()
        section = markdown(heading, measures, sides)
        print(section, flush=True)
        text.append(section)
        data[key] = [m.as_dict() for m in measures]
    fallbacks = torch.tpu.fallbacks()
    text.append("No operator ran on the CPU instead.\n" if not fallbacks else f"Ran on the CPU instead: {fallbacks}.\n")
    print(text[-1])
    if output:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"{name}.md").write_text("\n".join(text))
        record = {"system": system, "load": load, "fallbacks": fallbacks, "sections": data}
        (output / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
