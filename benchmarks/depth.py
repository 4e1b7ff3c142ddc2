"""``python -m benchmarks.depth``: what one more decoder layer costs in recording, tracing and compiling.

Times the first and a later forward and backward pass of Llamas of 4 to 64 layers, in fused eager mode and with
torch.compile, writes ``depth.json`` and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main"]

DEPTHS = (4, 8, 16, 32, 64)
MODES = {"fused": "fused eager mode", "compile": "torch.compile"}
_COLOURS = {"fused": "#1a5fb4", "compile": "#c64600"}
_PROGRAM = """
import json, sys, time
import torch, torchtpu
from transformers import LlamaConfig, LlamaForCausalLM

layers, mode = int(sys.argv[1]), sys.argv[2]
torch.tpu.init()
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=layers, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, use_cache=False,
)
model = LlamaForCausalLM(config).to("tpu")
call = torch.compile(model) if mode == "compile" else model
ids = torch.randint(0, 256, (2, 32)).to("tpu")
torch.tpu.synchronize()

def step():
    start, processor = time.perf_counter(), time.process_time()
    loss = call(input_ids=ids, labels=ids).loss
    loss.backward()
    recorded = time.perf_counter() - start
    loss.item()
    model.zero_grad()
    return recorded, time.perf_counter() - start, time.process_time() - processor

first = step()
stats = torch.tpu.compile_stats()
later = [step() for _ in range(3)]
print(json.dumps({
    "layers": layers, "mode": mode, "first": first[1], "first_processor": first[2],
    "compile": stats["compile_seconds"], "compile_processor": stats["compile_processor_seconds"],
    "compiles": stats["compiles"], "record": min(r for r, *_ in later), "later": min(t for _, t, _ in later),
}))
"""


def measure(depths: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """One process for each depth and mode, taking turns, nothing taken from disk; the least of each figure."""
    environment = os.environ | {"TORCHTPU_CACHE_LIMIT": "0", "TORCHTPU_PLATFORM": "cpu"}
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for _ in range(repeats):
        for depth in depths:
            for mode in MODES:
                command = [sys.executable, "-c", _PROGRAM, str(depth), mode]
                done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                row = json.loads(done.stdout.splitlines()[-1])
                print(row, file=sys.stderr, flush=True)
                known = rows.setdefault((depth, mode), row)
                known.update({k: min(v, known[k]) for k, v in row.items() if k != "mode"})
    return list(rows.values())


def ratios(rows: Sequence[dict[str, Any]], low: int = 4, high: int = 32) -> dict[str, dict[str, float]]:
    """By mode, the figures of one depth over those of another."""
    at = {(r["layers"], r["mode"]): r for r in rows}
    keys = ("compile", "compile_processor", "first", "first_processor")
    return {
        mode: {k: round(at[high, mode][k] / at[low, mode][k], 3) for k in keys}
        for mode in MODES
        if (low, mode) in at and (high, mode) in at
    }


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """The curves as SVG: seconds to compile and milliseconds to record a step, by layers."""
    width, height, left, bottom = 640, 320, 60, 40
    most = max(r["layers"] for r in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    for n, (mode, name) in enumerate(MODES.items()):
        found = ratios(rows).get(mode)
        text = name + (f": 32 layers compile in {found['compile']:.2g} times the time of 4" if found else "")
        parts.append(f'<text x="{left}" y="{16 + 16 * n}" fill="{_COLOURS[mode]}">{text}</text>')
    for n, (key, title, scale) in enumerate((("compile", "compile, s", 1.0), ("record", "enqueue a step, ms", 1e3))):
        x0, span, top = left + n * width // 2, width // 2 - left - 20, 64
        largest = max(r[key] for r in rows) * scale
        parts.append(f'<text x="{x0}" y="{top - 12}" fill="#222">{title}</text>')
        parts.append(f'<path d="M{x0},{top} V{height - bottom} H{x0 + span}" fill="none" stroke="#888"/>')
        for mode, colour in _COLOURS.items():
            at = [
                (
                    x0 + span * r["layers"] / most,
                    height - bottom - (height - bottom - top - 16) * r[key] * scale / largest,
                )
                for r in rows
                if r["mode"] == mode
            ]
            values = [r[key] * scale for r in rows if r["mode"] == mode]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
            parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
            for (x, y), value in zip(at, values, strict=True):
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
                parts.append(
                    f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle" fill="{colour}">{value:.3g}</text>'
                )
        for layers in dict.fromkeys(r["layers"] for r in rows):
            x = x0 + span * layers / most
            parts.append(
                f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle" fill="#555">{layers}</text>'
            )
        parts.append(f'<text x="{x0 + span / 2}" y="{height - 6}" text-anchor="middle" fill="#555">layers</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, help="numbers of layers")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each depth and mode")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of depth.json")
    parser.add_argument(
        "--picture", type=Path, default=Path(__file__).parents[1] / "docs/images/compile-depth.svg", help="the picture"
    )
    options = parser.parse_args()
    rows = measure(options.depths, options.repeats)
    found = ratios(rows)
    print(json.dumps(found), file=sys.stderr)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "depth.json").write_text(
        json.dumps({"32 layers / 4 layers": found, "rows": rows}, indent=1) + "\n"
    )
    options.picture.write_text(draw(rows))


if __name__ == "__main__":
    main()
