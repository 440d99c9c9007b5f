"""The head and its loss where each tensor-parallel rank holds some rows of the vocabulary:
logits of one token never lie on one rank.

Shapes: C tokens of a chunk, H hidden size, V rows of the whole vocabulary, P columns of this
rank's logits in memory.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.jobs.ranks import share_of_rank
from trainkit.train.model.head_loss import NO_LABEL, Labels, Losses, head_loss, padded_linear
from trainkit.train.parallel.tensor_group import TensorGroup, enter
from trainkit.train.torch_compat import gathered, summed


def read_out(
    x_BSH: Tensor,
    weight: Tensor,
    labels: Labels | None,
    multiple: int,
    *,
    group: TensorGroup,
    vocab: int,
) -> Tensor | Losses:
    """As loss.read_out, of this rank's rows `weight`: whole logits, or the losses over the whole
    vocabulary, the same on all ranks.

    Args:
        group: the ranks that share the vocabulary.
        vocab: V.
    """
    x_BSH = enter(x_BSH, group)
    shares = [share_of_rank(vocab, group.size, rank) for rank in range(group.size)]
    widest = max(rows for _, rows in shares)
    if labels is not None:
        return head_loss(
            x_BSH,
            weight,
            labels,
            multiple,
            partial(softmax_of_parts, group, shares[group.rank][0]),
            widest=widest,
        )
    own_BSP = padded_linear(x_BSH, weight, multiple)
    parts = gathered(F.pad(own_BSP, (0, widest - own_BSP.shape[-1]))[None], group.size, group.name)
    return torch.cat(
        [part[..., :rows] for part, (_, rows) in zip(parts, shares, strict=True)], dim=-1
    )


def softmax_of_parts(
    group: TensorGroup,
    start: int,
    logits_CP: Tensor,
    labels_C: Tensor,
    vocab: int,
    z_loss: float,
    scale: Tensor,
    learning: bool,
) -> tuple[Tensor, Tensor]:
    """loss.softmax_loss where `vocab` rows from `start` on are here and the others on other
    ranks: two collectives of a few numbers a token.

    The gradient is that of the whole loss by this rank's logits (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3).
    """
    dtype, wide = logits_CP.dtype, torch.promote_types(logits_CP.dtype, torch.float32)
    logits_CP = logits_CP.to(wide)
    logits_CP[:, vocab:] = -torch.inf
    counted_C = labels_C != NO_LABEL
    rows_C = labels_C - start
    here_C = counted_C & (rows_C >= 0) & (rows_C < vocab)
    rows_C1 = rows_C.clamp(0, vocab - 1)[:, None]
    target_C = torch.where(here_C, logits_CP.gather(1, rows_C1)[:, 0], 0)
    highest_C = summed(logits_CP.amax(1), group.name, "max")
    exp_CP = logits_CP.sub_(highest_C[:, None]).exp_()
    sum_C, target_C = summed(torch.stack([exp_CP.sum(1), target_C]), group.name)
    logsum_C = highest_C + sum_C.log()
    entropy = torch.where(counted_C, logsum_C - target_C, 0.0).sum(dtype=torch.float64)
    if not learning:
        return exp_CP, entropy
    factor_C = counted_C * scale
    exp_CP.mul_((factor_C * (1 + 2 * z_loss * logsum_C) / sum_C)[:, None])
    exp_CP.scatter_add_(1, rows_C1, -(factor_C * here_C)[:, None])
    return exp_CP.to(dtype), entropy
