"""The C++ extension, built at first use from ``csrc``: a type checker never sees the module itself."""

from typing import Any

def __getattr__(name: str) -> Any: ...
