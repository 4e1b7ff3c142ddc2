"""Small models built from Transformers configs with a fixed seed, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

Batch = dict[str, torch.Tensor]
VOCAB = 96


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape)


def _text(model: Any) -> tuple[torch.nn.Module, Batch]:
    tokens = ids(2, 12)
    mask = torch.ones(2, 12, dtype=torch.int64)
    mask[1, 8:] = 0
    labels = tokens.masked_fill(mask == 0, -100)
    return model, {"input_ids": tokens, "attention_mask": mask, "labels": labels}


def llama() -> tuple[torch.nn.Module, Batch]:
    return _text(
        tf.LlamaForCausalLM(
            tf.LlamaConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                vocab_size=VOCAB,
            )
        )
    )


def qwen3() -> tuple[torch.nn.Module, Batch]:
    return _text(
        tf.Qwen3ForCausalLM(
            tf.Qwen3Config(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                vocab_size=VOCAB,
            )
        )
    )


def qwen3_moe() -> tuple[torch.nn.Module, Batch]:
    return _text(
        tf.Qwen3MoeForCausalLM(
            tf.Qwen3MoeConfig(
                hidden_size=32,
                intermediate_size=48,
                moe_intermediate_size=16,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                decoder_sparse_step=1,
                vocab_size=VOCAB,
                output_router_logits=True,
            )
        )
    )


def gpt2() -> tuple[torch.nn.Module, Batch]:
    return _text(
        tf.GPT2LMHeadModel(
            tf.GPT2Config(
                n_embd=32,
                n_layer=2,
                n_head=4,
                vocab_size=VOCAB,
                n_positions=32,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    )


def bert() -> tuple[torch.nn.Module, Batch]:
    return _text(
        tf.BertForMaskedLM(
            tf.BertConfig(
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                vocab_size=VOCAB,
                max_position_embeddings=32,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )
    )


def vit() -> tuple[torch.nn.Module, Batch]:
    model = tf.ViTForImageClassification(
        tf.ViTConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            image_size=16,
            patch_size=4,
            num_labels=5,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )
    return model, {"pixel_values": torch.randn(2, 3, 16, 16), "labels": torch.tensor([1, 4])}


def resnet() -> tuple[torch.nn.Module, Batch]:
    model = tf.ResNetForImageClassification(
        tf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5)
    )
    return model, {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.tensor([0, 1, 2, 3])}


def whisper() -> tuple[torch.nn.Module, Batch]:
    model = tf.WhisperForConditionalGeneration(
        tf.WhisperConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            num_mel_bins=8,
            max_source_positions=20,
            max_target_positions=32,
            dropout=0.0,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            suppress_tokens=None,
            begin_suppress_tokens=None,
        )
    )
    return model, {"input_features": torch.randn(2, 8, 40), "labels": ids(2, 7)}


MODELS: dict[str, Callable[[], tuple[torch.nn.Module, Batch]]] = {
    f.__name__: f for f in (llama, qwen3, qwen3_moe, gpt2, bert, vit, resnet, whisper)
}


def build(name: str) -> tuple[torch.nn.Module, Batch]:
    """A model in training mode and its batch, the same every time."""
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.train(), batch
