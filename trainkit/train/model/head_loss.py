"""The head and its loss in one: logits live a chunk at a time, and their gradient is made while
they are there.

Shapes: N tokens of a micro-batch, C tokens of a chunk, R tokens of a block, H hidden size, V
vocabulary, P vocabulary padded for the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.ops import cross_entropy
from trainkit.ops.cross_entropy import NO_LABEL, SoftmaxLoss
from trainkit.plan.loss_chunks import chunk_tokens


@dataclass(frozen=True)
class Labels:
    """What a loss is taken of.

    Args:
        labels_BS: the token after each, or NO_LABEL.
        z_loss: weight of logsumexp(logits)**2 in the loss that is minimized (PaLM,
            arXiv:2204.02311, section 5).
        scale: factor of the gradient alone, a scalar on the device or a number: 1 / tokens of the
            global batch, times the loss scale of fp16. It enters before the gradient is rounded to
            16 bits, where it must be.
    """

    labels_BS: Tensor
    z_loss: float = 0.0
    scale: Tensor | float = 1.0


class Losses(NamedTuple):
    """Sums over the tokens of a micro-batch, in fp32 or wider. (A tuple, so that hooks around a
    module find the tensors in it.)

    Args:
        objective: what to call backward on: its gradient is that of scale * (cross-entropy + z_loss
            term), its value has no meaning.
        cross_entropy: in nats.
        tokens: how many have a label, int64.
    """

    objective: Tensor
    cross_entropy: Tensor
    tokens: Tensor


def padded(weight_VH: Tensor, multiple: int) -> Tensor:
    """W with rows of zeros up to a multiple of `multiple`; itself where none are missing, for
    F.pad would copy it."""
    missing = -weight_VH.shape[0] % multiple
    return F.pad(weight_VH, (0, 0, 0, missing)) if missing else weight_VH


def padded_linear(x_NH: Tensor, weight_VH: Tensor, multiple: int) -> Tensor:
    """x W^T as (N, V). The product has V rounded up to `multiple` columns, which kernels like;
    the padding is cut off again."""
    return F.linear(x_NH, padded(weight_VH, multiple))[..., : weight_VH.shape[0]]


@dataclass(frozen=True)
class _HeadOptions:
    """How the loss of a head is computed.

    Args:
        multiple: the product has a multiple of so many columns.
        softmax: of a chunk's logits, as `cross_entropy.plain`.
        learning: whether there will be a backward; inside of forward torch does not say.
        widest: W is a part of a larger weight, whose widest part has so many rows; chunks are made
            for that, the same for every part. 0: W is all there is.
    """

    multiple: int
    softmax: SoftmaxLoss
    learning: bool
    widest: int


class _HeadLoss(torch.autograd.Function):
    """Cross-entropy of softmax(x W^T), with the gradients of x and W computed in forward, chunk
    by chunk; W's of several chunks summed in fp32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        x_NH: Tensor,
        weight_VH: Tensor,
        labels_N: Tensor,
        labels: Labels,
        options: _HeadOptions,
    ) -> tuple[Tensor, Tensor]:
        vocab = weight_VH.shape[0]
        learning = options.learning
        wide = torch.promote_types(x_NH.dtype, torch.float32)
        # On the CPU only the product's memory is padded: there it is the distance of its rows that
        # counts, and F.pad copies the weight.
        columns = vocab + -vocab % options.multiple
        weight = weight_VH if x_NH.device.type == "cpu" else padded(weight_VH, options.multiple)
        dx_NH = torch.empty_like(x_NH) if learning else None
        dweight_PH: Tensor | None = None
        entropy = torch.zeros((), dtype=torch.float64, device=x_NH.device)
        scale = torch.as_tensor(labels.scale, dtype=wide, device=x_NH.device)
        chunks = _chunks(len(x_NH), options.widest or columns, x_NH.device.type)
        for inside in chunks:
            # a name for the logits would keep them alive
            dlogits_CP, part = options.softmax(
                _logits(x_NH[inside], weight, columns),
                labels_N[inside],
                vocab,
                labels.z_loss,
                scale,
                learning,
            )
            entropy += part
            if dx_NH is not None:
                dlogits_CP = dlogits_CP[:, : len(weight)]
                torch.mm(dlogits_CP, weight, out=dx_NH[inside])
                if dweight_PH is None:
                    dweight_PH = dlogits_CP.T @ x_NH[inside]
                    if len(chunks) > 1:
                        dweight_PH = dweight_PH.to(wide)
                elif wide == x_NH.dtype:
                    dweight_PH.addmm_(dlogits_CP.T, x_NH[inside])
                else:
                    dweight_PH += dlogits_CP.T @ x_NH[inside]
            del dlogits_CP  # before the next chunk is made
        if dx_NH is not None and dweight_PH is not None:
            if len(dweight_PH) > vocab:  # else no view: autograd adds to it in place
                dweight_PH = dweight_PH[:vocab]
            ctx.save_for_backward(dx_NH, dweight_PH.to(weight_VH.dtype))
        ctx.mark_non_differentiable(entropy)
        return entropy.new_zeros((), dtype=wide), entropy

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        """`upstream` is 1 where backward is called on the objective itself; a multiple of it has
        that multiple of the gradient. Raises RuntimeError where the gradient would be
        differentiated again: it is a constant to autograd."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the gradient of the loss cannot be differentiated: call backward without"
                " create_graph"
            )
        dx_NH, dweight_VH = ctx.saved_tensors
        factor = upstream[0]
        if factor.device.type != "cpu" or factor != 1:  # another device is not waited for
            # in place: W is large
            dx_NH = dx_NH * factor.to(dx_NH.dtype)
            dweight_VH = dweight_VH.mul_(factor.to(dweight_VH.dtype))
        return dx_NH, dweight_VH, None, None, None


def _chunks(tokens: int, columns: int, device_type: str) -> list[slice]:
    """All tokens, in chunks of `chunk_tokens`."""
    size = chunk_tokens(tokens, columns, device_type)
    return [slice(start, start + size) for start in range(0, tokens, size)]


def _logits(x_CH: Tensor, weight: Tensor, columns: int) -> Tensor:
    """x W^T in memory of `columns` columns; those beyond W's rows hold anything."""
    logits_CP = x_CH.new_empty(len(x_CH), columns)
    torch.mm(x_CH, weight.T, out=logits_CP[:, : len(weight)])
    return logits_CP


def head_loss(
    x_BSH: Tensor,
    weight_VH: Tensor,
    labels: Labels,
    multiple: int,
    softmax: SoftmaxLoss = cross_entropy.reference,
    *,
    widest: int = 0,
) -> Losses:
    """The loss of a whole micro-batch. Softmax and sums run in fp32 or wider.

    Args:
        x_BSH: what the last norm made.
        weight_VH: of the head.
        labels: what the loss is taken of.
        multiple: the product has a multiple of so many columns.
        softmax: `cross_entropy.reference`, or what stands for it: a kernel, what a compiler made
            of it, or one that asks for what the other parts of a larger weight make.
        widest: the most rows of such a part; 0: `weight_VH` is all there is.
    """
    labels_N = labels.labels_BS.flatten()
    learning = torch.is_grad_enabled() and (x_BSH.requires_grad or weight_VH.requires_grad)
    objective, entropy = _HeadLoss.apply(
        x_BSH.flatten(0, 1),
        weight_VH,
        labels_N,
        labels,
        _HeadOptions(multiple, softmax, learning, widest),
    )  # type: ignore[no-untyped-call]
    return Losses(objective, entropy, (labels_N != NO_LABEL).sum())


def read_out(
    x_BSH: Tensor,
    weight_VH: Tensor,
    labels: Labels | None,
    multiple: int,
    softmax: SoftmaxLoss = cross_entropy.reference,
) -> Tensor | Losses:
    """What a model ends with: logits, (B, S, V), or, given labels, their summed losses.

    Args:
        x_BSH, weight_VH, multiple, softmax: as of `head_loss`.
        labels: None: logits are wanted.
    """
    if labels is None:
        return padded_linear(x_BSH, weight_VH, multiple)
    return head_loss(x_BSH, weight_VH, labels, multiple, softmax)
