"""The head and its loss where each tensor-parallel rank holds some rows of the vocabulary:
logits of one token never lie on one rank.

Shapes: C tokens of a chunk, H hidden size, V rows of the whole vocabulary, P columns of this
rank's logits in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.jobs.ranks import share_of_rank
from trainkit.ops.cross_entropy import NO_LABEL, SoftmaxLoss
from trainkit.ops.kernels import Kernels
from trainkit.train.model.head_loss import Labels, Losses, head_loss, padded_linear
from trainkit.train.parallel.tensor_group import TensorGroup, enter
from trainkit.train.torch_compat import gathered


def read_out(
    x_BSH: Tensor,
    weight: Tensor,
    labels: Labels | None,
    multiple: int,
    softmax: SoftmaxLoss,
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
            softmax,
            widest=widest,
        )
    own_BSP = padded_linear(x_BSH, weight, multiple)
    parts = gathered(F.pad(own_BSP, (0, widest - own_BSP.shape[-1]))[None], group.size, group.name)
    return torch.cat(
        [part[..., :rows] for part, (_, rows) in zip(parts, shares, strict=True)], dim=-1
    )


@dataclass(frozen=True)
class VocabularyPart:
    """What one rank has of the vocabulary.

    Args:
        group: the ranks that share it.
        start: the first row that is here.
        vocab: rows of the whole vocabulary.
        kernels: what it computes with.
    """

    group: TensorGroup
    start: int
    vocab: int
    kernels: Kernels

    def softmax_loss(
        self,
        logits_CP: Tensor,
        labels_C: Tensor,
        vocab: int,
        z_loss: float,
        scale: Tensor,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        """cross_entropy.plain where `vocab` rows are here and the others on other ranks: one
        collective of three numbers a token.

        The gradient is that of the whole loss by this rank's logits (Shoeybi et al. 2019,
        arXiv:1909.08053, section 3).

        A label that is none of the vocabulary's is a ValueError, on a GPU a loss of NaN.
        """
        group = self.group
        counted_C = labels_C != NO_LABEL
        wrong_C = counted_C & ((labels_C < 0) | (labels_C >= self.vocab))
        if labels_C.device.type == "cpu" and wrong_C.any():
            raise ValueError(f"label {labels_C[wrong_C][0]} is not one of {self.vocab}")
        rows_C = labels_C - self.start  # NO_LABEL is below 0 then too: nobody has it
        own_3C = self.kernels.softmax_statistics(logits_CP, rows_C, vocab)
        highest_C, sum_C, target_C = combined(gathered(own_3C[None], group.size, group.name))
        target_C = torch.where(wrong_C, torch.nan, target_C)
        logsum_C = highest_C + sum_C.log()
        entropy = torch.where(counted_C, logsum_C - target_C, 0.0).sum(dtype=torch.float64)
        if not learning:
            return logits_CP, entropy
        factor_C = counted_C * scale
        softmax_C = factor_C * (1 + 2 * z_loss * logsum_C) / sum_C
        dlogits_CP = self.kernels.softmax_gradient(
            logits_CP, rows_C, vocab, highest_C, softmax_C, factor_C
        )
        return dlogits_CP, entropy


def combined(parts_T3C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of what `softmax_statistics` found on T ranks: the highest logit of every token, the sum of
    e^(logit - highest) and the label's logit. The same bits on all ranks: each adds in their
    order."""
    highest_TC, sum_TC, target_TC = parts_T3C.unbind(1)
    highest_C = highest_TC.amax(0)
    # a rank that has nothing above -inf added up e^logit: 0, or NaN, by whatever factor
    share_TC = torch.where(highest_TC == -torch.inf, 1, (highest_TC - highest_C).exp())
    sum_C = (sum_TC * share_TC).sum(0)
    return highest_C, sum_C, target_TC.sum(0)
