"""What a family of models is: how a block is built, what plan counts of it, and how Hugging Face
names and describes it. A family is data; the model itself is trainkit/train/model.

Imports no torch: tables of jobs.toml and plan read families too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Literal

from trainkit.base.lazy_dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Norm:
    """A norm over the channels.

    Args:
        kind: which of torch's.
        parameters: its parameters, each of hidden size.
        statistics: fp32 numbers a token that forward keeps for backward.
        composed_on_cpu: torch has no fused kernel of it on the CPU, and keeps the normalized
            input there too.
        offset: is added to the weight, which is saved without it and begins at 1 - offset.
    """

    kind: Literal["layer-norm", "rms-norm"]
    parameters: tuple[str, ...]
    statistics: int
    composed_on_cpu: bool = False
    offset: float = 0.0


@dataclass(frozen=True)
class Feedforward:
    """The MLP of a block: projections up, an activation, one projection down.

    Args:
        module: our name of the projections up, which are one matrix.
        projections: how many matrices of the MLP's width that is; 2: gate and value.
        saved_widths: so many times the MLP's width of channels a token stay for backward.
        saved_widths_fused: the same where activation and product are one kernel.
        gelu: the activation is a form of GELU.
    """

    module: Literal["up", "gate_up"]
    projections: int
    saved_widths: int
    saved_widths_fused: int
    gelu: bool = False

    @property
    def gated(self) -> bool:
        """Whether the activation of one projection is multiplied with the other."""
        return self.projections == 2


LAYER_NORM = Norm("layer-norm", ("weight", "bias"), statistics=2)
RMS_NORM = Norm("rms-norm", ("weight",), statistics=1, composed_on_cpu=True)
# Gemma 3 (arXiv:2503.19786) saves weights around 0.
RMS_NORM_FROM_ZERO = replace(RMS_NORM, offset=1.0)

Activation = Literal["gelu", "squared_relu", "swiglu", "geglu"]
# Saved: what goes into the activation and what comes out; gated: gate, value and product, and
# unless it is fused also the gate's activation.
FEEDFORWARDS: dict[Activation, Feedforward] = {
    "gelu": Feedforward("up", 1, saved_widths=2, saved_widths_fused=2, gelu=True),
    # So et al. 2021, arXiv:2109.08668
    "squared_relu": Feedforward("up", 1, saved_widths=2, saved_widths_fused=2),
    "swiglu": Feedforward("gate_up", 2, saved_widths=4, saved_widths_fused=3),
    "geglu": Feedforward("gate_up", 2, saved_widths=4, saved_widths_fused=3, gelu=True),
}

# Of a router's products: weights are their softmax, or the sigmoid of each (DeepSeek-V3).
Score = Literal["softmax", "sigmoid"]


@dataclass(frozen=True)
class Routing:
    """How a token finds its experts, with the family's defaults.

    Args:
        score: what is made of the router's products.
        pre_softmax: softmax over all experts; else over the chosen alone.
        normalized: weights of a token's experts sum to 1.
        expert_bias: a bias that only chooses, moved against uneven loads.
        wide: products are in fp32, whatever the activations are in.
        bias: the router and its experts have biases, which are trained.
        clamped: experts' gates and values are kept within limits (gpt-oss).
        experts, chosen, scale, groups, kept_groups: as the job says; 0 groups: none.
    """

    score: Score = "softmax"
    pre_softmax: bool = True
    normalized: bool = True
    expert_bias: bool = False
    wide: bool = False
    bias: bool = False
    clamped: bool = False
    experts: int = 0
    chosen: int = 0
    scale: float = 1.0
    groups: int = 0
    kept_groups: int = 0


# Before a sublayer; after it, before its result is added (OLMo 2, arXiv:2501.00656); both.
NormPlacement = Literal["before", "after", "both"]
# Queries and keys: left as they are; every head by itself (Qwen3, arXiv:2505.09388); all heads of a
# token together (OLMo 2).
QueryKeyNorm = Literal["none", "head", "projection"]


def four_times(hidden_size: int) -> int:
    """The MLP's width of GPT-2 and GPT-NeoX."""
    return 4 * hidden_size


@dataclass(frozen=True)
class ConfigKey:
    """One key of config.json.

    Args:
        name: Hugging Face's.
        attribute: of our `Model`, which has its value, or of a part of it: "moe.num_experts"; "":
            it is always `default`.
        default: what transformers takes where the key is absent or null.
        setting: the key of [models.X] that says it; "" where ours has no choice.
        derived: gives the default from the other keys of config.json.
        other_name: transformers reads this too, and some versions write it.
    """

    name: str
    attribute: str = ""
    default: object = None
    setting: str = ""
    derived: Callable[[Mapping[str, int]], int | None] | None = None
    other_name: str = ""


@dataclass(frozen=True)
class RotaryKeys:
    """Keys of rotary positions in config.json up to transformers 4.

    Args:
        theta: the base of the angles.
        fraction: the part of a head's channels that turns.
        sliding_theta: the base in layers with a window; "": the same.
        by_layer: `rope_parameters` has one table for each kind of layer.
        default, sliding_default: transformers' bases where nothing is said.
    """

    theta: str
    fraction: str
    sliding_theta: str = ""
    by_layer: bool = False
    default: float = 10000.0
    sliding_default: float = 10000.0


@dataclass(frozen=True)
class WindowKeys:
    """How config.json says which layers have a window: `sliding_window` is its size.

    Args:
        default: the size where it is absent.
        by_layer: `layer_types` names the kind of every layer; where it is absent, `switched` or
            the family's pattern decides. Else all layers have the window.
        switched: there is none unless `use_sliding_window`, and then, `by_layer`, from layer
            `max_window_layers` on.
    """

    default: int
    by_layer: bool = True
    switched: bool = False


@dataclass(frozen=True)
class HuggingFace:
    """How transformers names a family's modules and describes its shape.

    Layouts and defaults: transformers, models/*/modeling_*.py and configuration_*.py.

    Args:
        model_type: of its config.json.
        architecture: the class with a language-model head.
        prefix: before all names but the head's; folders saved without a head lack it.
        outside: our modules outside of the blocks, and theirs.
        block: their block N.
        inside: our modules of a block, and theirs; several where ours is fused.
        buffers: what older versions saved besides parameters; it can be computed again.
        keys: of config.json that say the shape.
        dropout: keys of config.json for dropout, and the attribute of `Model`. They are written,
            never compared with a job: dropout is a matter of training, not of the weights.
        rotary: keys of rotary positions; None: positions are learned.
        conv1d: projections are stored (in, out).
        by_head: q, k and v of one head lie together.
        windows: keys of windows; None: every layer sees all.
        experts: our matrices of all experts of a block, and theirs of expert {}; those down
            are stored (in, out) by us. Without {}: one of theirs is of all experts, (experts, in,
            out) with gates and values in turn, and their biases end in _bias.
        vectors: our vectors of a block that are no module's weight there, and theirs.
        further: our modules, besides a block, of what predicts one token more, and theirs in the
            layer after the last; {}: the family has no such layer.
        further_copies: our modules outside of the blocks of which that layer has a copy, and
            theirs.
    """

    model_type: str
    architecture: str
    prefix: str
    outside: Mapping[str, str]
    block: str
    inside: Mapping[str, tuple[str, ...]]
    buffers: re.Pattern[str]
    keys: tuple[ConfigKey, ...]
    dropout: Mapping[str, str]
    rotary: RotaryKeys | None = None
    conv1d: bool = False
    by_head: bool = False
    windows: WindowKeys | None = None
    experts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    vectors: Mapping[str, str] = field(default_factory=dict)
    further: Mapping[str, str] = field(default_factory=dict)
    further_copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """One family of models, with the defaults of its [models.X] tables.

    Parameters and FLOPs follow from these values (trainkit/plan/arithmetic.py).

    Args:
        name: in jobs.toml.
        norm: before attention, before the MLP and after the last block.
        activation: of the MLP.
        bias: projections have biases; the head never has one.
        learned_positions: positions have an embedding; else they are rotary.
        rotary_percent: default part of a head's channels that turns with the position.
        parallel_residual: attention and MLP read the same residual stream unless a job says
            otherwise.
        untied: the head has a weight of its own unless a job says otherwise.
        gelu: the usual form of GELU.
        ffn_width: the MLP's default width for a hidden size.
        settings: keys of [models.X] that not every family has.
        hugging_face: the same model in transformers.
        rotary_base: theta of rotary positions unless a job says otherwise.
        qkv_bias: queries, keys and values have biases whatever `bias` says.
        out_bias: attention's output has one whatever `bias` says.
        sinks: the softmax of each head has one more logit, which is learned.
        norm_placement, query_key_norm: the usual ones.
        sliding_window_pattern: of so many layers the last sees all, where there is a window; 0:
            none does.
        sliding_rotary_base: theta in layers with a window; None: that of the others.
        stretches_windows: rope_scaling is for layers with a window, too.
        embedding_scale: what embeddings are multiplied with, of the hidden size; None: nothing.
        routing: how tokens find experts; None: the family has none.
    """

    name: str
    norm: Norm
    activation: Activation
    bias: bool
    learned_positions: bool
    rotary_percent: float
    parallel_residual: bool
    untied: bool
    gelu: Literal["tanh", "exact"]
    ffn_width: Callable[[int], int]
    settings: frozenset[str]
    hugging_face: HuggingFace
    rotary_base: float = 10000.0
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    norm_placement: NormPlacement = "before"
    query_key_norm: QueryKeyNorm = "none"
    sliding_window_pattern: int = 0
    sliding_rotary_base: float | None = None
    stretches_windows: bool = True
    embedding_scale: Callable[[int], float] | None = None
    routing: Routing | None = None
