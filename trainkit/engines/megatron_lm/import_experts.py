"""[models.X.moe] and [models.X.mla] from the options of a Megatron-LM command line."""

from __future__ import annotations

import ast
import operator
import re

from trainkit.engines.megatron_lm.script_options import Options, real, take_value, whole
from trainkit.families import FAMILIES
from trainkit.families.contract import Routing

_BALANCED = ("aux_loss", "seq_aux_loss")
_RANKS = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")


def family_with_experts(options: Options) -> str | None:
    """The family of a command that has experts; None: it has none. Its flag is done with."""
    if "num-experts" not in options.given or options.table.find("num-experts") is None:
        return None
    if options.flag("multi-latent-attention"):
        if not options.flag("qk-layernorm"):
            options.not_taken.append("no --qk-layernorm: latents have norms in 'deepseek-v3'")
        return "deepseek-v3"
    return "qwen3-moe" if options.flag("qk-layernorm") else "mixtral"


def take_experts(options: Options, model: dict[str, object]) -> None:
    """Take what a command with experts says of them and of latents into `model`."""
    family = FAMILIES[str(model["family"])]
    assert family.routing is not None
    if "mla" in family.settings:
        _take_latents(options, model)
    usual = model.get("ffn_hidden_size") or family.ffn_width(
        whole("hidden-size", model["hidden_size"])
    )
    moe: dict[str, object] = {
        "num_experts": take_value(options, "num-experts"),
        "router_topk": take_value(options, "moe-router-topk"),
        "ffn_hidden_size": take_value(options, "moe-ffn-hidden-size") or usual,
    }
    _take_dense_layers(options, moe, whole("num-layers", model["num_layers"]))
    for name in (
        "moe-shared-expert-intermediate-size",
        "moe-router-topk-scaling-factor",
        "moe-router-num-groups",
        "moe-router-group-topk",
        "moe-router-bias-update-rate",
        "moe-z-loss-coeff",
    ):
        if name in options.given:
            moe[name.removeprefix("moe-").replace("-", "_")] = take_value(options, name)
    _take_router(options, moe, family.routing)
    _take_balance(options, moe)
    if options.given.get("moe-router-dtype") is None:
        options.not_taken.append("no --moe-router-dtype: weights of experts are in fp32 here")
    model["moe"] = moe


def _take_router(options: Options, moe: dict[str, object], usual: Routing) -> None:
    score = take_value(options, "moe-router-score-function")
    if score not in ("softmax", "sigmoid"):
        options.not_taken.append(f"--moe-router-score-function {score}: it stays {usual.score}")
    elif score != usual.score:
        moe["router_score_function"] = score
    before = options.flag("moe-router-pre-softmax")
    if score == "softmax" and before:
        moe["router_norm_topk_prob"] = False
    elif score == "softmax" and "router_num_groups" in moe:
        moe["router_pre_softmax"] = False  # groups are judged by logits
    elif before:
        options.not_taken.append(f"--moe-router-pre-softmax: not read with {score}")
    if score == "sigmoid" and moe["router_topk"] == 1:
        moe["router_norm_topk_prob"] = False
    biased = options.flag("moe-router-enable-expert-bias")
    if biased != usual.expert_bias:
        moe["router_enable_expert_bias"] = biased


def _take_balance(options: Options, moe: dict[str, object]) -> None:
    kind = take_value(options, "moe-router-load-balancing-type")
    coefficient = take_value(options, "moe-aux-loss-coeff")
    if kind == "none":
        return
    if kind not in _BALANCED or isinstance(coefficient, list):
        options.not_taken.append(
            f"--moe-router-load-balancing-type {kind} --moe-aux-loss-coeff {coefficient}: of its"
            f" losses {' and '.join(_BALANCED)} are taken, so that there is no loss of balance"
        )
        return
    if coefficient:
        moe |= {"router_load_balancing_type": kind, "aux_loss_coeff": coefficient}


def _take_dense_layers(options: Options, moe: dict[str, object], layers: int) -> None:
    """The layers without experts, where they are the first."""
    words = options.given.get("moe-layer-freq")
    if words is None:
        return
    pattern = _pattern(words[0] if words else "", layers)
    dense = pattern.index(1) if 1 in pattern else layers
    if dense == layers or pattern != [0] * dense + [1] * (layers - dense):
        options.leave("moe-layer-freq", "here the first layers alone are without experts")
        return
    options.take("moe-layer-freq")
    if dense:
        moe["first_dense_layers"] = dense


def _pattern(text: str, layers: int) -> list[int]:
    """1 for each layer with experts, as core 0.16's moe_freq_type and gpt_layer_specs.py read it;
    empty where they would not."""
    if text.isdigit() and int(text):
        return [int(number % int(text) == 0) for number in range(layers)]
    if not re.fullmatch(r"[\d,\[\]()+* ]+", text):
        return []
    try:
        found = _listed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        return []
    return found if isinstance(found, list) and len(found) == layers else []


def _listed(node: ast.expr) -> int | list[int]:
    """The value of numbers, lists, sums and products. Raises TypeError, ValueError."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mult)):
        work = operator.add if isinstance(node.op, ast.Add) else operator.mul
        made: int | list[int] = work(_listed(node.left), _listed(node.right))
        return made
    found: int | list[int] = ast.literal_eval(node)
    return found


def _take_latents(options: Options, model: dict[str, object]) -> None:
    """What shapes attention by latents, and YaRN, which they have wherever positions are
    stretched."""
    model["mla"] = {
        name.replace("-", "_"): value
        for name in _RANKS
        if (value := take_value(options, name)) is not None
    }
    model.pop("kv_channels", None)
    factor = real("rotary-scaling-factor", take_value(options, "rotary-scaling-factor"))
    if factor <= 1 or options.given.get("rope-type") == ["rope"]:
        return
    scale = take_value(options, "mscale")
    whole_scale = take_value(options, "mscale-all-dim")
    scaling: dict[str, object] = {"type": "yarn", "factor": factor}
    scaling["original_max_position_embeddings"] = 4096
    if whole_scale:
        scaling |= {"mscale": scale, "mscale_all_dim": whole_scale}
    elif scale != 1:
        options.not_taken.append(f"--mscale {scale} without --mscale-all-dim: it is 1 here")
    model["rope_scaling"] = scaling
