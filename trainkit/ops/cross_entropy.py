"""Cross-entropy of a chunk of logits, with the gradient in the logits' place: whole, or of the
columns that one rank of a vocabulary-parallel group has.

Shapes: C tokens of a chunk, R tokens of a block, V columns with a logit, P columns in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor

from trainkit.ops.library import declare

NO_LABEL = -100  # a token without a loss
BLOCK_BYTES = 2**20  # of the logits in fp32 that a CPU looks at at once: they stay in its cache
SoftmaxLoss = Callable[[Tensor, Tensor, int, float, Tensor, bool], tuple[Tensor, Tensor]]


def plain(
    logits_CP: Tensor, labels_C: Tensor, vocab: int, z_loss: float, scale: Tensor, learning: bool
) -> tuple[Tensor, Tensor]:
    """(scaled gradient of the chunk's logits in the logits' place, padding included and 0; the
    chunk's summed cross-entropy, fp64).

    All of the loss but its matrix products: memory traffic alone, which a compiler makes one
    kernel of.

    Args:
        logits_CP: they are used up.
        labels_C: of the chunk, or NO_LABEL.
        vocab: V; what other columns hold does not count.
        z_loss: weight of logsumexp(logits)**2 in what the gradient is of.
        scale: factor of the gradient, shape (), in fp32 or wider.
        learning: False: the gradient is not wanted, and nothing is in its place.
    """
    wide_CP = logits_CP.to(torch.promote_types(logits_CP.dtype, torch.float32))
    wide_CP[:, vocab:] = -torch.inf
    counted_C = labels_C != NO_LABEL
    targets_C1 = torch.where(counted_C, labels_C, 0)[:, None]
    target_C = wide_CP.gather(1, targets_C1)[:, 0]
    highest_C1 = wide_CP.amax(1, keepdim=True)
    exp_CP = wide_CP.sub_(highest_C1).exp_()
    sum_C1 = exp_CP.sum(1, keepdim=True)
    logsum_C = (highest_C1 + sum_C1.log())[:, 0]
    entropy = torch.where(counted_C, logsum_C - target_C, 0.0).sum(dtype=torch.float64)
    if not learning:
        return logits_CP.new_empty(0), entropy
    factor_C = counted_C * scale
    # d/dlogits of logsum - target + z * logsum**2 = softmax * (1 + 2 z logsum) - onehot
    exp_CP.mul_((factor_C * (1 + 2 * z_loss * logsum_C) / sum_C1[:, 0])[:, None])
    exp_CP.scatter_add_(1, targets_C1, -factor_C[:, None])
    return logits_CP.copy_(exp_CP), entropy  # in 32 bits it is itself


def in_blocks(softmax: SoftmaxLoss) -> SoftmaxLoss:
    """`softmax`, on the CPU of so few rows at a time that its passes find them in the cache."""

    @wraps(softmax)
    def of_chunk(
        logits_CP: Tensor,
        labels_C: Tensor,
        vocab: int,
        z_loss: float,
        scale: Tensor,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        size = max(1, BLOCK_BYTES // (4 * logits_CP.shape[1]))
        if logits_CP.device.type != "cpu" or len(logits_CP) <= size:
            return softmax(logits_CP, labels_C, vocab, z_loss, scale, learning)
        entropy = torch.zeros((), dtype=torch.float64)
        for start in range(0, len(logits_CP), size):
            logits_RP = logits_CP[start : start + size]
            labels_R = labels_C[start : start + size]
            entropy += softmax(logits_RP, labels_R, vocab, z_loss, scale, learning)[1]
        return logits_CP, entropy

    return of_chunk


reference = in_blocks(plain)


def statistics_reference(logits_CP: Tensor, labels_C: Tensor, vocab: int) -> Tensor:
    """(3, C) in fp32 or wider: of every row the highest logit; the sum of e^(logit - highest),
    or of e^logit where nothing is above -inf; and the label's logit, 0 where the label is not one
    of the `vocab` columns. Arguments as of `plain`."""
    wide = torch.promote_types(logits_CP.dtype, torch.float32)
    logits_CV = logits_CP[:, :vocab].to(wide)
    highest_C = logits_CV.amax(1)
    shift_C = torch.where(highest_C == -torch.inf, 0, highest_C)
    sum_C = (logits_CV - shift_C[:, None]).exp_().sum(1)
    here_C = (labels_C >= 0) & (labels_C < vocab)
    targets_C1 = labels_C.clamp(0, vocab - 1)[:, None]
    target_C = torch.where(here_C, logits_CV.gather(1, targets_C1)[:, 0], 0)
    return torch.stack([highest_C, sum_C, target_C])


def gradient_reference(
    logits_CP: Tensor,
    labels_C: Tensor,
    vocab: int,
    highest_C: Tensor,
    softmax_C: Tensor,
    hit_C: Tensor,
) -> Tensor:
    """e^(logit - highest) * softmax, less `hit` at the label if it is one of the `vocab` columns;
    in the logits' place, padding 0.

    Args:
        logits_CP, labels_C, vocab: as of `plain`.
        highest_C, softmax_C, hit_C: numbers of every row, in fp32 or wider.
    """
    exp_CV = logits_CP[:, :vocab].to(highest_C.dtype, copy=True).sub_(highest_C[:, None]).exp_()
    exp_CV.mul_(softmax_C[:, None])
    here_C = (labels_C >= 0) & (labels_C < vocab)
    targets_C1 = labels_C.clamp(0, vocab - 1)[:, None]
    exp_CV.scatter_add_(1, targets_C1, -(hit_C * here_C)[:, None])
    logits_CP[:, :vocab] = exp_CV
    logits_CP[:, vocab:] = 0
    return logits_CP


loss_ = declare(
    "softmax_loss_(Tensor(a!) logits, Tensor labels, int vocab, float z_loss, Tensor scale,"
    " bool learning) -> Tensor",
    lambda logits, *_: logits.new_empty((), dtype=torch.float64),
)
statistics = declare(
    "softmax_statistics(Tensor logits, Tensor labels, int vocab) -> Tensor",
    lambda logits, labels, vocab: logits.new_empty(
        3, len(labels), dtype=torch.promote_types(logits.dtype, torch.float32)
    ),
)
gradient_ = declare(
    "softmax_gradient_(Tensor(a!) logits, Tensor labels, int vocab, Tensor highest,"
    " Tensor softmax, Tensor hit) -> ()",
    lambda *_: None,
)


def _rows(logits_CP: Tensor) -> Tensor:
    """Logits that can be written row by row: themselves, or a copy."""
    rows, columns = logits_CP.shape
    if logits_CP.stride(1) == 1 and (rows <= 1 or logits_CP.stride(0) >= columns):
        return logits_CP
    return logits_CP.clone(memory_format=torch.contiguous_format)


def fused(
    logits_CP: Tensor, labels_C: Tensor, vocab: int, z_loss: float, scale: Tensor, learning: bool
) -> tuple[Tensor, Tensor]:
    """`plain` in one pass over memory; logits never exist in fp32. On the CPU a label that is
    none of the vocabulary's is refused."""
    logits_CP = _rows(logits_CP)
    entropy = loss_(logits_CP, labels_C.contiguous(), vocab, z_loss, scale, learning)
    return logits_CP, entropy


def statistics_fused(logits_CP: Tensor, labels_C: Tensor, vocab: int) -> Tensor:
    """`statistics_reference` in one pass over memory."""
    found: Tensor = statistics(_rows(logits_CP), labels_C.contiguous(), vocab)
    return found


def gradient_fused(
    logits_CP: Tensor,
    labels_C: Tensor,
    vocab: int,
    highest_C: Tensor,
    softmax_C: Tensor,
    hit_C: Tensor,
) -> Tensor:
    """`gradient_reference` in one pass over memory."""
    logits_CP = _rows(logits_CP)
    gradient_(
        logits_CP,
        labels_C.contiguous(),
        vocab,
        highest_C.contiguous(),
        softmax_C.contiguous(),
        hit_C.contiguous(),
    )
    return logits_CP


def bytes_moved(rows: int, columns: int, dtype: torch.dtype) -> int:
    """The least that the loss of a chunk moves: logits are read once and their gradient written
    once; labels are read."""
    return rows * columns * 2 * dtype.itemsize + rows * 8
