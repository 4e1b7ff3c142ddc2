"""Run ``torchtpu demo`` and ``torchtpu check`` and draw what they print as docs/images/demo.svg and check.svg.

``python docs/render_demo.py [demo | check]``; check needs libtpu.
"""

from __future__ import annotations

import html
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
LINE, CHARACTER, MARGIN, BAR = 19, 8.05, 20, 30


def draw(command: str, output: str) -> str:
    """A terminal window with a command and its output, as SVG text."""
    lines = [f"$ {command}", *output.rstrip().splitlines()]
    width = round(max(len(line) for line in lines) * CHARACTER + 2 * MARGIN)
    height = BAR + LINE * len(lines) + 2 * MARGIN
    rows = []
    for number, line in enumerate(lines):
        colour = "#8be9a8" if number == 0 else "#ffd479" if line.startswith("largest difference") else "#e6e6e6"
        y = BAR + MARGIN + LINE * number + 10
        rows.append(f'<text x="{MARGIN}" y="{y}" fill="{colour}" xml:space="preserve">{html.escape(line)}</text>')
    dots = "".join(
        f'<circle cx="{18 + 20 * i}" cy="{BAR / 2:g}" r="6" fill="{c}"/>'
        for i, c in enumerate(("#ff5f56", "#ffbd2e", "#27c93f"))
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
            'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="13.4">',
            f"<title>Output of {html.escape(command)}</title>",
            f'<rect width="{width}" height="{height}" rx="8" fill="#1d1f27"/>',
            dots,
            *rows,
            "</svg>",
            "",
        ]
    )


COMMANDS = {
    "demo": ["demo"],
    "check": ["check", "gpt2", "--infer", "--topology", "v6e:2x2", "--batch", "64", "--seq", "1024", "--shard", "dp"],
}


def main() -> None:
    for name in sys.argv[1:] or COMMANDS:
        done = subprocess.run(
            [sys.executable, "-m", "torchtpu.cli", *COMMANDS[name]],
            env=os.environ | {"TORCHTPU_PLATFORM": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        output = done.stdout.split("WHAT THIS RESTS ON")[0]
        (IMAGES / f"{name}.svg").write_text(draw(f"torchtpu {' '.join(COMMANDS[name])}", output))


if __name__ == "__main__":
    main()
