"""What only a fresh process shows: autoload, start of the runtime, forking, several devices, building."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from processes import SOURCE, run


def test_import_does_not_import_jax_and_prints_nothing():
    done = run(
        "import sys, torch, torchtpu\n"
        "torch.manual_seed(0); torch.tpu.device_count(); torch.tpu.is_available(); torch.tpu.current_device()\n"
        "torch.empty(2).pin_memory(); torch.Generator('tpu'); torch.tpu.Stream(); torch.tpu.synchronize()\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "assert 'jax' not in sys.modules and not torch.tpu.is_initialized()\n"
    )
    assert done.stdout == done.stderr == ""


def test_notice_is_printed_once_and_only_without_the_variable():
    program = "import torch, torchtpu; torch.empty(1, device='tpu'); torch.empty(1, device='tpu')"
    assert run(program).stderr == ""
    done = run(program, TORCHTPU_PLATFORM=None)
    assert done.stderr.count("XLA:CPU") == 1 and done.stderr.count("\n") == 1


def test_availability_is_the_truth():
    program = "import torch, torchtpu; print(torch.tpu.is_available())"
    assert run(program).stdout == "True\n"
    for platform in (None, "tpu"):
        from torchtpu.runtime import hardware

        assert run(program, TORCHTPU_PLATFORM=platform).stdout == f"{bool(hardware.tpu_chips())}\n"


def test_a_wrong_platform_is_a_clear_error():
    done = run("import torch, torchtpu; torch.empty(1, device='tpu')", check=False, TORCHTPU_PLATFORM="gpu")
    assert "TORCHTPU_PLATFORM must be 'cpu' or 'tpu'" in done.stderr


def test_eight_devices():
    run(
        "import torch, torchtpu\n"
        "assert torch.tpu.device_count() == 8\n"
        "xs = [torch.empty(4, device=f'tpu:{i}') for i in range(8)]\n"
        "assert [x.device.index for x in xs] == list(range(8)) and torch.tpu.device_count() == 8\n"
        "import jax; assert jax.local_device_count('cpu') == 8\n"
        "from torchtpu.runtime import devices\n"
        "assert devices.device(7) == jax.local_devices(backend='cpu')[7]\n",
        TORCHTPU_CPU_DEVICES="8",
    )


def test_too_late_for_more_devices():
    done = run(
        "import jax; jax.devices(); import torch, torchtpu; torch.empty(1, device='tpu')",
        check=False,
        TORCHTPU_CPU_DEVICES="3",
    )
    assert "already started JAX with 1 CPU device(s)" in done.stderr


def test_a_failed_start_can_be_retried():
    run(
        "import os, torch, torchtpu\n"
        "try: torch.empty(1, device='tpu')\n"
        "except ValueError as error: assert 'TORCHTPU_CPU_DEVICES must be' in str(error)\n"
        "else: raise SystemExit(1)\n"
        "os.environ['TORCHTPU_CPU_DEVICES'] = '2'\n"
        "assert torch.empty(1, device='tpu:1').device.index == 1\n",
        TORCHTPU_CPU_DEVICES="none",
    )


def test_the_users_jax_settings_stay():
    run(
        "import jax, torch, torchtpu\n"
        "before = jax.config.jax_enable_x64, jax.config.jax_default_device\n"
        "torch.empty(1, device='tpu')\n"
        "assert (jax.config.jax_enable_x64, jax.config.jax_default_device) == before\n"
    )


FORK = """
import os, sys, warnings
warnings.simplefilter("error", RuntimeWarning)
import torch, torchtpu
x = torch.empty(3, device="tpu")
pid = os.fork()
if pid == 0:
    try:
        torch.empty(3, device="tpu")
    except RuntimeError as error:
        ok = "Cannot re-initialize the tpu device in a forked subprocess; use the 'spawn' start method" in str(error)
    else:
        ok = False
    try:
        torch.tpu.synchronize()
        ok = False
    except RuntimeError:
        pass
    ok = ok and torch.tpu._is_in_bad_fork() and not torch.tpu.is_initialized()
    torch.manual_seed(0)
    del x
    sys.exit(0 if ok else 1)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
torch.empty(3, device="tpu")
"""


def test_a_forked_child_says_what_to_do():
    run(FORK)


def test_a_child_forked_before_the_first_use_works():
    run(
        "import os, torch, torchtpu\n"
        "pid = os.fork()\n"
        "x = torch.empty(3, device='tpu')\n"
        "if pid: assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0\n"
    )


def test_tensors_alive_at_exit():
    assert run("import torch, torchtpu, builtins; builtins.x = torch.empty(3, device='tpu')").stderr == ""


def test_google_torch_tpu_is_recognised(tmp_path):
    folder = tmp_path / "torch_tpu-0.2.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torch-tpu\nVersion: 0.2.0\n")
    done = run("import torch, torchtpu", check=False, PYTHONPATH=f"{SOURCE}:{tmp_path}")
    assert done.returncode != 0 and "Google's torch-tpu 0.2.0 is installed" in done.stderr.splitlines()[-1]


# ---- autoload: the entry point, without needing the package to be installed -----------------------------------------


@pytest.fixture
def installed(tmp_path):
    """A path on which the distribution looks installed, with its entry point."""
    folder = tmp_path / "torchtpu-0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: torchtpu\nVersion: 0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\ntorchtpu = torchtpu._autoload:load\n")
    if any(e.value.startswith("torchtpu") for e in metadata.entry_points(group="torch.backends")):
        return str(SOURCE)
    return f"{SOURCE}:{tmp_path}"


def test_import_torch_registers(installed):
    done = run(
        "import sys, torch\nassert torch.empty(2, device='tpu').is_tpu\nassert torch.tpu.is_available()",
        PYTHONPATH=installed,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )
    assert done.stderr == ""


def test_import_torchtpu_first(installed):
    run(
        "import torchtpu, torch; torch.empty(2, device='tpu')",
        PYTHONPATH=installed,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )


DECLINED = """
import sys
from importlib.machinery import PathFinder
class Hardware:  # pretend that CUDA can be used
    def find_spec(self, name, path=None, target=None):
        if name != "torchtpu.runtime.hardware":
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module
        def patched(module):
            execute(module)
            module.other_accelerator = lambda root="/": "cuda"
        spec.loader.exec_module = patched
        return spec
sys.meta_path.insert(0, Hardware())
import torch
assert not hasattr(torch, "tpu") and torch._C._get_privateuse1_backend_name() == "privateuseone"
assert not [name for name in sys.modules if name.startswith("torchtpu")]
import torchtpu
assert torch.empty(2, device="tpu").is_tpu and torchtpu.runtime.devices
"""


def test_another_accelerator_is_not_hijacked(installed):
    run(
        DECLINED,
        PYTHONPATH=installed,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        TORCHTPU_PLATFORM=None,
    )


def test_a_failing_build_does_not_break_import_torch(installed, tmp_path):
    nowhere = {"TORCHTPU_CACHE_DIR": str(tmp_path / "cache"), "CXX": "no-such-compiler"}
    program = "import torch\nassert not hasattr(torch, 'tpu')"
    done = run(program, PYTHONPATH=installed, TORCH_DEVICE_BACKEND_AUTOLOAD="1", **nowhere)
    assert done.stderr.count("found no C++ compiler") == 1
    done = run(
        program + "\nimport torchtpu", check=False, PYTHONPATH=installed, TORCH_DEVICE_BACKEND_AUTOLOAD="1", **nowhere
    )
    assert "BuildError" in done.stderr.splitlines()[-1] and "apt-get install g++" in done.stderr


def test_the_name_others_import():
    run("import torch_tpu._loader as loader; loader.load(); import torch; torch.empty(1, device='tpu')")


def test_concurrent_first_uses_share_one_build(tmp_path):
    from torchtpu import _build

    program = (
        "import os, sys, pathlib\nfrom torchtpu_build import build\n"
        "def compile(folder, environment):\n"
        "    import time; time.sleep(0.5); (folder / '_C.so').write_text('x')\n"
        "    with open(sys.argv[1] + '.count', 'a') as f: f.write('built\\n')\n"
        "import torchtpu_build; torchtpu_build._compile = compile\n"
        "build(pathlib.Path(sys.argv[1]))\n"
    )
    (tmp_path / "torchtpu_build.py").write_text(Path(_build.__file__).read_text())
    target = tmp_path / "cache" / "_C.so"
    jobs = [
        subprocess.Popen([sys.executable, "-c", program, str(target)], cwd=tmp_path, stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    messages = b"".join(job.communicate(timeout=120)[1] for job in jobs)
    assert [job.returncode for job in jobs] == [0, 0], messages
    assert target.read_text() == "x"
    assert (tmp_path / "cache" / "_C.so.count").read_text() == "built\n"
    assert messages.count(b"building the C++ extension") == 1


@pytest.mark.parametrize("version", ["2.12.1", "2.16.0", "1.13.1+cu117", "2.16.0a0+git1"])
def test_unsupported_torch_is_refused(version):
    from torchtpu import _build

    with pytest.raises(_build.BuildError, match=r"supports torch 2\.13 to 2\.15"):
        _build.check_torch(version)


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.14.1", "2.15.0.dev20260101"])
def test_supported_torch_is_accepted(version):
    from torchtpu import _build

    _build.check_torch(version)


def test_threads_start_the_runtime_once():
    done = run(
        "import json, threading, torch, torchtpu\n"
        "from torchtpu.runtime import devices\n"
        "starts, out = [], []\n"
        "devices.at_start(lambda: starts.append(1))\n"
        "def make(): out.append(str(torch.empty(1, device='tpu').device))\n"
        "ts = [threading.Thread(target=make) for _ in range(8)]\n"
        "[t.start() for t in ts]; [t.join() for t in ts]\n"
        "print(json.dumps([starts, out]))\n"
    )
    assert json.loads(done.stdout) == [[1], ["tpu:0"] * 8]
