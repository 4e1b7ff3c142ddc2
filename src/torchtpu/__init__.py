"""TorchTPU: a native PyTorch backend for TPUs. Importing it makes ``"tpu"`` a device of PyTorch.

    import torch, torchtpu
    x = torch.ones(2, 3, device="tpu")

On a machine without a TPU the device runs on XLA:CPU. Usually not even the import is needed: with the package
installed, `import torch` registers the device where no other accelerator can be used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchtpu import _autoload

if TYPE_CHECKING:
    from torchtpu import export as export
    from torchtpu import spmd as spmd
    from torchtpu.compile.explain import explain as explain

__version__ = "0.1.0"

_autoload.on_import()


def __getattr__(name: str) -> Any:
    """Parts that import JAX, imported when they are first asked for."""
    if name == "export":
        import torchtpu.export

        return torchtpu.export
    if name == "spmd":
        import torchtpu.spmd

        return torchtpu.spmd
    if name == "explain":
        from torchtpu.compile.explain import explain

        return explain
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
