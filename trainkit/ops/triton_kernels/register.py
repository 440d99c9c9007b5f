"""Gives the operations their implementations for CUDA devices. trainkit/ops/library.py imports this
when a process first computes on one; kernels are compiled when they are first launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from trainkit.ops.library import LIBRARY
from trainkit.ops.triton_kernels import (
    activations,
    adamw,
    cross_entropy,
    norms,
    rotary,
    scaled_softmax,
)

IMPLEMENTATIONS: tuple[Callable[..., Any], ...] = (
    norms.rms_norm,
    norms.rms_norm_backward,
    norms.add_rms_norm,
    norms.add_rms_norm_backward,
    norms.layer_norm,
    norms.layer_norm_backward,
    norms.add_layer_norm,
    norms.add_layer_norm_backward,
    activations.swiglu,
    activations.swiglu_backward,
    activations.geglu,
    activations.geglu_backward,
    activations.gelu,
    activations.gelu_backward,
    activations.bias_gelu,
    activations.bias_gelu_backward,
    rotary.rotate_qkv,
    rotary.rotate_qkv_backward,
    rotary.norm_rotate_qkv,
    rotary.norm_rotate_qkv_backward,
    cross_entropy.softmax_loss_,
    cross_entropy.softmax_statistics,
    cross_entropy.softmax_gradient_,
    adamw.squared_norm,
    adamw.adamw_step_,
    scaled_softmax.scaled_causal_softmax,
    scaled_softmax.scaled_masked_softmax,
    scaled_softmax.scaled_softmax_backward,
)


def register() -> None:
    """A function computes the operation of its name."""
    for function in IMPLEMENTATIONS:
        LIBRARY.impl(function.__name__, _where_its_tensors_are(function), "CUDA")


def _where_its_tensors_are(function: Callable[..., Any]) -> Callable[..., Any]:
    """Triton launches on the current device, which need not be that of the tensors."""

    @wraps(function)
    def launched(*arguments: Any) -> Any:
        with torch.cuda.device(next(_tensors(arguments)).device):
            return function(*arguments)

    return launched


def _tensors(arguments: Any) -> Iterator[Tensor]:
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from _tensors(argument)
