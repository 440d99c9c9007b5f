"""[models.X.moe]: experts in place of MLPs. Key names are Megatron's without its `moe_`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field, model_validator

from trainkit.families.contract import Family, Routing, Score
from trainkit.jobs.table import Table, needs, wrong


class Experts(Table):
    """Several MLPs in a layer, of which each token takes a few (Shazeer et al. 2017,
    arXiv:1701.06538)."""

    num_experts: int = Field(ge=2, description="experts of a layer")
    router_topk: int = Field(ge=1, description="experts that a token takes")
    ffn_hidden_size: int = Field(ge=1, description="width of one expert")
    shared_expert_intermediate_size: int | None = Field(
        None, ge=1, description="width of an expert that every token takes besides"
    )
    first_dense_layers: int = Field(
        0, ge=0, description="so many layers from the first have an MLP of ffn_hidden_size instead"
    )
    router_score_function: Score | None = Field(
        None, description="what is made of a router's products; by default the family's"
    )
    router_pre_softmax: bool | None = Field(
        None,
        description=(
            "softmax over all experts, then the best; false: over the best alone; by default the"
            " family's"
        ),
    )
    router_norm_topk_prob: bool | None = Field(
        None, description="weights of a token's experts sum to 1; by default the family's"
    )
    router_topk_scaling_factor: float = Field(1.0, gt=0, description="weights are multiplied by it")
    router_num_groups: int | None = Field(
        None, ge=1, description="groups of experts; a token takes experts of the best groups alone"
    )
    router_group_topk: int | None = Field(None, ge=1, description="groups that a token keeps")
    router_enable_expert_bias: bool | None = Field(
        None,
        description=(
            "a bias that only chooses, moved after each step against uneven loads (Wang et al."
            " 2024, arXiv:2408.15664); by default the family's"
        ),
    )
    router_bias_update_rate: float = Field(1e-3, ge=0, description="how far it moves in a step")
    router_load_balancing_type: Literal["aux_loss", "seq_aux_loss", "global_aux_loss"] = Field(
        "aux_loss",
        description=(
            "loads are balanced over a micro-batch, within each sample, or over a global batch, by"
            " the loads of the step before"
        ),
    )
    aux_loss_coeff: float = Field(
        0.0, ge=0, description="weight of the loss of balance, which is 1 for even loads"
    )
    z_loss_coeff: float = Field(
        0.0, ge=0, description="weight of logsumexp(logits)**2 of routers (arXiv:2202.08906)"
    )
    expert_capacity_factor: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description=(
            "in training an expert takes at most so many times its even share of a sample's"
            " choices; those above are dropped; by default none is"
        ),
    )
    token_drop_policy: Literal["probs", "position"] | None = Field(
        None,
        description=(
            "which choices an expert keeps: those of the highest weights (the default), or of the"
            " first tokens"
        ),
    )

    @model_validator(mode="after")
    def _fits(self) -> Experts:
        experts = self.num_experts
        chosen = self.router_topk
        if chosen > experts:
            raise wrong("router_topk", f"router_topk {chosen} is above num_experts {experts}")
        if self.token_drop_policy and self.expert_capacity_factor is None:
            raise wrong(
                "token_drop_policy",
                f"token_drop_policy {self.token_drop_policy!r} is for expert_capacity_factor:"
                " without it nothing is dropped",
            )
        groups = self.router_num_groups
        kept = self.router_group_topk
        if (groups is None) != (kept is None):
            raise wrong("router_group_topk", "router_num_groups and router_group_topk go together")
        if groups is None or kept is None:
            return self
        if experts % groups:
            raise wrong(
                "router_num_groups",
                f"num_experts {experts} does not divide by router_num_groups {groups}",
            )
        size = experts // groups
        if kept > groups or chosen > kept * size:
            raise wrong(
                "router_group_topk",
                f"router_group_topk {kept} of {groups} groups of {size} experts has not"
                f" router_topk {chosen} experts",
            )
        if chosen % kept or chosen // kept > size:
            raise wrong(
                "router_group_topk",
                f"a group is judged by its best router_topk / router_group_topk experts; {chosen} /"
                f" {kept} is not 1 to {size}",
            )
        return self

    @property
    def dense_layers(self) -> list[int]:
        """Layers without experts, counted from 0."""
        return list(range(self.first_dense_layers))

    @property
    def groups(self) -> int:
        """Groups of experts; where there are none, all are one."""
        return self.router_num_groups or 1

    @property
    def kept_groups(self) -> int:
        """Groups that a token keeps."""
        return self.router_group_topk or 1

    def capacity(self, tokens: int) -> int:
        """How often so many tokens may choose each expert (Lepikhin et al. 2020, arXiv:2006.16668,
        section 2.2); without a factor, once each."""
        if self.expert_capacity_factor is None:
            return tokens
        return math.ceil(tokens * self.router_topk / self.num_experts * self.expert_capacity_factor)

    @property
    def shared_experts(self) -> int:
        """How many experts wide the one for all tokens is, rounded down."""
        return (self.shared_expert_intermediate_size or 0) // self.ffn_hidden_size


def routing_of(moe: Experts, usual: Routing) -> Routing:
    """How tokens find experts: as a model's table says, else as its family does."""
    given = {
        "score": moe.router_score_function,
        "pre_softmax": moe.router_pre_softmax,
        "normalized": moe.router_norm_topk_prob,
        "expert_bias": moe.router_enable_expert_bias,
    }
    return replace(
        usual,
        **{key: value for key, value in given.items() if value is not None},  # type: ignore[arg-type]
        experts=moe.num_experts,
        chosen=moe.router_topk,
        scale=moe.router_topk_scaling_factor,
        groups=moe.router_num_groups or 0,
        kept_groups=moe.router_group_topk or 0,
    )


def departures_of(moe: Experts, usual: Routing) -> dict[str, object]:
    """What [models.X.moe] says that is not usual in its family, by its keys; sizes left out."""
    here = routing_of(moe, usual)
    found: dict[str, tuple[object, object]] = {
        "shared_expert_intermediate_size": (moe.shared_expert_intermediate_size, None),
        "first_dense_layers": (moe.first_dense_layers, 0),
        "router_score_function": (here.score, usual.score),
        "router_pre_softmax": (here.pre_softmax, usual.pre_softmax),
        "router_norm_topk_prob": (here.normalized, usual.normalized),
        "router_topk_scaling_factor": (here.scale, usual.scale),
        "router_num_groups": (here.groups, usual.groups),
        "router_enable_expert_bias": (here.expert_bias, usual.expert_bias),
    }
    return {f"moe.{key}": value for key, (value, plain) in found.items() if value != plain}


def check_routing(said: Mapping[str, Any], family: Family) -> None:
    """Rules between [models.X.moe] and the rest of the model, `said` by its keys. Raises an error
    of a rule."""
    moe: Experts | None = said["moe"]
    if family.routing is None:
        return
    if moe is None:
        raise needs("moe", f"family {family.name!r} has experts: write [models.X.moe]")
    if moe.first_dense_layers >= said["num_layers"]:
        raise wrong(
            "moe",
            f"first_dense_layers {moe.first_dense_layers} leaves no layer of"
            f" {said['num_layers']} with experts",
        )
    if said["activation"] not in (None, "swiglu"):
        raise wrong("activation", f"activation {said['activation']!r}: experts are SwiGLU")
    if said["parametrization"] == "mup":
        raise wrong("parametrization", "parametrization 'mup' is not for models with experts")
    routing = routing_of(moe, family.routing)
    softmax = routing.score == "softmax"
    after = softmax and not routing.pre_softmax
    if routing.chosen == 1 and (routing.normalized or after):
        raise wrong(
            "moe",
            "router_topk 1 with weights that sum to 1: the one weight is always 1 and the router"
            " learns nothing; set router_norm_topk_prob = false"
            + " and router_pre_softmax = true"
            * softmax,
        )
    if routing.expert_bias and softmax:
        raise wrong(
            "moe",
            "router_enable_expert_bias needs router_score_function = 'sigmoid': softmax makes one"
            " expert's score depend on all others",
        )
