"""Rotary positions (Su et al. 2021, arXiv:2104.09864): how fast pairs of channels turn, and the
tables of it, in the layout of GPT-NeoX and of Hugging Face's Llama: channel i turns with channel
i + R / 2.

Shapes: S tokens of a sample, R channels of a head that turn.
"""

from __future__ import annotations

import math
from typing import assert_never

import torch
from torch import Tensor

from trainkit.jobs.schema import Model, RopeScaling


def frequencies(model: Model, device: torch.device, *, sliding: bool = False) -> Tensor:
    """Radians a token of every pair of channels, fp64: theta ** (-2i / R) for i < R / 2,
    stretched as `rope_scaling` says.

    Args:
        model: the shape.
        device: of the result.
        sliding: in layers with a window, which have a theta of their own.
    """
    rotated = model.rotary_channels
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    theta = model.sliding_theta if sliding else model.theta
    plain = torch.pow(theta, -exponents)
    scaling = model.stretching(sliding)
    return plain if scaling is None else _stretched(plain, theta, scaling)


def _stretched(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """linear: Chen et al. 2023, arXiv:2306.15595. llama3: as Llama 3.1 was published
    (llama-models, apply_scaling), and transformers' `_compute_llama3_parameters`: wavelengths
    below original / high_freq_factor stay, those above original / low_freq_factor are divided,
    between them the two are mixed linearly in original / wavelength. yarn: `_yarn`."""
    divided = plain / scaling.factor
    match scaling.type:
        case "linear":
            return divided
        case "llama3":
            # original / wavelength
            turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
            low = scaling.low_freq_factor
            kept = ((turns - low) / (scaling.high_freq_factor - low)).clamp(0, 1)
            return kept * plain + (1 - kept) * divided
        case "yarn":
            return _yarn(plain, theta, scaling)
        case unknown:
            assert_never(unknown)


def _yarn(plain: Tensor, theta: float, scaling: RopeScaling) -> Tensor:
    """Peng et al. 2023, arXiv:2309.00071, section 3.2, and transformers'
    `_compute_yarn_parameters`: pairs that turn more than beta_fast times in the original length
    stay, those that turn less than beta_slow times are divided, between them the two are mixed
    linearly in the pair's number."""
    last = 2 * len(plain) - 1

    def pair(turns: float) -> float:
        length = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return len(plain) * math.log(length) / math.log(theta)

    low = pair(scaling.beta_fast)
    high = pair(scaling.beta_slow)
    if scaling.truncate:
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, last)
    numbers = torch.arange(len(plain), dtype=torch.float64, device=plain.device)
    # a ramp of no width is a step
    divided = ((numbers - low) / max(high - low, 0.001)).clamp(0, 1)
    return divided * plain / scaling.factor + (1 - divided) * plain


def tables(
    model: Model, positions_S: Tensor, dtype: torch.dtype, *, sliding: bool = False
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (..., S, R) each, in fp32 or wider; both halves of R are the same.
    `sliding` as of `frequencies`."""
    per_token = frequencies(model, positions_S.device, sliding=sliding)
    angles = positions_S[..., None].double() * per_token
    angles = torch.cat([angles, angles], dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    scaling = model.stretching(sliding)
    amplitude = 1.0 if scaling is None else scaling.amplitude
    return (angles.cos() * amplitude).to(wide), (angles.sin() * amplitude).to(wide)
