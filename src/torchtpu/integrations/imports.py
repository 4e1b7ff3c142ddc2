"""Run a function once a module has been imported, without importing it: most programs never need it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["when_imported"]


def when_imported(name: str, function: Callable[[ModuleType], None]) -> None:
    """Call ``function`` with the module now if it has been imported, else as soon as it has run."""
    if name in sys.modules:
        function(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, function))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, through the other finders, and passes it on once it has run."""

    def __init__(self, name: str, function: Callable[[ModuleType], None]) -> None:
        self.name, self.function = name, function

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self.function(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
