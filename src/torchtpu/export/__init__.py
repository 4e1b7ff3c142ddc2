"""Packages: a model as one file that runs without its Python code, in PyTorch and in plain JAX (docs/export.md).

Example::

    torchtpu.export.save(model, "model.tpk", (x,))
    program = torchtpu.export.load("model.tpk")
    y = program(x)
"""

from torchtpu.export.load import Program, load
from torchtpu.export.package import ExportError, PackageError
from torchtpu.export.save import save

__all__ = ["ExportError", "PackageError", "Program", "load", "save"]
