"""Models by name: what ``torchtpu check MODEL`` and other commands take as MODEL.

Example::

    source = resolve("llama3-8b")           # or "package.module:factory", or a folder with a config.json
    model = source.build("meta", torch.bfloat16)
    inputs = source.example_inputs("train", batch=1, seq=4096, device="meta")
    small = source.tiny().build("cpu", torch.float32, seed=0)

Nothing is downloaded: the zoo's models are built from their published dimensions (``data/NAME.json``).
"""

from torchtpu.zoo.resolve import names, resolve
from torchtpu.zoo.source import KINDS, ModelError, ModelSource, Published, Units, count_parameters, repeated_layers

__all__ = [
    "KINDS",
    "ModelError",
    "ModelSource",
    "Published",
    "Units",
    "count_parameters",
    "names",
    "repeated_layers",
    "resolve",
]
