"""The shape of a model. Key names are Megatron's, where it has one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from trainkit.families import FAMILIES
from trainkit.families.contract import Family
from trainkit.jobs.table import NAME, Table, wrong


def varlen_fits(head_size: int) -> bool:
    """Whether the variable-length attention kernel has heads of this size (FlashAttention 2, as in
    torch.nn.attention.varlen)."""
    return head_size % 8 == 0 and head_size <= 256


class RopeScaling(Table):
    """How rotary positions are stretched beyond the length a model was first trained on. Keys
    are Hugging Face's."""

    type: Literal["linear", "llama3"] = Field(
        description=(
            "linear: every position divided by factor; llama3: only low frequencies (Llama 3.1)"
        )
    )
    factor: float = Field(gt=1, description="how many times longer")
    low_freq_factor: float = Field(
        1.0,
        gt=0,
        description=(
            "llama3: wavelengths above original_max_position_embeddings / this are divided in full"
        ),
    )
    high_freq_factor: float = Field(
        4.0,
        gt=0,
        description=(
            "llama3: wavelengths below original_max_position_embeddings / this stay as they are"
        ),
    )
    original_max_position_embeddings: int = Field(
        8192, ge=1, description="llama3: the length before stretching"
    )

    @model_validator(mode="after")
    def _ordered(self) -> RopeScaling:
        if self.high_freq_factor <= self.low_freq_factor:
            raise wrong(
                "high_freq_factor",
                f"high_freq_factor {self.high_freq_factor} is not above low_freq_factor"
                f" {self.low_freq_factor}",
            )
        return self


InitMethod = Literal["normal", "scaled", "small_init", "wang_init"]


class Model(Table):
    """The shape of a model. What is left out has its family's usual value, which the properties
    below give."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    family: Literal["gpt", "gpt-neox", "llama"] = Field(
        "gpt",
        description=(
            "gpt: learned positions, tied; gpt-neox: rotary, parallel residual; llama: RMSNorm,"
            " SwiGLU, grouped queries"
        ),
    )
    num_layers: int = Field(ge=1, le=10_000, description="transformer blocks")
    hidden_size: int = Field(ge=1, description="width of the residual stream")
    num_attention_heads: int = Field(
        ge=1, description="attention heads; must divide hidden_size unless kv_channels is given"
    )
    num_query_groups: int | None = Field(
        None, ge=1, description="heads of keys and values (llama); by default num_attention_heads"
    )
    kv_channels: int | None = Field(
        None, ge=1, description="channels of a head; by default hidden_size / num_attention_heads"
    )
    ffn_hidden_size: int | None = Field(
        None,
        ge=1,
        description=(
            "width of the MLP; by default 4 * hidden_size, llama: two thirds of it in steps of 64"
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
        None, description="a head of its own; by default false for gpt, true for the others"
    )
    rotary_percent: float | None = Field(
        None,
        gt=0,
        le=1,
        description="part of a head's channels that is rotated (gpt-neox); by default 0.25",
    )
    rotary_base: float | None = Field(
        None, gt=1, description="theta of rotary positions; by default 10000"
    )
    rope_scaling: RopeScaling | None = Field(
        None, description="stretching of rotary positions (llama)"
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
            "form of GELU; by default tanh for gpt, exact for gpt-neox (20B was trained with tanh)"
        ),
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1, description="dropout of attention weights")
    hidden_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="dropout of embeddings and of what is added to the residual stream",
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
        if self.kv_channels is None and self.hidden_size % self.num_attention_heads:
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

    @property
    def architecture(self) -> Family:
        """What `family` names."""
        return FAMILIES[self.family]

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
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
    def gelu_form(self) -> Literal["tanh", "exact"] | None:
        """Form of GELU; None where the MLP has another activation."""
        return self.gelu or self.architecture.gelu

    @property
    def positions(self) -> int:
        """Longest text the model can read."""
        return self.max_position_embeddings or self.seq_length

    @property
    def untied(self) -> bool:
        """Whether the head has a weight of its own."""
        given = self.untie_embeddings_and_output_weights
        if given is None:
            return self.architecture.untied
        return given

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
        return int(self.head_size * self.rotary_fraction)

    @property
    def rotary_fraction(self) -> float:
        """Part of a head's channels that is rotated; 0 for learned positions."""
        return self.rotary_percent or self.architecture.rotary_percent
