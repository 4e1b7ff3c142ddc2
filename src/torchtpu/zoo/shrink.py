"""Small dimensions for a configuration that keep a model's structure: its kinds of layers, grouped heads, experts."""

from __future__ import annotations

from typing import Any

__all__ = ["shrink"]

_LAYERS = (
    "num_hidden_layers",
    "num_layers",
    "num_decoder_layers",
    "num_encoder_layers",
    "encoder_layers",
    "decoder_layers",
    "n_layer",
    "n_layers",
)

_SIZES = {
    # width
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "embedding_size": 64,
    "head_dim": 16,
    "d_kv": 16,
    "query_pre_attn_scalar": 16,
    # inside a layer
    "intermediate_size": 96,
    "n_inner": 96,
    "d_ff": 96,
    "ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    # heads
    "num_attention_heads": 4,
    "num_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    # inputs
    "vocab_size": 128,
    "sliding_window": 8,
    "max_source_positions": 32,
    "num_mel_bins": 16,
}
"""Dimensions by the names that configurations give them; smaller ones stay."""


def shrink(config: dict[str, Any], overrides: dict[str, Any] | None = None) -> dict[str, Any]:
    """A configuration with at most a few layers, heads and experts.

    Args:
        config: every field with its value, nested configurations as dictionaries.
        overrides: fields with values of their own.

    Returns:
        A new dictionary. There are as many layers as it takes to have each kind in ``layer_types`` once, at least
        two; lists with an element for each layer are cut to that.
    """
    small = {key: shrink(value) if _is_config(key, value) else value for key, value in config.items()}
    for key, size in _SIZES.items():
        value = config.get(key)
        if isinstance(value, int) and not isinstance(value, bool):
            small[key] = min(size, value)
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(groups, int):
        small["num_key_value_heads"] = small["num_attention_heads"] if groups == heads else min(2, groups)
    if "qk_rope_head_dim" in config and config.get("head_dim") == config["qk_rope_head_dim"]:
        small["head_dim"] = small["qk_rope_head_dim"]  # Transformers' name for the part that rotates
    _cut_layers(config, small)
    _keep_tokens_in_vocabulary(small)
    patch, image = config.get("patch_size"), config.get("image_size")
    if isinstance(patch, int) and isinstance(image, int):
        small["image_size"] = min(image, 4 * patch)
    return small | (overrides or {})


def _is_config(key: str, value: Any) -> bool:
    return isinstance(value, dict) and key.endswith("_config") and key != "quantization_config"


def _cut_layers(config: dict[str, Any], small: dict[str, Any]) -> None:
    dense = config.get("first_k_dense_replace") or 0
    for key in _LAYERS:
        count = config.get(key)
        if not isinstance(count, int):
            continue
        kept = min(count, 2)
        # DeepSeek's first layers are dense: one of them and one with experts are kept.
        begin = max(0, dense - 1)
        for field, value in config.items():
            if isinstance(value, list) and len(value) == count and field.endswith("layer_types"):
                while len(set(map(str, value[begin : begin + kept]))) < len(set(map(str, value[begin:]))):
                    kept += 1
        small[key] = kept
        for field, value in config.items():
            if isinstance(value, list) and len(value) == count > 4:
                small[field] = value[begin : begin + kept]


def _keep_tokens_in_vocabulary(small: dict[str, Any]) -> None:
    size = small.get("vocab_size")
    if not isinstance(size, int):
        return
    for key, value in small.items():
        if key.endswith("_token_id") and isinstance(value, int) and value >= size:
            small[key] = size - 1
        elif isinstance(value, list) and key.endswith(("_token_id", "suppress_tokens")):
            small[key] = [x for x in value if isinstance(x, int) and x < size] or None
