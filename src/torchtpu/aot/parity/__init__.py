"""Where a model's numbers on the device leave PyTorch CPU's: module by module, then operator by operator.

Example::

    from torchtpu import zoo
    from torchtpu.aot.parity import compare

    parity = compare(zoo.resolve("llama3-8b"), kind="train")
    print(parity.text())
    assert parity.ok

Each dtype is judged by a reference in a wider one on the CPU, with the same weights and inputs: the device may be
wrong by as much as PyTorch CPU is in that dtype, times ``measure.FACTOR``, and a unit of rounding.
"""

from torchtpu.aot.parity.compare import compare
from torchtpu.aot.parity.report import Culprit, ModuleRow, Parity, Run, TensorRow

__all__ = ["Culprit", "ModuleRow", "Parity", "Run", "TensorRow", "compare"]
