"""Compile for a TPU that is not there: libtpu needs a topology's name, not its chips.

Example::

    result = compile_for(lambda x: x @ x, [jax.ShapeDtypeStruct((128, 128), "float32")], "v6e:2x2")
    assert result.ok, result.message

``Compiler`` is the same for StableHLO text, with a life time of its own.

How fast a program could be is told by ``count.count`` (operations and bytes of a jaxpr), ``hlo.read_hlo`` (what the
compiler made of it), ``chips.CHIPS`` with ``Topology`` (the machine) and ``roofline.predict`` (the three together).
"""

from torchtpu.aot.compile import Compiler, Result, compile_for, lower_for_tpu
from torchtpu.aot.topology import TOPOLOGIES, Topology, libtpu_missing, standard_topologies

__all__ = [
    "TOPOLOGIES",
    "Compiler",
    "Result",
    "Topology",
    "compile_for",
    "libtpu_missing",
    "lower_for_tpu",
    "standard_topologies",
]
