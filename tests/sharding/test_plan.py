"""Sharding plans: what presets and rules say of a model's tensors, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from torchtpu.sharding import Plan, PlanError, Rule, parse, preset

LAYER = "model.layers.0."
LLAMA = {  # Llama 3 8B: arXiv:2407.21783, table 3
    "model.embed_tokens.weight": (128256, 4096),
    LAYER + "self_attn.q_proj.weight": (4096, 4096),
    LAYER + "self_attn.k_proj.weight": (1024, 4096),
    LAYER + "self_attn.o_proj.weight": (4096, 4096),
    LAYER + "mlp.gate_proj.weight": (14336, 4096),
    LAYER + "mlp.down_proj.weight": (4096, 14336),
    LAYER + "input_layernorm.weight": (4096,),
}


def test_preset_knows_llama() -> None:
    """Outputs of query, key and gate, and inputs of the projections back, over tp; fsdp over the largest part."""
    plan = parse("fsdp=8,tp=2", 16)
    assert {name: plan.spec(name, shape) for name, shape in LLAMA.items()} == {
        "model.embed_tokens.weight": (("tp", "fsdp"), ()),
        LAYER + "self_attn.q_proj.weight": (("tp",), ("fsdp",)),
        LAYER + "self_attn.k_proj.weight": (("tp",), ("fsdp",)),
        LAYER + "self_attn.o_proj.weight": (("fsdp",), ("tp",)),
        LAYER + "mlp.gate_proj.weight": (("tp", "fsdp"), ()),
        LAYER + "mlp.down_proj.weight": ((), ("tp", "fsdp")),
        LAYER + "input_layernorm.weight": (("fsdp",),),
    }
    assert plan.used(LAYER + "mlp.gate_proj.weight", (14336, 4096)) == (("tp",), ())
    assert plan.activation(LAYER + "input_layernorm", (16, 4096, 4096)) == (("fsdp",), ("tp",), ())
    assert plan.activation(LAYER + "mlp.up_proj", (16, 4096, 14336)) is None
    # a norm of each head is no norm of hidden states
    assert plan.activation(LAYER + "self_attn.q_norm", (16, 4096, 32, 128)) is None


def test_presets_of_other_models() -> None:
    """GPT-2 keeps its weights the other way round; experts are divided over ep."""
    assert preset({"tp": 2}).spec("transformer.h.0.attn.c_attn.weight", (768, 2304)) == ((), ("tp",))
    assert preset({"tp": 2}).spec("transformer.h.0.mlp.c_proj.weight", (3072, 768)) == (("tp",), ())
    plan = preset({"tp": 2, "ep": 4, "dp": 2})
    assert list(plan.mesh) == ["dp", "ep", "tp"] and plan.devices == 16
    assert plan.spec("model.layers.3.mlp.experts.gate_up_proj", (128, 1536, 2048)) == (("ep",), (), ())
    assert (plan.batch, plan.sequence, plan.heads, plan.gathered, plan.experts) == (
        ("dp", "ep"),
        ("tp",),
        ("tp",),
        (),
        "ep",
    )


def test_preset_leaves_out_what_does_not_divide() -> None:
    plan = preset({"fsdp": 4, "tp": 8})
    assert plan.spec("self_attn.k_proj.weight", (36, 64)) == ((), ("fsdp",))
    assert plan.spec("scale", (3, 5)) == ((), ())
    assert plan.spec("scale", ()) == ()
    assert plan.spec("self_attn.o_proj.weight", (64,)) == (("fsdp",),), "a weight of another number of dimensions"
    assert plan.activation("model.norm", (12,)) == ((),)


def test_a_rule_that_was_given_must_divide() -> None:
    plan = Plan({"tp": 4}, (Rule("k_proj", (("tp",),)),), (Rule("norm", ((), ("tp",))),))
    with pytest.raises(PlanError, match=r"x\.k_proj\.weight is \[6, 8\]: dimension 0 \(6\) .*tp=4 .*'k_proj'"):
        plan.spec("x.k_proj.weight", (6, 8))
    with pytest.raises(PlanError, match=r"the result of model\.norm is \[2, 6\]: dimension 1 \(6\)"):
        plan.activation("model.norm", (2, 6))
    with pytest.raises(PlanError, match=r"norm has 1 dimensions, but the rule 'norm' names 2"):
        plan.activation("norm", (8,))


def test_first_rule_holds() -> None:
    plan = Plan({"a": 2, "b": 2}, (Rule(r"layers\.0\.", (("a",),)), Rule("weight", (("b", "a"),))))
    assert plan.spec("layers.0.weight", (8, 3)) == (("a",), ())
    assert plan.spec("layers.1.weight", (8, 3)) == (("b", "a"), ())


def test_parse() -> None:
    assert parse(None, 8).mesh == parse("fsdp", 8).mesh == parse("fsdp=8").mesh == {"fsdp": 8}
    assert parse(" tp=2 , fsdp ", 8).mesh == {"fsdp": 4, "tp": 2}
    assert parse("fsdp=8,tp=1").name == "fsdp=8"
    assert parse("fsdp", 1).devices == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fsdp=8,tp=2", "is for 16 devices .fsdp=8 x tp=2., the topology has 8"),
        ("fsdp=3,tp", "8 devices do not divide by 3, so tp has no size"),
        ("fsdp,tp", "two sizes open, fsdp and tp"),
        ("fsdp=2,fsdp=4", "is not a plan"),
        ("fsdp=-2", "is not a plan: write axes with their sizes"),
        ("", "is for 4 devices"),
        ("pp=8", "no preset has an axis pp.*tensor parallel"),
        ("fsdp=0,tp=8", "fsdp has the size 0"),
        ("absent.json", "cannot read the plan absent.json"),
    ],
)
def test_parse_refuses(text: str, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        parse(text or "fsdp=4", 8)


def test_round_trip(tmp_path: Path) -> None:
    plan = preset({"fsdp": 2, "ep": 2, "tp": 2})
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(plan.as_dict()))
    again = parse(str(file), 8)
    assert again.as_dict() == plan.as_dict() and again.name == str(file)
    assert again.spec(LAYER + "mlp.gate_proj.weight", (14336, 4096)) == (("tp", "fsdp"), ())
    with pytest.raises(PlanError, match="does not divide"):  # rules in a file were asked for
        again.spec("k_proj.weight", (3, 4))
    short = Plan.from_dict({"mesh": {"a": 2}, "parameters": [["w", [None, "a"]]], "batch": "a"})
    assert short.spec("w", (3, 4)) == ((), ("a",)) and short.batch == ("a",)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "is not a JSON object"),
        ({}, 'needs "mesh"'),
        ({"mesh": {"a": 2}, "rules": []}, "a plan has no 'rules'; its parts are"),
        ({"mesh": {"a": 0}}, "an axis 'a' of size 0"),
        ({"mesh": {"a b": 2}}, "an axis 'a b'"),
        ({"mesh": {"a": 2}, "batch": "b"}, "the plan uses b, but the mesh has a"),
        ({"mesh": {"a": 2}, "parameters": [["w", ["b"]]]}, "the plan uses b"),
        ({"mesh": {"a": 2}, "parameters": [["w", ["a", "a"]]]}, "'w' divides by a twice"),
        ({"mesh": {"a": 2}, "parameters": [["w"]]}, "not of the form"),
        ({"mesh": {"a": 2}, "parameters": [["w", [3]]]}, "not of the form"),
        ({"mesh": {"a": 2}, "parameters": [["w", [[3]]]]}, "3.* is not the name of an axis"),
        ({"mesh": {"a": 2}, "parameters": [["(", ["a"]]]}, r"'\(' is not a regular expression"),
        ({"mesh": {"a": 2}, "capacity": 0}, "capacity is 0"),
    ],
)
def test_json_that_is_no_plan(tmp_path: Path, data: Any, message: str) -> None:
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=message):
        parse(str(file))


def test_text_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(PlanError, match="cannot read the plan"):
        parse(str(tmp_path / "plan.json"))


def test_scaled() -> None:
    plan = preset({"fsdp": 64, "ep": 8, "tp": 4})
    assert plan.scaled(8).mesh == {"fsdp": 2, "ep": 2, "tp": 2}
    assert plan.scaled(2048).mesh == plan.mesh
    with pytest.raises(PlanError, match="cannot be halved to 3 devices"):
        plan.scaled(3)
    with pytest.raises(PlanError, match="cannot be halved to 4096"):
        plan.scaled(4096)
