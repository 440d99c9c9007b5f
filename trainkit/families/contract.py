"""What a family of models is: how a block is built, what plan counts of it, and how Hugging Face
names and describes it. A family is data; the model itself is trainkit/train/model.

Imports no torch: tables of jobs.toml and plan read families too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Norm:
    """A norm over the channels.

    Args:
        kind: which of torch's.
        parameters: its parameters, each of hidden size.
        statistics: fp32 numbers a token that forward keeps for backward.
        composed_on_cpu: torch has no fused kernel of it on the CPU, and keeps the normalized
            input there too.
    """

    kind: Literal["layer-norm", "rms-norm"]
    parameters: tuple[str, ...]
    statistics: int
    composed_on_cpu: bool = False


@dataclass(frozen=True)
class Feedforward:
    """The MLP of a block: projections up, an activation, one projection down.

    Args:
        module: our name of the projections up, which are one matrix.
        projections: how many matrices of the MLP's width that is; 2: gate and value (SwiGLU).
        saved_widths: so many times the MLP's width of channels a token stay for backward.
        saved_widths_fused: the same where activation and product are one kernel.
    """

    module: Literal["up", "gate_up"]
    projections: int
    saved_widths: int
    saved_widths_fused: int

    @property
    def gated(self) -> bool:
        """Whether the activation of one projection is multiplied with the other."""
        return self.projections == 2


LAYER_NORM = Norm("layer-norm", ("weight", "bias"), statistics=2)
RMS_NORM = Norm("rms-norm", ("weight",), statistics=1, composed_on_cpu=True)
# What goes into GELU and what comes out.
GELU_MLP = Feedforward("up", 1, saved_widths=2, saved_widths_fused=2)
# Gate, value and product; unless it is fused also silu(gate).
SWIGLU_MLP = Feedforward("gate_up", 2, saved_widths=4, saved_widths_fused=3)


def four_times(hidden_size: int) -> int:
    """The MLP's width of GPT-2 and GPT-NeoX."""
    return 4 * hidden_size


@dataclass(frozen=True)
class ConfigKey:
    """One key of config.json.

    Args:
        name: Hugging Face's.
        attribute: of our `Model`, which has its value; "": it is always `default`.
        default: what transformers takes where the key is absent or null.
        setting: the key of [models.X] that says it; "" where ours has no choice.
        derived: gives the default from the other keys of config.json.
    """

    name: str
    attribute: str = ""
    default: object = None
    setting: str = ""
    derived: Callable[[Mapping[str, int]], int] | None = None


@dataclass(frozen=True)
class RotaryKeys:
    """Keys of rotary positions in config.json up to transformers 4.

    Args:
        theta: the base of the angles.
        fraction: the part of a head's channels that turns.
    """

    theta: str
    fraction: str


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


@dataclass(frozen=True)
class Family:
    """One family of models, with the defaults of its [models.X] tables.

    Parameters and FLOPs follow from these values (trainkit/plan/arithmetic.py).

    Args:
        name: in jobs.toml.
        norm: before attention, before the MLP and after the last block.
        mlp: of a block.
        bias: projections have biases; the head never has one.
        learned_positions: positions have an embedding; else they are rotary.
        rotary_percent: default part of a head's channels that turns with the position.
        parallel_residual: attention and MLP read the same residual stream unless a job says
            otherwise.
        untied: the head has a weight of its own unless a job says otherwise.
        gelu: the usual form of GELU; None: the MLP has another activation.
        ffn_width: the MLP's default width for a hidden size.
        settings: keys of [models.X] that not every family has.
        hugging_face: the same model in transformers.
    """

    name: str
    norm: Norm
    mlp: Feedforward
    bias: bool
    learned_positions: bool
    rotary_percent: float
    parallel_residual: bool
    untied: bool
    gelu: Literal["tanh", "exact"] | None
    ffn_width: Callable[[int], int]
    settings: frozenset[str]
    hugging_face: HuggingFace
