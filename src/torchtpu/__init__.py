"""TorchTPU: a native PyTorch backend for TPUs. Importing it makes ``"tpu"`` a device of PyTorch.

    import torch, torchtpu
    x = torch.ones(2, 3, device="tpu")

On a machine without a TPU the device runs on XLA:CPU. Usually not even the import is needed: with the package
installed, `import torch` registers the device where no other accelerator can be used.
"""

from torchtpu import _autoload

__version__ = "0.1.0"

_autoload.on_import()
