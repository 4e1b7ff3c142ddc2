"""What each operator means: aten overload -> a function on JAX arrays. The only place that knows.

``families/`` has one file per operator family. ``apply`` runs an operator: its lowering, or else PyTorch's own
decomposition
into operators that have one.
"""

from torchtpu.lowering.registry import Lowering, find, lowering, overloads

__all__ = ["Lowering", "find", "lowering", "overloads"]
