"""``torchtpu check``: whether a model compiles for a TPU, fits it, and how fast it could go, without a TPU."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtpu.cli.errors import CommandError
from torchtpu.cli.progress import progress

__all__ = ["add_command", "run"]

_DTYPES = ("bfloat16", "float32", "float16")


def add_command(commands: Any) -> None:
    """Add ``check`` and its options to the command line."""
    command = commands.add_parser(
        "check",
        help="compile a model for a TPU that is not there: does it fit, and how fast could it go",
        description="Build MODEL without weights, divide it by a plan, compile it with the TPU's own compiler for a "
        "topology, and report whether it compiles, whether it fits, how fast it could go and what wastes the chip. "
        "Exit status 1 if it does not compile or does not fit.",
        epilog="Examples: torchtpu check llama3-8b --topology v6e:2x2 --infer; "
        "torchtpu check mymodels.vision:build --topology v5e:2x4,tpu7x:2x2x1 --train --batch 64 --html report.html; "
        "torchtpu check ./my-config --topology v5p:4x4x4 --shard fsdp=16,tp=4",
    )
    command.add_argument(
        "model",
        metavar="MODEL",
        help="a name of the zoo (llama3-8b, qwen3-235b-a22b, …), module:factory, or a folder with a config.json",
    )
    command.add_argument(
        "--topology",
        default="v6e:2x2",
        metavar="T[,T…]",
        help="TPU generation and extent in chips, such as v5e:2x4, v6e:16x16 or tpu7x:4x4x8; several are compared; "
        "all: one host of each generation (default: %(default)s)",
    )
    kind = command.add_mutually_exclusive_group()
    for name, what in (
        ("train", "a training step: forward, backward, AdamW (default)"),
        ("infer", "a forward pass"),
        ("decode", "the next token, with a cache of --seq positions"),
    ):
        kind.add_argument(f"--{name}", dest="kind", action="store_const", const=name, help=what)
    command.add_argument(
        "--batch", type=_positive, metavar="B", help="samples of a step, all devices together (default: one a device)"
    )
    command.add_argument(
        "--seq", type=_positive, metavar="S", help="tokens of a sample (default: 2048; 32 with --parity)"
    )
    command.add_argument(
        "--shard",
        metavar="PLAN",
        help="axes with their sizes, such as fsdp=8,tp=2 (dp, fsdp, ep, tp); a JSON file; or auto, which compiles "
        "several plans and takes the fastest that fits (default: fsdp over all devices)",
    )
    command.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of the weights (default: %(default)s)")
    command.add_argument(
        "--remat",
        choices=("full", "dots", "none"),
        default="full",
        help="what training computes again in the backward pass: all of a layer, all but its matrix products, nothing "
        "(default: %(default)s)",
    )
    command.add_argument(
        "--tiny", action="store_true", help="the model with its dimensions cut down, to try things out"
    )
    command.add_argument(
        "--parity",
        action="store_true",
        help="run the model on the device and on PyTorch CPU, module by module, and say where they part",
    )
    command.add_argument(
        "--prove",
        type=_positive,
        metavar="N",
        help="run the plan on N emulated devices, with the model cut down, and compare with PyTorch CPU",
    )
    command.add_argument("--json", metavar="FILE", help="write the report as JSON too; - for standard output alone")
    command.add_argument("--html", metavar="FILE", help="write the report as a page with pictures too")
    command.add_argument(
        "--save", metavar="FOLDER", help="write the compiled executable there, for a TPU VM of the topology"
    )
    command.add_argument(
        "--timeout",
        type=_positive,
        default=3600,
        metavar="S",
        help="give a compile up after so long (default: %(default)s s)",
    )
    command.set_defaults(run=run, kind="train")


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be a positive whole number, not {text!r}")
    return value


def run(options: argparse.Namespace) -> int:
    """The command."""
    from torchtpu.zoo import ModelError, resolve

    try:
        source = resolve(options.model)
        if options.tiny:
            source = source.tiny()
        if options.prove:
            return _prove(source, options)
        return _parity(source, options) if options.parity else _check(source, options)
    except ModelError as error:
        if error.traceback:
            print(error.traceback, file=sys.stderr, end="")
        raise CommandError(str(error)) from error


def _check(source: Any, options: argparse.Namespace) -> int:
    import torch

    from torchtpu.aot import Topology, libtpu_missing
    from torchtpu.aot import check as checks
    from torchtpu.aot.compile import Compiler
    from torchtpu.aot.graph import GraphError
    from torchtpu.cli.check_html import page
    from torchtpu.cli.check_text import text
    from torchtpu.sharding import PlanError, parse

    missing = libtpu_missing()
    if missing:
        raise CommandError(missing)
    topologies = _topologies(options.topology, Topology)
    if options.save and len(topologies) > 1:
        raise CommandError("--save takes one topology")
    _on_cpu()
    folder = Path(options.save) if options.save else None
    reports = []
    traced: dict[int, Any] = {}
    try:
        plans = [None if options.shard == "auto" else parse(options.shard, t.devices) for t in topologies]
        with Compiler(options.timeout) as compiler:
            for topology, plan in zip(topologies, plans, strict=True):
                batch = options.batch or topology.devices
                if batch not in traced:
                    request = checks.Request(
                        source=source,
                        kind=options.kind,
                        batch=batch,
                        sequence=options.seq or 2048,
                        dtype=getattr(torch, options.dtype),
                        remat=options.remat,
                        timeout=options.timeout,
                    )
                    traced[batch] = checks.trace(request, progress)
                    given = traced[batch].request.batch
                    if options.batch and given != options.batch:
                        raise CommandError(
                            f"{source.name} has inputs of its own, with a batch of {given}, not {options.batch}: leave "
                            f"--batch out, or write example_inputs(batch, seq) beside the factory"
                        )
                function = checks.search if plan is None else checks.check
                arguments = (traced[batch], topology) if plan is None else (traced[batch], topology, plan)
                reports.append(function(*arguments, progress=progress, compiler=compiler, save=folder))
    except (PlanError, GraphError) as error:
        raise CommandError(str(error)) from error
    data = [r.to_json() for r in reports]
    content = json.dumps(data[0] if len(data) == 1 else data, indent=2)
    if options.json == "-":
        print(content)
    else:
        print(text(reports))
    for file, made in ((options.json, lambda: content), (options.html, lambda: page(reports))):
        if file and file != "-":
            _write(file, made())
    return 0 if all(r.status == "ok" for r in reports) else 1


def _topologies(text: str, kind: Any) -> Sequence[Any]:
    from torchtpu.aot import TOPOLOGIES

    names = list(TOPOLOGIES.values()) if text == "all" else [n for n in text.split(",") if n]
    try:
        return [kind.parse(name) for name in names]
    except ValueError as error:
        raise CommandError(str(error)) from error


def _on_cpu() -> None:
    """Lowering needs a JAX that runs somewhere; a TPU in this machine is left to whoever computes."""
    import jax

    with contextlib.suppress(RuntimeError):  # it runs already
        jax.config.update("jax_platforms", "cpu")


def _parity(source: Any, options: argparse.Namespace) -> int:
    from torchtpu.aot.parity import compare

    with progress(f"running {source.name} on the device and on PyTorch CPU"):
        found = compare(source, kind=options.kind, batch=options.batch or 2, seq=options.seq or 32, tiny=False)
    if options.json:
        _write(options.json, json.dumps(found.to_json(), indent=2))
    if options.json != "-":
        print(found.text())
    return 0 if found.ok else 1


def _prove(source: Any, options: argparse.Namespace) -> int:
    from torchtpu.aot.prove import emulate, prove
    from torchtpu.sharding import PlanError, parse

    emulate(options.prove)
    try:
        try:
            plan = parse(options.shard, options.prove)
        except PlanError:
            plan = parse(options.shard).scaled(options.prove)
        with progress(f"running {source.name} (tiny) on {options.prove} emulated devices and on PyTorch CPU"):
            proof = prove(source, plan, batch=options.batch or options.prove, seq=options.seq or 32)
    except PlanError as error:
        raise CommandError(str(error)) from error
    print(proof.text())
    return 0 if proof.ok else 1


def _write(file: str, content: str) -> None:
    if file == "-":
        print(content)
        return
    try:
        Path(file).write_text(content, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"cannot write {file}: {error.strerror}") from error
    print(f"wrote {file}", file=sys.stderr)
