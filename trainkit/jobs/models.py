"""The shape of a model. Key names are Megatron's, where it has one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from trainkit.families import FAMILIES
from trainkit.families.contract import (
    FEEDFORWARDS,
    Activation,
    Family,
    Feedforward,
    NormPlacement,
    QueryKeyNorm,
    Routing,
)
from trainkit.jobs.experts import Experts, check_routing, routing_of
from trainkit.jobs.latent import Latent, check_latent
from trainkit.jobs.model_rules import check_parametrization, check_windows
from trainkit.jobs.rope_scaling import RopeScaling
from trainkit.jobs.table import NAME, Table, wrong


def varlen_fits(head_size: int) -> bool:
    """Whether the variable-length attention kernel has heads of this size (FlashAttention 2, as in
    torch.nn.attention.varlen)."""
    return head_size % 8 == 0 and head_size <= 256


FamilyName = Literal[
    "gpt", "gpt-neox", "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "gemma3",
    "mixtral", "olmoe", "qwen3-moe", "deepseek-v3", "gpt-oss",
]  # fmt: skip
InitMethod = Literal["normal", "scaled", "small_init", "wang_init"]


class Model(Table):
    """The shape of a model. What is left out has its family's usual value, which the properties
    below give."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    family: FamilyName = Field(
        "gpt", description="gives the usual value of what is left out; docs/models.md compares them"
    )
    num_layers: int = Field(ge=1, le=10_000, description="transformer blocks")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(
        ge=1,
        description=("attention heads; must divide hidden_size unless kv_channels or mla is given"),
    )
    num_query_groups: int | None = Field(
        None, ge=1, description="heads of keys and values; by default num_attention_heads"
    )
    kv_channels: int | None = Field(
        None, ge=1, description="channels of a head; by default hidden_size / num_attention_heads"
    )
    ffn_hidden_size: int | None = Field(
        None,
        ge=1,
        description=(
            "width of the MLP; by default 4 * hidden_size, gated: two thirds of it in steps of 64"
        ),
    )
    seq_length: int = Field(ge=1, description="tokens of one sample")
    max_position_embeddings: int | None = Field(
        None,
        ge=1,
        description=(
            "learned positions, or the longest text rotary ones are for; by default seq_length"
        ),
    )
    vocab_size: int | None = Field(
        None, ge=2, description="by default that of the dataset's tokenizer"
    )
    make_vocab_size_divisible_by: int = Field(
        128,
        ge=1,
        description=(
            "the head's product is padded to such a multiple; padding is never sampled, saved or in"
            " the loss"
        ),
    )
    untie_embeddings_and_output_weights: bool | None = Field(
        None, description="a head of its own; by default false for gpt and gemma3, else true"
    )
    rotary_percent: float | None = Field(
        None,
        gt=0,
        le=1,
        description="part of a head's channels that is rotated (gpt-neox); by default 0.25",
    )
    rotary_base: float | None = Field(
        None, gt=1, description="theta of rotary positions; by default the family's"
    )
    rope_scaling: RopeScaling | None = Field(
        None,
        description=(
            "stretching of rotary positions; olmo3 and gemma3 have it in layers without a window"
        ),
    )
    sliding_window: int | None = Field(
        None,
        ge=1,
        description="a token sees so many tokens, itself among them, in layers with a window",
    )
    sliding_window_pattern: int | None = Field(
        None,
        ge=0,
        description=(
            "of so many layers the last has no window; 0: all have it; by default 2 for gpt-oss,"
            " 4 for olmo3, 6 for gemma3, else 0"
        ),
    )
    sliding_rotary_base: float | None = Field(
        None,
        gt=1,
        description="theta in layers with a window; by default 10000 for gemma3, else rotary_base",
    )
    qk_norm: QueryKeyNorm | None = Field(
        None,
        description=(
            "RMSNorm of queries and keys before they turn: of each head, or of the whole"
            " projection; by default head for qwen3 and gemma3, projection for olmo2 and olmo3"
        ),
    )
    query_pre_attn_scalar: int | None = Field(
        None,
        ge=1,
        description="scores are divided by its square root; by default the channels of a head",
    )
    norm_placement: NormPlacement | None = Field(
        None,
        description=(
            "before attention and MLP, after them (olmo2, olmo3), or both (gemma3); by default"
            " before"
        ),
    )
    add_qkv_bias: bool | None = Field(
        None,
        description="biases of queries, keys and values alone; by default true for qwen2 and"
        " gpt-oss",
    )
    embedding_scale: float | None = Field(
        None,
        gt=0,
        description="embeddings are multiplied by it; by default sqrt(hidden_size) for gemma3",
    )
    activation: Activation | None = Field(
        None,
        description=(
            "of the MLP; by default gelu for gpt and gpt-neox, geglu for gemma3, else swiglu"
        ),
    )
    gpt_j_residual: bool | None = Field(
        None, description="attention and MLP side by side (gpt-neox); by default true"
    )
    gpt_j_tied: bool = Field(
        False, description="attention and MLP share one norm (gpt-neox with gpt_j_residual)"
    )
    gelu: Literal["tanh", "exact"] | None = Field(
        None,
        description=(
            "form of GELU; by default exact for gpt-neox (20B was trained with tanh), else tanh"
        ),
    )
    mla: Latent | None = Field(None, description="attention by latents (deepseek-v3)")
    moe: Experts | None = Field(None, description="experts in place of MLPs (qwen3-moe, ...)")
    mtp_num_layers: int | None = Field(
        None, ge=1, le=1, description="modules that predict one token more (deepseek-v3)"
    )
    mtp_loss_scaling_factor: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="weight of their loss beside the other; by default 0.1",
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    hidden_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout of embeddings and of what is added to the residual stream",
    )
    parametrization: Literal["standard", "mup"] = Field(
        "standard",
        description=(
            "mup: deviations and learning rates that suit mup_base_hidden_size suit every other"
            " width (Yang et al. 2022)"
        ),
    )
    mup_base_hidden_size: int | None = Field(
        None, ge=1, description="mup: hidden_size of the model that they were tuned on"
    )
    mup_base_kv_channels: int | None = Field(
        None,
        ge=1,
        description="mup: channels of a head of that model, where they grow with the width, too",
    )
    init_method: InitMethod = Field(
        "normal", description="normal: init_method_std; small_init: sqrt(2 / (5 * hidden_size))"
    )
    output_layer_init_method: InitMethod = Field(
        "scaled",
        description=(
            "of output projections; scaled: init_method_std / sqrt(2 * num_layers); wang_init: 2 /"
            " (num_layers * sqrt(hidden_size))"
        ),
    )
    init_method_std: float = Field(
        0.02, gt=0, description="standard deviation of initial weights under normal and scaled"
    )
    layernorm_epsilon: float = Field(1e-5, gt=0, description="epsilon of LayerNorm and RMSNorm")

    @model_validator(mode="after")
    def _fits(self) -> Model:
        shaped = self.kv_channels or self.mla
        if not shaped and self.hidden_size % self.num_attention_heads:
            raise wrong(
                "num_attention_heads",
                f"hidden_size {self.hidden_size} does not divide by num_attention_heads"
                f" {self.num_attention_heads}",
            )
        if self.num_attention_heads % self.query_groups:
            raise wrong(
                "num_query_groups",
                f"num_attention_heads {self.num_attention_heads} does not divide by"
                f" num_query_groups {self.num_query_groups}",
            )
        if (
            self.max_position_embeddings is not None
            and self.max_position_embeddings < self.seq_length
        ):
            raise wrong(
                "max_position_embeddings",
                f"max_position_embeddings {self.max_position_embeddings} is below seq_length"
                f" {self.seq_length}",
            )
        for key in type(self).model_fields:
            families = [name for name, family in FAMILIES.items() if key in family.settings]
            if families and self.family not in families and getattr(self, key):
                raise wrong(
                    key, f"{key} is for family {' and '.join(families)}, not {self.family!r}"
                )
        self._refuse_alone()
        check_latent(dict(self), self.architecture)
        check_routing(dict(self), self.architecture)
        if self.gpt_j_tied and not self.parallel_residual:
            raise wrong(
                "gpt_j_tied",
                "gpt_j_tied needs gpt_j_residual: one after the other, attention and MLP see"
                " different inputs",
            )
        learned = self.architecture.learned_positions
        if not learned and (self.rotary_channels % 2 or not self.rotary_channels):
            raise wrong(
                "rotary_percent",
                f"{self.rotary_channels} of {self.head_size} channels would be rotated; rotary"
                " positions turn pairs of channels",
            )
        return self

    def _refuse_alone(self) -> None:
        """Keys that say nothing, or nothing good, without another."""
        check_windows(dict(self), self.architecture)
        check_parametrization(dict(self), self.architecture, self.head_size)
        if self.mtp_loss_scaling_factor is not None and self.mtp_num_layers is None:
            key = "mtp_loss_scaling_factor"
            raise wrong(key, f"{key} without mtp_num_layers: there is no such loss")
        if self.gelu is not None and not self.mlp.gelu:
            raise wrong("gelu", f"the MLP's activation is {self.activation or 'another'}, not GELU")
        if self.architecture.sinks and self.attention_dropout:
            raise wrong(
                "attention_dropout",
                f"attention_dropout is not for family {self.family!r}, whose attention has sinks",
            )
        if self.parallel_residual and self.placement != "before":
            raise wrong(
                "norm_placement",
                f"norm_placement {self.placement!r} with gpt_j_residual: side by side, both"
                " read what one norm before them made",
            )

    @property
    def width_factor(self) -> float:
        """How many times wider than the model that deviations and rates were tuned on."""
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def architecture(self) -> Family:
        """What `family` names."""
        return FAMILIES[self.family]

    @property
    def head_size(self) -> int:
        """Channels of one attention head; of its queries and keys, where values have fewer."""
        if self.mla is not None:
            return self.mla.head_size
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        """Heads of keys and values."""
        return self.num_query_groups or self.num_attention_heads

    @property
    def ffn_width(self) -> int:
        """Width of the MLP."""
        return self.ffn_hidden_size or self.architecture.ffn_width(self.hidden_size)

    @property
    def mlp(self) -> Feedforward:
        """Projections and activation of the MLP."""
        return FEEDFORWARDS[self.activation or self.architecture.activation]

    @property
    def routing(self) -> Routing:
        """How tokens find experts in layers that have them."""
        usual = self.architecture.routing
        assert usual is not None and self.moe is not None
        return routing_of(self.moe, usual)

    def sparse(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has experts."""
        return self.moe is not None and layer >= self.moe.first_dense_layers

    @property
    def blocks(self) -> int:
        """Transformer blocks, with that of the module that predicts one token more, the last."""
        return self.num_layers + (self.mtp_num_layers or 0)

    @property
    def gelu_form(self) -> Literal["tanh", "exact"] | None:
        """Form of GELU; None where the MLP has another activation."""
        return self.gelu or self.architecture.gelu if self.mlp.gelu else None

    @property
    def qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        if self.add_qkv_bias is None:
            return self.architecture.bias or self.architecture.qkv_bias
        return self.architecture.bias or self.add_qkv_bias

    @property
    def traits(self) -> dict[str, object]:
        """What a block of GPT-2, GPT-NeoX or Llama has not, by the keys that say it."""
        found: dict[str, object] = {
            "qk_norm": self.query_key_norm,
            "norm_placement": self.placement,
            "add_qkv_bias": self.qkv_bias and not self.architecture.bias,
            "sliding_window": self.sliding_window,
            "embedding_scale": self.embedding_factor,
            "query_pre_attn_scalar": self.query_scalar,
            "activation": self.activation or self.architecture.activation,
            "norm_offset": self.architecture.norm.offset,
            "mla": self.mla is not None,
            "moe": self.moe is not None,
        }
        plain: dict[str, object] = {
            "qk_norm": "none",
            "norm_placement": "before",
            "add_qkv_bias": False,
            "sliding_window": None,
            "embedding_scale": 1.0,
            "query_pre_attn_scalar": self.head_size,
            "activation": "swiglu" if self.mlp.gated else "gelu",
            "norm_offset": 0.0,
            "mla": False,
            "moe": False,
        }
        return {key: value for key, value in found.items() if value != plain[key]}

    @property
    def departures(self) -> dict[str, object]:
        """Traits, and an activation, that are not its family's."""
        known = {*type(self).model_fields} - {"mla", "moe"}
        keys = {*self.traits, "activation", "mup_base_kv_channels"} & known
        usual = self.model_copy(update=dict.fromkeys(keys))
        found = {key: value for key, value in self.traits.items() if usual.traits.get(key) != value}
        if self.activation not in (None, self.architecture.activation):
            found["activation"] = self.activation
        return found

    @property
    def placement(self) -> NormPlacement:
        """Where the norms of a block are."""
        return self.norm_placement or self.architecture.norm_placement

    @property
    def norms(self) -> tuple[str, ...]:
        """The norms of a block over the residual stream's channels, by their names in the model:
        attention and MLP share one under gpt_j_tied."""
        if self.gpt_j_tied:
            return ("attention_norm",)
        before = ("attention_norm", "mlp_norm")
        after = ("post_attention_norm", "post_mlp_norm")
        return {"before": before, "after": after, "both": before + after}[self.placement]

    @property
    def query_key_norm(self) -> QueryKeyNorm:
        """Norm of queries and keys."""
        return self.qk_norm or self.architecture.query_key_norm

    def slides(self, layer: int) -> bool:
        """Whether a layer, counted from 0, has a window."""
        if self.sliding_window is None:
            return False
        every = self.sliding_window_pattern
        if every is None:
            every = self.architecture.sliding_window_pattern
        return every == 0 or (layer + 1) % every != 0

    def window(self, layer: int) -> int:
        """Tokens that a token of a layer sees, itself among them; 0: all before it."""
        return self.sliding_window or 0 if self.slides(layer) else 0

    @property
    def sliding_layers(self) -> int:
        """Layers with a window."""
        return sum(map(self.slides, range(self.num_layers)))

    @property
    def theta(self) -> float:
        """Base of rotary positions, in layers without a window."""
        return self.rotary_base or self.architecture.rotary_base

    @property
    def sliding_theta(self) -> float:
        """Base of rotary positions in layers with a window."""
        return self.sliding_rotary_base or self.architecture.sliding_rotary_base or self.theta

    def stretching(self, sliding: bool) -> RopeScaling | None:
        """How rotary positions are stretched in layers without a window, or (`sliding`) with."""
        if sliding and not self.architecture.stretches_windows:
            return None
        return self.rope_scaling

    @property
    def query_scalar(self) -> int:
        """The number by whose square root scores are divided."""
        if self.mup_base_kv_channels is not None:
            # muP, table 8: 1 / head size, equal to the usual at the base
            return self.head_size**2 // self.mup_base_kv_channels
        return self.query_pre_attn_scalar or self.head_size

    @property
    def score_scale(self) -> float | None:
        """What products of queries and keys are multiplied with; None: 1 / sqrt(head size)."""
        stretched = self.rope_scaling if self.mla else None
        factor = stretched.score_factor if stretched else 1.0
        if self.query_scalar == self.head_size and factor == 1:
            return None
        return float(self.query_scalar**-0.5 * factor)

    @property
    def embedding_factor(self) -> float:
        """What embeddings are multiplied with."""
        scale = self.architecture.embedding_scale
        return self.embedding_scale or (scale(self.hidden_size) if scale else 1.0)

    @property
    def positions(self) -> int:
        """Longest text the model can read."""
        return self.max_position_embeddings or self.seq_length

    @property
    def untied(self) -> bool:
        """Whether the head has a weight of its own."""
        given = self.untie_embeddings_and_output_weights
        return self.architecture.untied if given is None else given

    @property
    def tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return not self.untied

    @property
    def parallel_residual(self) -> bool:
        """Whether attention and MLP read the same residual stream."""
        return self.architecture.parallel_residual and self.gpt_j_residual is not False

    @property
    def rotary_channels(self) -> int:
        """Channels of a head that are rotated; 0 for learned positions. Rounded down as GPT-NeoX
        does: int(head_size * rotary_percent)."""
        if self.mla is not None:
            return self.mla.qk_pos_emb_head_dim
        return int(self.head_size * self.rotary_fraction)

    @property
    def rotary_fraction(self) -> float:
        """Part of a head's channels that is rotated; 0 for learned positions."""
        return self.rotary_percent or self.architecture.rotary_percent
