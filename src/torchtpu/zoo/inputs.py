"""Example inputs for models of Transformers: text, images, speech; labels; static caches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from torchtpu.zoo.source import ModelError, Units

if TYPE_CHECKING:
    from torchtpu.zoo.pretrained import TransformersSource

__all__ = ["make", "units"]

_TOKEN_LABELS = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "ForPreTraining")
_CLASS_LABELS = ("ForImageClassification", "ForSequenceClassification", "ForAudioClassification")


class _Maker:
    """Makes tensors on a device, the same ones for every device that has values."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(0)

    def integers(self, high: int, *shape: int) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(0, high, shape, generator=self.generator).to(self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        if self.device.type == "meta":
            return torch.empty(shape, dtype=self.dtype, device="meta")
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)


def make(
    source: TransformersSource, kind: str, batch: int, seq: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """See ``ModelSource.example_inputs``."""
    maker = _Maker(device, dtype)
    main = source.model_class.main_input_name
    if main not in _MAKERS:
        raise ModelError(
            f"{source.name}: it is not known what {source.model_class.__name__} takes as {main!r}: write a factory "
            "that returns (model, inputs), and pass module:factory"
        )
    if kind == "decode":
        if main == "pixel_values" or not source.model_class.can_generate():
            raise ModelError(f"{source.name} has no decode: {source.model_class.__name__} generates no tokens")
        return _decode(source, batch, seq, maker)
    made = _MAKERS[main](source, batch, seq, maker)
    if kind == "train":
        made |= _labels(source, made, batch, seq, maker)
    elif source.config.is_encoder_decoder:
        made["decoder_input_ids"] = _tokens(source, batch, seq, maker)
    return made


def units(source: TransformersSource, kind: str, batch: int, seq: int) -> Units:
    """See ``ModelSource.units``."""
    if source.model_class.main_input_name == "pixel_values":
        return Units(batch, "images", batch)
    return Units(batch * (1 if kind == "decode" else _length(source, seq)), "tokens", batch)


def _length(source: TransformersSource, seq: int) -> int:
    """Tokens a sequence may have: models with learned positions have an end."""
    config = source.config
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if limit is not None and seq > limit:
        raise ModelError(f"{source.name} takes at most {limit} tokens: got {seq}")
    return seq


def _tokens(source: TransformersSource, batch: int, seq: int, maker: _Maker) -> torch.Tensor:
    return maker.integers(source.config.get_text_config().vocab_size, batch, _length(source, seq))


def _text(source: TransformersSource, batch: int, seq: int, maker: _Maker) -> dict[str, Any]:
    return {"input_ids": _tokens(source, batch, seq, maker)}


def _image(source: TransformersSource, batch: int, seq: int, maker: _Maker) -> dict[str, Any]:
    size = getattr(source.config, "image_size", 224)
    height, width = size if isinstance(size, (tuple, list)) else (size, size)
    return {"pixel_values": maker.normal(batch, getattr(source.config, "num_channels", 3), height, width)}


def _speech(source: TransformersSource, batch: int, seq: int, maker: _Maker) -> dict[str, Any]:
    # Whisper's second convolution halves the frames.
    frames = 2 * source.config.max_source_positions
    return {"input_features": maker.normal(batch, source.config.num_mel_bins, frames)}


_MAKERS = {"input_ids": _text, "pixel_values": _image, "input_features": _speech}


def _labels(
    source: TransformersSource, made: dict[str, Any], batch: int, seq: int, maker: _Maker
) -> dict[str, torch.Tensor]:
    name = source.model_class.__name__
    if "labels" in source.forward_parameters():
        if name.endswith(_CLASS_LABELS):
            return {"labels": maker.integers(source.config.num_labels, batch)}
        if name.endswith("ForTokenClassification"):
            return {"labels": maker.integers(source.config.num_labels, batch, seq)}
        if name.endswith(_TOKEN_LABELS):
            apart = source.config.is_encoder_decoder or "input_ids" not in made
            return {"labels": _tokens(source, batch, seq, maker) if apart else made["input_ids"].clone()}
    raise ModelError(
        f"{source.name}: it is not known how {name} is trained: write a factory that returns (model, inputs) with the "
        "labels, and pass module:factory"
    )


def _decode(source: TransformersSource, batch: int, seq: int, maker: _Maker) -> dict[str, Any]:
    """One token and a cache of ``seq`` positions, of which all but the last are taken."""
    from transformers import EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    parameters = source.forward_parameters()
    keyword = "cache" if "cache" in parameters else "past_key_values"
    if keyword not in parameters:
        raise ModelError(f"{source.name} has no decode: forward of {source.model_class.__name__} takes no cache")
    _length(source, seq)
    token = maker.integers(source.config.get_text_config().vocab_size, batch, 1)
    # Which tensors the cache has is seen in a forward without values, not derived from the configuration. In bfloat16:
    # PyTorch has meta kernels of grouped products for no other type.
    model = source.build("meta", torch.bfloat16)
    probe = _Maker(torch.device("meta"), torch.bfloat16)
    if not source.config.is_encoder_decoder:
        shapes, cache = _static(source, seq), _static(source, seq)
        model(input_ids=probe.integers(0, 1, 1), **{keyword: shapes})
        _fill(cache, shapes, batch, seq - 1, maker)
        return {"input_ids": token, keyword: cache}
    encoder_length = getattr(source.config, "max_source_positions", seq)

    def both() -> Any:
        return EncoderDecoderCache(_static(source, seq), _static(source, encoder_length))

    def encoded(count: int, maker: _Maker) -> BaseModelOutput:
        return BaseModelOutput(maker.normal(count, encoder_length, source.config.hidden_size))

    shapes, cache = both(), both()
    model(decoder_input_ids=probe.integers(0, 1, 1), encoder_outputs=encoded(1, probe), **{keyword: shapes})
    _fill(cache.self_attention_cache, shapes.self_attention_cache, batch, seq - 1, maker)
    _fill(cache.cross_attention_cache, shapes.cross_attention_cache, batch, encoder_length, maker)
    cache.is_updated = dict.fromkeys(range(len(cache)), True)
    return {"decoder_input_ids": token, "encoder_outputs": encoded(batch, maker), keyword: cache}


def _static(source: TransformersSource, length: int) -> Any:
    from transformers import StaticCache

    return StaticCache(config=source.config, max_cache_len=length)


def _fill(cache: Any, shapes: Any, batch: int, taken: int, maker: _Maker) -> None:
    """Give a cache the tensors that ``shapes`` has, for a batch, with ``taken`` positions of random keys and values."""
    for layer, shape in zip(cache.layers, shapes.layers, strict=True):
        heads, key_size, value_size = shape.keys.shape[1], shape.keys.shape[-1], shape.values.shape[-1]
        layer.lazy_initialization(
            torch.empty((batch, heads, 0, key_size), dtype=maker.dtype, device=maker.device),
            torch.empty((batch, heads, 0, value_size), dtype=maker.dtype, device=maker.device),
        )
        layer.keys.copy_(maker.normal(*layer.keys.shape))
        layer.values.copy_(maker.normal(*layer.values.shape))
        layer.cumulative_length.fill_(taken)
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int = taken  # a window's layer also counts on the host
