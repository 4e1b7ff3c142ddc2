"""From what the user wrote to a model: factories, folders, names; and what is said when there is none."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchtpu import zoo

MODELS = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, x, target=None):
        for layer in self.layers:
            x = layer(x) * self.scale
        return {"loss": (x - target).square().mean()} if target is not None else x

def plain():
    return Net()

def with_arguments():
    return Net(), (torch.ones(5, 4), torch.zeros(5, 4))

def with_names():
    return Net(), {"x": torch.ones(5, 4)}

def raises():
    return Net().no_such_attribute

def text():
    return "a model"

number = 3
"""
OFFERS = """
import torch

def small():
    return torch.nn.Linear(4, 4)

def example_inputs(batch, seq, kind):
    return {"input": torch.randn(batch, 1 if kind == "decode" else seq, 4)}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a few modules of the user's in it."""
    (tmp_path / "pack_of_mine").mkdir()
    for name, text in {
        "models_of_mine.py": MODELS,
        "offers_of_mine.py": OFFERS,
        "broken_of_mine.py": "import no_such_dependency",
        "pack_of_mine/__init__.py": "",
        "pack_of_mine/inner.py": MODELS,
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0].endswith("_of_mine")]:
        del sys.modules[name]


@pytest.mark.parametrize("text", ["models_of_mine:plain", "models_of_mine:Net", "pack_of_mine.inner:plain"])
def test_factory(text: str) -> None:
    source = zoo.resolve(text)
    model = source.build("meta", torch.bfloat16)
    assert all(x.is_meta for x in [*model.parameters(), *model.buffers()])
    assert next(model.parameters()).dtype == torch.bfloat16
    assert source.layers(model) == ["layers"]
    assert source.published_parameters is None and source.tiny() is source
    real = source.build("cpu", seed=3)
    assert torch.equal(real.layers[0].weight, source.build("cpu", seed=3).layers[0].weight)
    assert real.scale == 2


def test_inputs_of_a_factory() -> None:
    source = zoo.resolve("models_of_mine:with_arguments")
    inputs = source.example_inputs("train", 1, 1)
    assert {name: x.shape for name, x in inputs.items()} == {"x": (5, 4), "target": (5, 4)}
    assert source.loss(source.build("cpu")(**inputs)).dim() == 0
    assert source.units("train", 1, 1) == zoo.Units(5, "samples", 5)
    named = zoo.resolve("models_of_mine:with_names")
    half = named.example_inputs("infer", 1, 1, "meta", torch.bfloat16)
    assert half["x"].is_meta and half["x"].dtype == torch.bfloat16
    with pytest.raises(zoo.ModelError, match="returns no loss: return a scalar"):
        named.loss(named.build("cpu")(**named.example_inputs("infer", 1, 1)))
    with pytest.raises(zoo.ModelError, match="no decode step that is known"):
        named.example_inputs("decode", 1, 1)


def test_a_module_may_offer_inputs() -> None:
    source = zoo.resolve("offers_of_mine:small")
    assert source.example_inputs("infer", 2, 7)["input"].shape == (2, 7, 4)
    assert source.example_inputs("decode", 2, 7, "meta")["input"].shape == (2, 1, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modles_of_mine:plain", "there is no module 'modles_of_mine'; the current folder .* has models_of_mine,"),
        ("pack_of_mine.iner:plain", r"there is no module 'pack_of_mine\.iner'; pack_of_mine has inner$"),
        ("models_of_mine.sub:plain", "models_of_mine is not a package"),
        ("models_of_mine:plian", "models_of_mine has no 'plian'; it has plain, .*with_arguments"),
        ("models_of_mine:number", "is an object of type int, not a function"),
        ("models_of_mine:", "is written module:factory"),
        ("llama3-8", r"no model is called 'llama3-8'; did you mean llama3-8b\? \(the zoo has bert-base, deepseek-v3"),
        ("meta-llama/Llama-3-8B", "is not a folder; nothing is downloaded"),
    ],
)
def test_what_is_not_there(text: str, message: str) -> None:
    with pytest.raises(zoo.ModelError, match=message) as caught:
        zoo.resolve(text)
    assert not caught.value.traceback


def test_a_factory_that_raises_shows_where() -> None:
    source = zoo.resolve("models_of_mine:raises")
    with pytest.raises(zoo.ModelError, match=r"^models_of_mine:raises raised AttributeError$") as caught:
        source.build("cpu")
    shown = caught.value.traceback
    assert "return Net().no_such_attribute" in shown and "has no attribute 'no_such_attribute'" in shown
    assert "torchtpu" not in shown.replace(str(Path.cwd()), "")
    with pytest.raises(zoo.ModelError, match="meta device, which have no values"):
        source.build("meta")
    with pytest.raises(zoo.ModelError, match="importing broken_of_mine raised ModuleNotFoundError") as caught:
        zoo.resolve("broken_of_mine:plain")
    assert "import no_such_dependency" in caught.value.traceback


def test_a_factory_that_returns_no_module() -> None:
    with pytest.raises(zoo.ModelError, match=r"returned an object of type str: it must return an nn\.Module"):
        zoo.resolve("models_of_mine:text").build("cpu")
    with pytest.raises(zoo.ModelError, match=r"gives no inputs: return \(model, inputs\)"):
        zoo.resolve("models_of_mine:plain").example_inputs("infer", 1, 1)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


@pytest.mark.parametrize(
    ("architectures", "expected"),
    [
        (["LlamaForCausalLM"], "LlamaForCausalLM"),
        (["LlamaForSequenceClassification"], "LlamaForSequenceClassification"),
        (None, "LlamaForCausalLM"),
    ],
)
def test_folder(folder: Path, architectures: list[str] | None, expected: str) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": architectures, "pad_token_id": 0}))
    source = zoo.resolve(str(folder))
    assert type(source.build("meta")).__name__ == expected
    small = source.tiny()
    model = small.build("cpu", torch.float32).eval()
    assert type(model).__name__ == expected
    assert small.loss(model(**small.example_inputs("train", 2, 8))).isfinite()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no config.json that can be read"),
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ("{}", "has no model_type"),
        (json.dumps(CONFIG | {"model_type": "no_such"}), "has no model_type 'no_such'"),
        (json.dumps(CONFIG | {"architectures": ["MyOwn"]}), "has no class 'MyOwn'.*write module:factory"),
    ],
)
def test_wrong_folder(folder: Path, text: str | None, message: str) -> None:
    if text is not None:
        (folder / "config.json").write_text(text)
    with pytest.raises(zoo.ModelError, match=message):
        zoo.resolve(str(folder))
