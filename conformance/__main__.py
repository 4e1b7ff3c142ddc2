"""``python -m conformance run | report | worker``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="check the device against PyTorch CPU; resumes where it stopped")
    run.add_argument("--jobs", type=int, default=2, help="worker processes")
    run.add_argument("--only", default="", metavar="REGEX", help="entries whose name matches")
    run.add_argument("--dtypes", default="", help="comma-separated dtypes, such as float32,int64")
    run.add_argument("--suite", default="", help="comma-separated suites (default: all)")
    run.add_argument("--limit", type=int, default=0, metavar="N", help="cases of an entry and dtype (default: all)")
    run.add_argument("--results", type=Path, default=RESULTS, help="folder of the JSON-lines files, one a suite")
    run.add_argument("--redo", action="store_true", help="run again what is recorded")
    run.add_argument("--deepen", action="store_true", help="run again what is recorded with --limit")
    run.add_argument("--failed", action="store_true", help="run again what is recorded and did not pass")
    run.add_argument("--timeout", type=float, default=300, help="seconds for one entry and dtype")
    report = commands.add_parser("report", help="write docs/conformance.md, its picture and summary.json")
    report.add_argument("--results", type=Path, default=RESULTS)
    report.add_argument("--docs", type=Path, default=Path(__file__).parents[1] / "docs")
    commands.add_parser("worker", help="runs tasks from standard input; started by run")
    arguments = parser.parse_args()
    if arguments.command == "worker":
        from conformance.worker import serve

        return serve()
    if arguments.command == "run":
        from conformance.runner import run as run_all

        return run_all(arguments)
    from conformance.report import write

    return write(arguments.results, arguments.docs)


if __name__ == "__main__":
    sys.exit(main())
