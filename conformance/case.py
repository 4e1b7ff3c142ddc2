"""A case is a function run on CPU inputs and on their copies on the device; a record is what became of an entry's
cases.
"""

from __future__ import annotations

import itertools
import time
import traceback
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from conformance.compare import Difference, Tolerance, compare, same_values
from conformance.tolerances import HOST_ARGUMENTS, host_reason
from conformance.transfer import copied, to_cpu, to_device, upcast

__all__ = ["Case", "Record", "run_cases"]


@dataclass
class Case:
    """One comparison.

    Attributes:
        label: where in the entry it belongs, for messages.
        run: the function of the inputs.
        inputs: a tree with CPU tensors.
        exact: compare values; False for random results.
        repeat: the result must repeat when the seed is set again.
        must_raise: where the CPU raises, so must the device; else such a case is not counted.
        reference: whether a double-precision run may judge low precision results.
    """

    label: str
    run: Callable[..., Any]
    inputs: tuple[Any, ...]
    exact: bool = True
    repeat: bool = False
    must_raise: bool = False
    reference: bool = True
    process: Callable[[Any], Any] | None = None


@dataclass
class Record:
    """The line that the results file holds for one (suite, entry, dtype)."""

    suite: str
    entry: str
    dtype: str
    status: str = "pass"
    cases: int = 0
    failed: int = 0
    skipped: int = 0
    by_reference: int = 0
    strides: int = 0
    seconds: float = 0.0
    error: str = ""
    where: str = ""
    stride: str = ""
    fallbacks: list[str] = field(default_factory=list)
    limit: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Plain values, without those that say nothing."""
        keep = ("suite", "entry", "dtype", "status", "cases", "seconds")
        return {k: v for k, v in asdict(self).items() if v or k in keep}


def _attempt(function: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Any, Exception | None]:
    torch.manual_seed(0)
    try:
        return function(*inputs), None
    except Exception as error:
        return None, error


def _moved(inputs: tuple[Any, ...], entry: str) -> tuple[Any, ...]:
    if entry in HOST_ARGUMENTS:
        return to_device(inputs[0]), *copied(inputs[1:])
    return to_device(inputs)


def _check(case: Case, record: Record, tolerance: Tolerance) -> None:
    """Run one case on both sides.

    Raises:
        Difference: the results differ.
        Exception: what the device raised where the CPU did not.
    """
    on_device = _moved(case.inputs, record.entry)
    again = to_device(case.inputs) if case.repeat else None
    untouched = copied(case.inputs)
    expected, cpu_error = _attempt(case.run, case.inputs)
    if cpu_error is not None:
        if case.must_raise and not isinstance(cpu_error, NotImplementedError):
            _check_error(case, on_device, cpu_error)
        else:
            record.skipped += 1
        return
    torch.manual_seed(0)
    actual = case.run(*on_device)
    to_cpu(actual)
    if again is not None:
        torch.manual_seed(0)
        compare(actual, to_cpu(case.run(*again)), {})

    def reference() -> Any:
        torch.manual_seed(0)
        result, error = _attempt(case.run, upcast(untouched))
        return None if error is not None else result

    def judge(x: Any, y: Any, give: Callable[[], Any] | None) -> None:
        verdict = compare(x, y, tolerance, give, case.exact)
        record.by_reference += verdict.by_reference
        record.strides += verdict.strides is not None
        record.stride = record.stride or verdict.strides or ""

    try:
        judge(actual, expected, reference if case.reference and case.exact else None)
    except Difference:
        if case.exact and _draws_numbers(case, expected, untouched):
            compare(actual, expected, tolerance, exact=False)
        elif case.process is not None:
            # What is unique only up to a phase or an order is compared through what PyTorch's gradient tests use of it.
            essence = case.process
            judge(essence(actual), essence(expected), lambda: _apply(essence, reference()))
        else:
            raise


def _apply(function: Callable[[Any], Any], value: Any) -> Any:
    return None if value is None else function(value)


def _draws_numbers(case: Case, expected: Any, untouched: Any) -> bool:
    """Whether the CPU gives something else with another seed."""
    for seed in range(1, 9):
        torch.manual_seed(seed)
        if not same_values(case.run(*copied(untouched)), expected):
            return True
    return False


def _check_error(case: Case, on_device: tuple[Any, ...], cpu_error: Exception) -> None:
    def run(*inputs: Any) -> None:
        to_cpu(case.run(*inputs))

    _, error = _attempt(run, on_device)
    if error is None:
        raise Difference(f"no error; the CPU raises {type(cpu_error).__name__}: {first_line(cpu_error)}")
    if not isinstance(error, type(cpu_error)):
        raise Difference(
            f"{type(error).__name__} ({first_line(error)}) for {type(cpu_error).__name__} ({first_line(cpu_error)})"
        )


def first_line(error: BaseException, length: int = 240) -> str:
    """The error's message on one line."""
    return " ".join(str(error).split())[:length]


def _origin(error: BaseException) -> str:
    """The innermost line of the package that raised, or nothing."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/torchtpu/" in f.filename]
    return f"{frames[-1].filename.rsplit('/torchtpu/', 1)[1]}:{frames[-1].lineno}" if frames else ""


def run_cases(record: Record, cases: Iterable[Case], tolerance: Tolerance, limit: int | None) -> Record:
    """Run an entry's cases and fill its record."""
    start = time.perf_counter()
    record.limit = limit or 0
    before = torch.tpu.fallbacks()
    first: Exception | None = None
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator = iter(itertools.islice(cases, limit))
        while True:
            try:
                case = next(iterator, None)
            except Exception as error:
                record.error = f"the database's generator: {type(error).__name__}: {first_line(error)}"
                break
            if case is None:
                break
            record.cases += 1
            try:
                _check(case, record, tolerance)
            except Exception as error:
                record.failed += 1
                refused += isinstance(error, NotImplementedError)
                if first is None:
                    first = error
                    record.error = f"{case.label}: {type(error).__name__}: {first_line(error)}"
                    record.where = _origin(error)
    after = torch.tpu.fallbacks()
    record.fallbacks = sorted(op for op, n in after.items() if n > before.get(op, 0))
    record.seconds = round(time.perf_counter() - start, 2)
    if record.failed:
        record.status = "unsupported" if refused == record.failed else "fail"
    elif record.fallbacks:
        record.status = "fallback"
    elif record.cases == record.skipped:
        record.status = "empty"
    elif host_reason(record.entry):
        record.status = "host"
    return record
