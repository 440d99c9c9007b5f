"""Rotary positions (Su et al. 2021, arXiv:2104.09864) in the layout of GPT-NeoX and of Hugging
Face's Llama: channel i turns with channel i + R / 2.

Shapes: S tokens (or B, S where every sample has its own positions), R channels of a head that
turn, B, A, D as in attention.py.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from trainkit.jobs.schema import Model, RopeScaling


def frequencies(model: Model, device: torch.device) -> Tensor:
    """Radians a token of every pair of channels, fp64: theta ** (-2i / R) for i < R / 2,
    stretched as `rope_scaling` says."""
    rotated = model.rotary_channels
    exponents = torch.arange(0, rotated, 2, dtype=torch.float64, device=device) / rotated
    plain = (model.rotary_base or 10000.0) ** -exponents
    if model.rope_scaling is None:
        return plain
    return _stretched(plain, model.rope_scaling)


def _stretched(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """linear: Chen et al. 2023, arXiv:2306.15595. llama3: as Llama 3.1 was published
    (llama-models, apply_scaling), and transformers' `_compute_llama3_parameters`: wavelengths
    below original / high_freq_factor stay, those above original / low_freq_factor are divided,
    between them the two are mixed linearly in original / wavelength."""
    divided = plain / scaling.factor
    if scaling.type == "linear":
        return divided
    # original / wavelength
    turns = scaling.original_max_position_embeddings * plain / (2 * math.pi)
    kept = (
        (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    ).clamp(0, 1)
    return kept * plain + (1 - kept) * divided


def tables(model: Model, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (..., S, R) each, in fp32 or wider; both halves of R are the same."""
    angles = positions_S[..., None].double() * frequencies(model, positions_S.device)
    angles = torch.cat([angles, angles], dim=-1)
    wide = torch.promote_types(dtype, torch.float32)
    return angles.cos().to(wide), angles.sin().to(wide)
