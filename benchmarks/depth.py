"""``python -m benchmarks.depth``: what one more decoder layer costs in recording, tracing and compiling.

Times the first and a later forward and backward pass of Llamas of 4 to 64 layers, writes ``depth.json`` and a picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

DEPTHS = (4, 8, 16, 32, 64)
_PROGRAM = """
import json, sys, time
import torch, torchtpu
from transformers import LlamaConfig, LlamaForCausalLM

torch.tpu.init()
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=int(sys.argv[1]), num_attention_heads=4,
    num_key_value_heads=2, vocab_size=256, use_cache=False,
)
model = LlamaForCausalLM(config).to("tpu")
ids = torch.randint(0, 256, (2, 32)).to("tpu")
torch.tpu.synchronize()

def step():
    start = time.perf_counter()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    recorded = time.perf_counter() - start
    loss.item()
    model.zero_grad()
    return recorded, time.perf_counter() - start

first = step()
later = [step() for _ in range(3)]
stats = torch.tpu.compile_stats()
print(json.dumps({
    "layers": int(sys.argv[1]), "operators": stats["operators"] // stats["flushes"], "first": first[1],
    "compile": stats["compile_seconds"], "record": min(r for r, _ in later), "compiles": stats["compiles"],
}))
"""


def measure(depths: tuple[int, ...] = DEPTHS) -> list[dict[str, float]]:
    """One process for each depth, nothing taken from disk."""
    environment = os.environ | {"TORCHTPU_CACHE_LIMIT": "0", "TORCHTPU_PLATFORM": "cpu"}
    rows = []
    for depth in depths:
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(depth)], env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def draw(rows: list[dict[str, float]]) -> str:
    """The curves as SVG: seconds to compile, and milliseconds to record a step, by layers."""
    width, height, left, bottom = 640, 300, 60, 40
    most = max(r["layers"] for r in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
    ]
    panels = (("compile", "first compile, s", 1.0, "#1a5fb4"), ("record", "recording one step, ms", 1e3, "#c64600"))
    for n, (key, title, scale, colour) in enumerate(panels):
        x0, span = left + n * width // 2, width // 2 - left - 20
        top = max(r[key] for r in rows) * scale
        at = [
            (x0 + span * r["layers"] / most, height - bottom - (height - 2 * bottom) * r[key] * scale / top)
            for r in rows
        ]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in at)
        parts.append(f'<text x="{x0}" y="24" fill="#222">{title}</text>')
        parts.append(f'<path d="M{x0},{bottom} V{height - bottom} H{x0 + span}" fill="none" stroke="#888"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for (x, y), r in zip(at, rows, strict=True):
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>')
            parts.append(
                f'<text x="{x:.1f}" y="{y - 8:.1f}" text-anchor="middle" fill="#222">{r[key] * scale:.3g}</text>'
            )
            parts.append(
                f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle" fill="#555">{r["layers"]}</text>'
            )
        parts.append(f'<text x="{x0 + span / 2}" y="{height - 6}" text-anchor="middle" fill="#555">layers</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.depth", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results", help="folder of depth.json")
    parser.add_argument(
        "--picture", type=Path, default=Path(__file__).parents[1] / "docs/images/compile-depth.svg", help="the picture"
    )
    options = parser.parse_args()
    rows = measure()
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "depth.json").write_text(json.dumps(rows, indent=1) + "\n")
    options.picture.write_text(draw(rows))


if __name__ == "__main__":
    main()
