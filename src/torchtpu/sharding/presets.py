"""Plans by name: ``fsdp=64,ep=8,tp=2`` for models written in the usual way.

The rules know a layer by the names that Transformers, diffusers and torchtitan give its parts: whose output a
tensor-parallel axis divides (query, key, value, gate, up), and whose input (the projection back).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from torchtpu.sharding.plan import Plan, PlanError, Rule

__all__ = ["AXES", "parse", "preset"]

AXES = {
    "dp": "data parallel: the batch is divided, parameters are whole",
    "fsdp": "fully sharded data parallel: the batch is divided, parameters are stored divided and gathered for use",
    "ep": "expert parallel: the experts of a mixture are divided, tokens travel to them",
    "tp": "tensor parallel: the heads and the width of layers are divided, and the sequence between them",
}
"""Axes that a preset knows, in the order of the mesh: the last one is between neighbours."""

CAPACITY = 1.25
"""Room for tokens that travel to experts, times the mean: what Switch Transformers trains with (arXiv:2101.03961)."""

_OUT = (  # [out, in]: the output is divided
    r"(^|\.)(q|k|v|qkv|kv|query|key|value|gate|up|gate_up|fc1|fc_in|w1|w3|wi|wi_0|wi_1|c_fc|lin1|wq|wk|wv|"
    r"q_b|kv_b|to_q|to_k|to_v|add_q|add_k|add_v|query_key_value|intermediate\.dense|dense_h_to_4h)"
    r"(_proj)?\.(weight|bias)$"
)
_IN = (  # [out, in]: the input is divided
    r"(^|\.)(o|out|down|fc2|fc_out|w2|wo|lin2|to_out\.0|to_add_out|output\.dense|dense_4h_to_h)(_proj)?\.weight$"
)
_CONV1D_OUT = r"(^|\.)(c_attn|c_fc)\.weight$"  # GPT-2 keeps [in, out]
_CONV1D_IN = r"(^|\.)c_proj\.weight$"
_VOCABULARY = r"(^|\.)(embed_tokens|word_embeddings|wte|tok_embeddings|shared|lm_head|proj_out|output)\.weight$"
_NORMS = r"(?<![qk]_)(norm|layernorm|layer_norm|ln_\w+|LayerNorm)\d*$"
_HEADS = r"(^|\.)(lm_head|proj_out|output)$"
_EXPERTS = r"(^|\.)experts\.(\w+_proj|w\d|\w+_proj_bias)$"


def preset(mesh: Mapping[str, int]) -> Plan:
    """The plan of a mesh whose axes are among ``AXES``.

    Args:
        mesh: sizes by name.

    Raises:
        PlanError: an axis is not one of them.
    """
    unknown = [a for a in mesh if a not in AXES]
    if unknown:
        known = "; ".join(f"{a}: {what}" for a, what in AXES.items())
        raise PlanError(f"no preset has an axis {', '.join(unknown)}. {known}. Other plans are JSON files")
    ordered = {a: mesh[a] for a in AXES if mesh.get(a, 1) > 1} or {"fsdp": 1}
    tp = ("tp",) if "tp" in ordered else ()
    rules = []
    if "ep" in ordered:
        rules.append(Rule(_EXPERTS, (("ep",),), given=False))
    if tp:
        rules += [
            Rule(_CONV1D_OUT, ((), tp), given=False),
            Rule(_CONV1D_IN, (tp,), given=False),
            Rule(_OUT, (tp,), given=False),
            Rule(_IN, ((), tp), given=False),
            Rule(_VOCABULARY, (tp,), given=False),
        ]
    batch = tuple(a for a in ("dp", "fsdp", "ep") if a in ordered)
    # A norm works on each device's part of the sequence and its result is gathered, in 16 bits: left to itself the
    # partitioner gathers the input, in 32 bits, and libtpu crashes on such a program for TPU7x.
    results = (Rule(_NORMS, (batch, tp), given=False), Rule(_HEADS, (batch, (), tp), given=False)) if tp else ()
    return Plan(
        mesh=ordered,
        parameters=tuple(rules),
        activations=results,
        batch=batch,
        sequence=tp,
        heads=tp,
        gathered=("fsdp",) if "fsdp" in ordered else (),
        experts="ep" if "ep" in ordered else None,
        capacity=CAPACITY,
        name=",".join(f"{a}={n}" for a, n in ordered.items()),
    )


def parse(text: str | None, devices: int | None = None) -> Plan:
    """A plan from what the command line takes.

    Args:
        text: ``fsdp=8,tp=2``, the name of one axis (``fsdp``: all devices), a JSON file, or None for ``fsdp``.
        devices: how many there are; one axis may be left without a size, and gets what is left.

    Raises:
        PlanError: it is none of these, or its mesh has another number of devices.
    """
    text = text or "fsdp"
    file = text.endswith(".json") or os.path.exists(text)
    plan = Plan.load(text) if file else preset(_sizes(text, devices))
    if devices is not None and plan.devices != devices:
        raise PlanError(
            f"the plan {text} is for {plan.devices} devices ({_times(plan.mesh)}), the topology has {devices}"
        )
    return plan


def _sizes(text: str, devices: int | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    open_axis = None
    for part in text.split(","):
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:[=:]\s*(\d+))?\s*", part)
        if found is None or found[1] in sizes:
            raise PlanError(
                f"{text!r} is not a plan: write axes with their sizes, such as fsdp=8,tp=2 ({', '.join(AXES)}), "
                "or the path of a JSON file"
            )
        if found[2] is None:
            if open_axis is not None:
                raise PlanError(f"{text!r} leaves two sizes open, {open_axis} and {found[1]}: one can be worked out")
            open_axis = found[1]
        sizes[found[1]] = int(found[2] or 1)
        if sizes[found[1]] < 1:
            raise PlanError(f"{found[1]} has the size 0 in {text!r}: it is at least 1")
    if open_axis is not None and devices is not None:
        fixed = 1
        for size in sizes.values():
            fixed *= size
        if devices % fixed:
            raise PlanError(f"{devices} devices do not divide by {fixed}, so {open_axis} has no size in {text!r}")
        sizes[open_axis] = devices // fixed
    return sizes


def _times(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{a}={n}" for a, n in mesh.items())
