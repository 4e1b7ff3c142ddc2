"""Registration of the device with PyTorch, and the decision whether `import torch` does it.

PyTorch's accelerator interface prefers a registered "tpu" to CUDA, so `import torch` registers it only where that takes
nothing away: a TPU is there, TORCHTPU_PLATFORM asks for it, or no other accelerator can be used.
`import torchtpu` always does.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import warnings
from pathlib import Path

_explicit = False  # `import torchtpu` is under way or done
_registered = False


def load() -> None:
    """Entry point of the group ``torch.backends``: `import torch` calls it. Never breaks `import torch`."""
    if _explicit or _registered:
        return
    from torchtpu._build import BuildError

    try:
        if _wanted():
            register()
            return
    except BuildError as error:
        warnings.warn(f"the tpu device is not available: {error}", RuntimeWarning, stacklevel=2)
    # Leave no trace, so that a later `import torchtpu` runs anew, registers, and says what is wrong.
    for name in [name for name in sys.modules if name == "torchtpu" or name.startswith("torchtpu.")]:
        del sys.modules[name]


def on_import() -> None:
    """What `import torchtpu` does: register, unless it is `import torch` that is importing us; then load() decides."""
    global _explicit
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    if getattr(spec, "_initializing", False):
        return
    _explicit = True
    register()


def register() -> None:
    """Build or load the extension and make "tpu" a device of PyTorch. Idempotent.

    Raises:
        ImportError: if the name is taken: Google's torch-tpu is installed, or another backend has been registered.
        BuildError: if the extension cannot be built.
    """
    global _registered
    if _registered:
        return
    import torch

    _check_name_is_free()
    from torchtpu import _build

    extension = _build.load_extension()
    setattr(sys.modules["torchtpu"], "_C", extension)  # noqa: B010 - a type checker knows no such attribute
    from torchtpu import device
    from torchtpu.runtime import devices

    extension.set_callbacks(
        {
            "initialise": devices.initialise,
            "device_count": devices.count,
            "is_available": devices.is_available,
            "synchronize": devices.synchronize,
            "query": devices.query,
            "memory_info": devices.memory_info,
            "record_event": devices.Event,
            "query_event": devices.Event.query,
            "synchronize_event": devices.Event.synchronize,
            "elapsed_time": devices.Event.elapsed_time,
        }
    )
    libraries = torch, sys.modules["torchtpu"]
    extension.set_library_folders([str(Path(str(m.__file__)).parent) + os.sep for m in libraries])
    devices.at_start(_start)
    torch.utils.rename_privateuse1_backend("tpu")
    torch._register_device_module("tpu", device)
    torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
    from torchtpu import distributed

    distributed.register()
    devices.before_start(_join)
    from torchtpu.integrations import accelerate, dynamo, flex_attention

    for integration in (accelerate, dynamo, flex_attention):
        integration.install()
    _registered = True


def _join() -> None:
    """Before the client starts: become one of the processes of a job."""
    from torchtpu.runtime import processes

    if processes.job() is not None:
        from torchtpu.distributed import launch

        launch.join_at_start()


def _start() -> None:
    """With the runtime come the operators, and what Dynamo knows of the device if it is there already."""
    from torchtpu import eager

    eager.initialise()
    if "torch._dynamo.device_interface" in sys.modules:
        from torchtpu.device import dynamo

        dynamo.register()


def _wanted() -> bool:
    import torch

    from torchtpu.runtime import hardware

    if not (os.environ.get("TORCHTPU_PLATFORM") or hardware.tpu_chips() or hardware.other_accelerator() is None):
        return False
    if torch._C._get_privateuse1_backend_name() not in ("privateuseone", "tpu"):
        return False  # another backend came first, and the user has not asked for this one
    conflict = _google_torch_tpu()
    if conflict:
        warnings.warn(conflict, RuntimeWarning, stacklevel=2)
    return not conflict


def _google_torch_tpu() -> str | None:
    try:
        version = importlib.metadata.version("torch-tpu")
    except importlib.metadata.PackageNotFoundError:
        return None
    return (
        f"torchtpu does nothing because Google's torch-tpu {version} is installed and both provide the device 'tpu': "
        "uninstall one of them (pip uninstall torch-tpu, or pip uninstall torchtpu)"
    )


def _check_name_is_free() -> None:
    import torch

    conflict = _google_torch_tpu()
    if conflict:
        raise ImportError(conflict)
    name = torch._C._get_privateuse1_backend_name()
    if name != "privateuseone":
        raise ImportError(
            f"torchtpu cannot register the device 'tpu': another backend has registered '{name}' in PyTorch's only "
            "slot for backends outside its tree"
        )
