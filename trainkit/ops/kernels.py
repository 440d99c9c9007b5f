"""Which implementation of each operation a job computes with: the one seam between the model, the
trainer and the kernels. What computes the fused ones is loaded here, once a process: for CPUs the
library that `invoke build` compiles from csrc/kernels, for CUDA devices the Triton kernels.

A model is given a `Kernels` and calls its fields; it never asks which one it has.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from trainkit.base.documents import document
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.toolchain import triton_objection
from trainkit.jobs.schema import Job
from trainkit.ops import (
    adamw,
    causal_attention,
    cross_entropy,
    gelu,
    layer_norm,
    rms_norm,
    rotary,
    scaled_softmax,
    swiglu,
)
from trainkit.ops.build import LIBRARY_FILE, origin_of, why_unusable

Wanted = Literal["auto", "reference", "fused"]
_lock = threading.Lock()


@dataclass(frozen=True)
class Kernels:
    """One implementation of every operation.

    Args:
        name: "reference", "fused", or "fused-around-graphs".
        rms_norm: (x, weight, eps) -> y.
        add_rms_norm: (x, residual, weight, eps) -> (y, x + residual).
        layer_norm: (x, weight, bias, eps) -> y.
        add_layer_norm: (x, residual, weight, bias, eps) -> (y, x + residual).
        rotate_qkv: (qkv, cosines, sines, heads, groups) -> (q, k, v), as `rotary.reference`.
        norm_rotate_qkv: (qkv, weights, cosines, sines, heads, groups, eps) -> (q, k, v), as
            `rotary.normed_reference`.
        swiglu: (gate_up) -> silu(gate) * up.
        geglu: (gate_up, approximate) -> gelu(gate) * up.
        gelu: (x, approximate) -> y.
        bias_gelu: (x, bias, approximate) -> gelu(x + bias).
        causal_attention: (q, k, v) -> y, each (B, heads, S, D).
        softmax_loss: cross-entropy and its gradient, as `cross_entropy.plain`.
        scaled_causal_softmax: (x, scale) -> y.
        scaled_masked_softmax: (x, mask, scale) -> y.
        softmax_statistics, softmax_gradient: the two passes of it where the vocabulary is split,
            as `cross_entropy.statistics_reference` and `gradient_reference`.
        adamw: one update of many weights, as `adamw.reference`.
        squared_norm: of many tensors together, fp64.
    """

    name: Literal["reference", "fused", "fused-around-graphs"]
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    add_layer_norm: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_qkv: Callable[[Tensor, Tensor, Tensor, int, int], rotary.Parts]
    norm_rotate_qkv: Callable[[Tensor, Tensor, Tensor, Tensor, int, int, float], rotary.Parts]
    swiglu: Callable[[Tensor], Tensor]
    geglu: Callable[[Tensor, str], Tensor]
    gelu: Callable[[Tensor, str], Tensor]
    bias_gelu: Callable[[Tensor, Tensor, str], Tensor]
    scaled_causal_softmax: Callable[[Tensor, float], Tensor]
    scaled_masked_softmax: Callable[[Tensor, Tensor, float], Tensor]
    causal_attention: causal_attention.CausalAttention
    softmax_loss: cross_entropy.SoftmaxLoss
    softmax_statistics: Callable[[Tensor, Tensor, int], Tensor]
    softmax_gradient: Callable[[Tensor, Tensor, int, Tensor, Tensor, Tensor], Tensor]
    adamw: adamw.Update
    squared_norm: Callable[[Sequence[Tensor]], Tensor]


REFERENCE = Kernels(
    "reference",
    rms_norm=rms_norm.reference,
    add_rms_norm=rms_norm.add_reference,
    layer_norm=layer_norm.reference,
    add_layer_norm=layer_norm.add_reference,
    rotate_qkv=rotary.reference,
    norm_rotate_qkv=rotary.normed_reference,
    swiglu=swiglu.reference,
    geglu=swiglu.geglu_reference,
    gelu=gelu.reference,
    bias_gelu=gelu.bias_reference,
    scaled_causal_softmax=scaled_softmax.causal_reference,
    scaled_masked_softmax=scaled_softmax.reference,
    causal_attention=causal_attention.reference,
    softmax_loss=cross_entropy.reference,
    softmax_statistics=cross_entropy.statistics_reference,
    softmax_gradient=cross_entropy.gradient_reference,
    adamw=adamw.reference,
    squared_norm=adamw.norm_reference,
)
FUSED = Kernels(
    "fused",
    rms_norm=rms_norm.fused,
    add_rms_norm=rms_norm.add_fused,
    layer_norm=layer_norm.fused,
    add_layer_norm=layer_norm.add_fused,
    rotate_qkv=rotary.fused,
    norm_rotate_qkv=rotary.normed_fused,
    swiglu=swiglu.fused,
    geglu=swiglu.geglu_fused,
    gelu=gelu.fused,
    bias_gelu=gelu.bias_fused,
    scaled_causal_softmax=scaled_softmax.causal_fused,
    scaled_masked_softmax=scaled_softmax.fused,
    causal_attention=causal_attention.fused,
    softmax_loss=cross_entropy.fused,
    softmax_statistics=cross_entropy.statistics_fused,
    softmax_gradient=cross_entropy.gradient_fused,
    adamw=adamw.fused,
    squared_norm=adamw.norm_fused,
)
# of a GPU where whole blocks are compiled: there the compiler's kernels took no longer for GPT-2,
# and the GPU waited less between them (docs/benchmarks.md, "On one H200"); the loss and the update
# are in no graph
AROUND_GRAPHS = replace(
    REFERENCE,
    name="fused-around-graphs",
    softmax_loss=cross_entropy.fused,
    softmax_statistics=cross_entropy.statistics_fused,
    softmax_gradient=cross_entropy.gradient_fused,
    adamw=adamw.fused,
    squared_norm=adamw.norm_fused,
)


class Unavailable(TrainkitError):
    """There are no fused operations for a kind of device; the message says why, the hint how to
    get them."""

    def __init__(self, why: str, hint: str) -> None:
        super().__init__(why, exit=Exit.STAGE_STALE, hint=hint)


def load(device_type: str) -> None:
    """Make the operations work on devices of a type: "cpu" or "cuda". The first call of a process
    does the work. Raises Unavailable."""
    with _lock:
        _load(device_type)


@cache
def _load(device_type: str) -> None:
    if device_type == "cpu":
        if why := why_unusable(LIBRARY_FILE, torch.__version__):
            raise Unavailable(why, "compile them: ./inv build")
        try:
            torch.ops.load_library(str(LIBRARY_FILE))  # type: ignore[no-untyped-call]
        except OSError as error:
            raise Unavailable(
                f"{LIBRARY_FILE} cannot be loaded: {error}", "compile it again: ./inv build --force"
            ) from None
    elif device_type == "cuda":
        if why := triton_objection():
            raise Unavailable(why, "kernels = 'reference' needs no Triton")
        try:
            from trainkit.ops.triton_kernels.register import register
        except ModuleNotFoundError as error:
            raise Unavailable(
                f"fused operations for GPUs need {error.name}, which is not installed",
                "it comes with CUDA builds of torch: install one",
            ) from None
        register()
    else:
        raise Unavailable(
            f"there are no fused operations for devices of type {device_type!r}",
            "kernels = 'reference' runs on all of them",
        )


@dataclass(frozen=True)
class Choice:
    """What `choose` found.

    Args:
        kernels: to compute with.
        because: why not the fused ones, where nobody asked for the others; else "".
    """

    kernels: Kernels
    because: str = ""

    def __str__(self) -> str:
        """The line of a log."""
        if self.because:
            return f"kernels: {self.kernels.name}, because {self.because}"
        return f"kernels: {self.kernels.name}"

    def document(self, wanted: Wanted) -> dict[str, object]:
        """The record of a run: what was wanted, what is used and why, and from what it was made."""
        made = origin_of(LIBRARY_FILE)
        return document(
            "kernels/1",
            wanted=wanted,
            used=self.kernels.name,
            because=self.because,
            origin=None if made is None else asdict(made),
        )


def choose(wanted: Wanted, device_type: str, *, graphs: bool = False) -> Choice:
    """The kernels of a process.

    Args:
        wanted: a job's `kernels`.
        device_type: "cpu" or "cuda".
        graphs: whole blocks are compiled.

    Raises:
        Unavailable: "fused" is wanted and is not there.
    """
    if wanted == "reference":
        return Choice(REFERENCE)
    try:
        load(device_type)
    except Unavailable as error:
        if wanted == "fused":
            raise
        return Choice(REFERENCE, f"{error.message}; {error.hint}")
    if wanted == "auto" and graphs and device_type == "cuda":
        return Choice(AROUND_GRAPHS)
    return Choice(FUSED)


def choose_for(job: Job) -> Choice:
    """The kernels of a job's ranks. A block with experts is compiled in parts. Raises
    Unavailable."""
    whole = job.training.compile and job.model.moe is None
    return choose(job.kernels, job.cluster.device_type, graphs=whole)
