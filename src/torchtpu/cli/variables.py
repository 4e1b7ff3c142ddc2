"""The environment variables that decide how the device runs, and what each means."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VARIABLES", "Variable"]


@dataclass(frozen=True)
class Variable:
    """An environment variable.

    Attributes:
        name: as in the environment.
        default: what holds when it is not set.
        meaning: one sentence.
    """

    name: str
    default: str
    meaning: str


VARIABLES = (
    Variable(
        "TORCHTPU_PLATFORM",
        "automatic",
        "`tpu`, or `cpu` for XLA:CPU; by default a TPU if one is attached and libtpu is installed, else XLA:CPU with "
        "one notice. `cpu` also makes `torch.tpu.is_available()` true and the device the current accelerator.",
    ),
    Variable(
        "TORCHTPU_CPU_DEVICES",
        "1",
        "How many devices XLA:CPU pretends to be: `8` gives `tpu:0` to `tpu:7` in one process.",
    ),
    Variable(
        "TORCHTPU_EAGER_MODE",
        "fused",
        "`fused` records operators and runs them together; `strict` enqueues every operator without waiting; `debug` "
        "waits for each, so an error surfaces on the line that caused it.",
    ),
    Variable(
        "TORCHTPU_BUCKETS",
        "powers",
        "Which sizes `torch.compile` compiles for where a size changes: `powers` of two, `exact` for a program for "
        "each size, or sizes such as `128,512,2048`.",
    ),
    Variable(
        "TORCHTPU_CACHE_DIR",
        "~/.cache/torchtpu",
        "Where the C++ extension, built once for the installed torch, and compiled programs are kept.",
    ),
    Variable(
        "TORCHTPU_CACHE_LIMIT",
        "2048",
        "MiB of compiled programs kept on disk for later processes; the least recently used go first. `0` keeps none.",
    ),
    Variable(
        "TORCHTPU_REPEATS",
        "1",
        "Blocks that repeat in a program, such as a decoder's layers, are compiled once; `0` compiles programs whole.",
    ),
    Variable(
        "TORCHTPU_COLLECTIVES",
        "automatic",
        "How `torch.distributed` moves values between processes: `xla` for XLA programs between the devices (a TPU's "
        "own network), `host` for the hosts' memories; by default `xla` on a TPU and `host` on XLA:CPU.",
    ),
    Variable(
        "TORCHTPU_SPMD_TIMEOUT",
        "600",
        "Seconds that the processes of a mesh over several hosts (`torchtpu.spmd`) wait for each other before it is an "
        "error.",
    ),
    Variable(
        "TORCHTPU_COLLECTIVES_CHECK",
        "0",
        "`1` compares what the ranks call before each XLA collective, so that ranks that disagree learn of it at once.",
    ),
    Variable(
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        "1",
        "PyTorch's own: `0` stops `import torch` from loading device backends; `import torchtpu` still does.",
    ),
    Variable(
        "JAX_PLATFORMS",
        "automatic",
        "JAX's own: platforms it may start. Without `tpu` in it the device runs on XLA:CPU.",
    ),
    Variable("XLA_FLAGS", "none", "XLA's own compiler flags, such as `--xla_dump_to=FOLDER`."),
    Variable("TPU_VISIBLE_CHIPS", "all", "libtpu's own: which of the attached chips this process uses, such as `0,1`."),
    Variable("CXX", "c++", "The compiler that builds the C++ extension."),
)
"""In the order in which they are shown."""
