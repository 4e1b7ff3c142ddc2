"""``torch_tpu._loader.load()``: what Ray calls in its workers before they use the device."""

from torchtpu._autoload import load

__all__ = ["load"]
