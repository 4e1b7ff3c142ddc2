"""Transformers' Trainer takes the device by itself and trains as on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
                                     num_key_value_heads=1, vocab_size=64))
rows = torch.randint(0, 64, (12, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": r, "labels": r} for r in rows]
arguments = TrainingArguments(sys.argv[1], max_steps=4, per_device_train_batch_size=3, learning_rate=1e-2,
                              logging_steps=1, report_to=[], seed=0, save_steps=2, disable_tqdm=True,
                              use_cpu=len(sys.argv) > 2, gradient_checkpointing=True, lr_scheduler_type="cosine")
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4])
trainer.train()
losses = [h["loss"] for h in trainer.state.log_history if "loss" in h]
losses.append(trainer.evaluate()["eval_loss"])
print("RESULT", next(model.parameters()).device, *losses)
"""


def run(*arguments: str) -> tuple[str, list[float]]:
    done = subprocess.run(
        [sys.executable, "-c", CODE, *arguments],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    device, *losses = next(line for line in done.stdout.splitlines() if line.startswith("RESULT")).split()[1:]
    return device, [float(x) for x in losses]


def test_trainer_uses_the_device(tmp_path):
    device, losses = run(str(tmp_path / "tpu"))
    assert device == "tpu:0"
    expected_device, expected = run(str(tmp_path / "cpu"), "cpu")
    assert expected_device == "cpu"
    assert len(losses) == 5
    assert all(abs(a - b) < 2e-3 for a, b in zip(losses, expected, strict=True)), (losses, expected)
    assert (tmp_path / "tpu" / "checkpoint-4" / "optimizer.pt").exists()
