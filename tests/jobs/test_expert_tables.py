"""[models.X.moe]: what is refused, each by one sentence that names the key."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import ValidationError

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.jobs.schema import Model

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}
EXPERTS = {"num_experts": 8, "router_topk": 2, "ffn_hidden_size": 24}
SIGMOID = {"router_score_function": "sigmoid"}


def model_of(family: str = "qwen3-moe", moe: object = EXPERTS, **keys: object) -> Model:
    return Model.model_validate({"family": family, **SIZES, "moe": moe, **keys})


@pytest.mark.parametrize(
    ("moe", "words"),
    [
        ({"router_topk": 9}, "router_topk 9 is above num_experts 8"),
        ({"router_num_groups": 2}, "router_num_groups and router_group_topk go together"),
        ({"router_group_topk": 2}, "router_num_groups and router_group_topk go together"),
        (
            {"router_num_groups": 3, "router_group_topk": 1},
            "num_experts 8 does not divide by router_num_groups 3",
        ),
        (
            {"router_num_groups": 4, "router_group_topk": 1, "router_topk": 3},
            "router_group_topk 1 of 4 groups of 2 experts has not router_topk 3 experts",
        ),
        (
            {"router_num_groups": 2, "router_group_topk": 3},
            "router_group_topk 3 of 2 groups of 4 experts has not router_topk 2 experts",
        ),
        (
            {"router_num_groups": 4, "router_group_topk": 2, "router_topk": 3},
            "best router_topk / router_group_topk experts; 3 / 2 is not 1 to 2",
        ),
        ({"first_dense_layers": 2}, "first_dense_layers 2 leaves no layer of 2 with experts"),
        (
            {"router_enable_expert_bias": True},
            "router_enable_expert_bias needs router_score_function = 'sigmoid'",
        ),
        ({"router_topk": 1}, "the one weight is always 1 and the router learns nothing"),
        (
            {"router_topk": 1, "router_pre_softmax": False, "router_norm_topk_prob": False},
            "the one weight is always 1 and the router learns nothing",
        ),
        ({"router_topk": 1, **SIGMOID}, "learns nothing; set router_norm_topk_prob = false \\["),
        ({"num_experts": 1, "router_topk": 1}, "greater than or equal to 2"),
        ({"router_topk_scaling_factor": 0.0}, "greater than 0"),
        ({"aux_loss_coeff": -0.1}, "greater than or equal to 0"),
        ({"expert_capacity_factor": 0}, "expert_capacity_factor\n.*greater than 0"),
        ({"expert_capacity_factor": -1.5}, "expert_capacity_factor\n.*greater than 0"),
        ({"expert_capacity_factor": math.inf}, "expert_capacity_factor\n.*finite number"),
        (
            {"token_drop_policy": "position"},
            "token_drop_policy 'position' is for expert_capacity_factor: without it nothing",
        ),
        (
            {"expert_capacity_factor": 1.0, "token_drop_policy": "first"},
            "token_drop_policy\n.*'probs' or 'position'",
        ),
        ({"top_k": 2}, "top_k\n.*not permitted"),
    ],
)
def test_tables_that_make_no_router(moe: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as error:
        model_of(moe=EXPERTS | moe)
    assert error.value.error_count() == 1


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"moe": None}, "family 'qwen3-moe' has experts: write \\[models.X.moe\\]"),
        ({"family": "llama"}, "moe is for family mixtral"),
        (
            {"parametrization": "mup", "mup_base_hidden_size": 64},
            "parametrization 'mup' is not for models with experts",
        ),
        ({"activation": "geglu"}, "activation 'geglu': experts are SwiGLU"),
    ],
)
def test_models_that_do_not_go_with_experts(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words) as error:
        model_of(**keys)
    assert error.value.error_count() == 1


@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral", "olmoe"])
def test_what_families_say_of_routing(family: str) -> None:
    """What is left out is the family's; what is given stands."""
    usual = model_of(family).routing
    assert (usual.score, usual.pre_softmax, usual.expert_bias) == ("softmax", True, False)
    assert usual.normalized == (family != "olmoe")
    assert (usual.experts, usual.chosen, usual.groups, usual.scale) == (8, 2, 0, 1.0)
    groups = {"router_num_groups": 4, "router_group_topk": 2, "router_topk_scaling_factor": 2.5}
    told = {"router_norm_topk_prob": family == "olmoe", "router_enable_expert_bias": True}
    given = model_of(family, EXPERTS | SIGMOID | groups | told).routing
    assert (given.score, given.expert_bias) == ("sigmoid", True)
    assert given.normalized == (family == "olmoe")
    assert (given.groups, given.kept_groups, given.scale) == (4, 2, 2.5)


@pytest.mark.parametrize(
    "moe",
    [
        {"router_topk": 1, "router_norm_topk_prob": False},
        {"router_topk": 1, "router_norm_topk_prob": False, **SIGMOID},
        {"router_topk": 8},
        {"first_dense_layers": 1},
        {"router_num_groups": 8, "router_group_topk": 2},
    ],
)
def test_edges_that_are_taken(moe: dict[str, Any]) -> None:
    model = model_of(moe=EXPERTS | moe)
    assert model.sparse(1) and model.sparse(0) == (not moe.get("first_dense_layers"))


def test_a_file_says_where(checkout: Checkout) -> None:
    """The whole message of a table, with its place."""
    table = "[models.tiny.moe]\nnum_experts = 4\nrouter_topk = 5\nffn_hidden_size = 8\n"
    text = GOOD.replace("[models.tiny]", '[models.tiny]\nfamily = "mixtral"') + table
    (said,) = refused(checkout(text))
    assert said.endswith("models.tiny.moe: router_topk 5 is above num_experts 4")
