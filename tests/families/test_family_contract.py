"""A family of models is one value; nothing else asks which family a model is of."""

from __future__ import annotations

import re
from operator import attrgetter
from pathlib import Path
from typing import get_args

import pytest

import trainkit
from trainkit.families import FAMILIES
from trainkit.families.contract import FEEDFORWARDS
from trainkit.jobs.experts import Experts
from trainkit.jobs.latent import Latent
from trainkit.jobs.schema import Model
from trainkit.plan.arithmetic import parameters_of

EXPERTS = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
LATENTS = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}


def model_of(family: str, **keys: object) -> Model:
    small = {"num_layers": 2, "hidden_size": 96, "num_attention_heads": 4, "seq_length": 32}
    small["sliding_window"] = 16
    if FAMILIES[family].routing is not None:
        keys = {"moe": EXPERTS, **keys}
    if "mla" in FAMILIES[family].settings:
        keys = {"mla": LATENTS, **keys}
    return Model.model_validate({"family": family, **small, **keys})


def test_the_table_and_the_schema_have_the_same_families() -> None:
    assert get_args(Model.model_fields["family"].annotation) == tuple(FAMILIES)


def test_no_code_asks_which_family_a_model_is_of() -> None:
    package = Path(trainkit.__file__).parent
    asks = re.compile(r"""model\.family\s*[!=]=|self\.family\s*[!=]=|family (not )?in \(["']""")
    found = [
        f"{path.relative_to(package)}:{number}: {line.strip()}"
        for path in package.rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if asks.search(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_names_what_models_have(name: str) -> None:
    family = FAMILIES[name]
    names = family.hugging_face
    model = model_of(name)
    assert family.settings <= set(Model.model_fields)
    for key in names.keys:
        table, _, inner = key.setting.rpartition(".")
        settings = {"": {"", *Model.model_fields}, "moe": set(Experts.model_fields)}
        settings["mla"] = set(Latent.model_fields)
        assert inner in settings[table]
        assert not key.attribute or attrgetter(key.attribute)(model) is not None
    for attribute in names.dropout.values():
        assert hasattr(model, attribute)
    assert f"mlp.{FEEDFORWARDS[family.activation].module}" in names.inside
    assert ("embed_positions" in names.outside) == family.learned_positions
    assert (names.rotary is None) == family.learned_positions


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_other_families_are_refused(name: str) -> None:
    values = {
        "num_query_groups": 2,
        "rotary_percent": 0.5,
        "rotary_base": 500.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "gpt_j_residual": True,
        "gpt_j_tied": True,
        "gelu": "tanh",
        "sliding_rotary_base": 500.0,
        "moe": EXPERTS,
        "mla": LATENTS,
        "mtp_num_layers": 1,
        "mtp_loss_scaling_factor": 0.3,
    }
    needed = {"mtp_loss_scaling_factor": {"mtp_num_layers": 1}}
    assert {key for family in FAMILIES.values() for key in family.settings} == set(values)
    for key, value in values.items():
        if key in FAMILIES[name].settings:
            assert getattr(model_of(name, **{key: value}, **needed.get(key, {})), key) is not None
        else:
            owners = [other for other, family in FAMILIES.items() if key in family.settings]
            with pytest.raises(ValueError, match=f"{key} is for family {' and '.join(owners)}"):
                model_of(name, **{key: value})


def test_parameters_are_those_of_the_formulas() -> None:
    """Of the top of each family's file."""
    v, layers, h, s = 1000, 2, 96, 32
    f, kv = 8 * h // 3 // 64 * 64, 48
    layer = 12 * h * h + 13 * h
    assert parameters_of(model_of("gpt"), v) == layers * layer + v * h + s * h + 2 * h
    assert parameters_of(model_of("gpt-neox"), v) == layers * layer + 2 * v * h + 2 * h
    tied = model_of("gpt-neox", gpt_j_tied=True)
    assert parameters_of(tied, v) == layers * (layer - 2 * h) + 2 * v * h + 2 * h
    llama = model_of("llama", num_query_groups=2)
    block = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    assert parameters_of(llama, v) == layers * block + 2 * v * h + h
