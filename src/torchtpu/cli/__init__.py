"""The command line: ``torchtpu check``, ``torchtpu demo`` and ``torchtpu doctor``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import torchtpu
from torchtpu.cli import check, demo, doctor
from torchtpu.cli.errors import CommandError

__all__ = ["CommandError", "main"]


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(prog="torchtpu", description="PyTorch on TPUs: check the installation, see it work.")
    top.add_argument("--version", action="version", version=f"torchtpu {torchtpu.__version__}")
    commands = top.add_subparsers(title="commands", dest="command", required=True, metavar="COMMAND")
    for module in (check, demo, doctor):
        module.add_command(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: without the program's name; those of the process by default.

    Returns:
        The exit status: 0, 1 when the command found a problem, 130 after Ctrl-C.
    """
    options = parser().parse_args(arguments)
    try:
        status = options.run(options)
        sys.stdout.flush()
    except CommandError as error:
        print(f"torchtpu {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader has gone (`torchtpu demo | head`). Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("\ntorchtpu: interrupted", file=sys.stderr)
        return 130
    return status
