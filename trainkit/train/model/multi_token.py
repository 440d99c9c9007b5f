"""Multi-token prediction (DeepSeek-AI 2024, arXiv:2412.19437, section 2.2): a module that, in
training alone, predicts the token after the next one from what the model made and the next token.

Of token i it makes eh_proj [enorm(embedding of token i + 1) ; hnorm(h_i)], one more block, a norm
of its own and the model's head. The paper writes h_i first; the published weights, Megatron-LM
(core/transformer/multi_token_prediction.py) and vLLM (models/deepseek_mtp.py) have the embedding
first. h_i is what the model's last norm made, as in Megatron-LM, whose last norm is a part of its
blocks and so before this module, and in vLLM, where models end with that norm.

Shapes: B samples of a micro-batch, S tokens of a sample, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.schema import Model
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.model.head_loss import Labels, Losses

FACTOR = 0.1  # Megatron-LM's mtp_loss_scaling_factor


def one_further(
    tokens_BS: Tensor, labels: Labels, positions_BS: Tensor, documents: DocumentBounds | None
) -> tuple[Tensor, Tensor]:
    """What this module reads and what it predicts, (B, S) each: of every token the next one, and
    the next one's label. The last token of a sample has none, nor, where documents are apart by
    positions or by `documents`, that of a document: it reads id 0, as Megatron-LM fills shifted
    ids, and has no label. A label that crosses documents is there only where the model itself has
    it.

    Args:
        tokens_BS, labels: of the model.
        positions_BS: (B, S) or (S,); they grow by 1 within a document.
        documents: those that attention keeps apart.
    """
    within_BS = (positions_BS.diff() == 1).expand_as(tokens_BS[:, 1:])
    if documents is not None:
        begins = torch.zeros(tokens_BS.numel() + 1, dtype=torch.bool, device=tokens_BS.device)
        begins[documents.bounds_D.long()] = True
        within_BS = within_BS & ~begins[:-1].view_as(tokens_BS)[:, 1:]
    next_BS = F.pad(tokens_BS[:, 1:].where(within_BS, 0), (0, 1))
    labels_BS = F.pad(labels.labels_BS[:, 1:].where(within_BS, NO_LABEL), (0, 1), value=NO_LABEL)
    return next_BS, labels_BS


class MultiToken(nn.Module):
    """What a model has for it besides a block.

    Args:
        model: the shape.
        norm: makes a norm of the hidden size.
    """

    def __init__(self, model: Model, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.factor = model.mtp_loss_scaling_factor or FACTOR
        self.enorm = norm()
        self.hnorm = norm()
        self.eh_proj = nn.Linear(2 * model.hidden_size, model.hidden_size, bias=False)
        self.final_norm = norm()
        # since the last update
        self.sums: Tensor | None = None

    def forward(self, next_BSH: Tensor, h_BSH: Tensor) -> Tensor:
        """What enters the block, of embeddings of next tokens and what the model made."""
        x_BSH: Tensor = self.eh_proj(torch.cat([self.enorm(next_BSH), self.hnorm(h_BSH)], dim=-1))
        return x_BSH

    def labels(self, labels_BS: Tensor, labels: Labels) -> Labels:
        """What its loss is taken of. It is divided by the tokens of the model's loss, the same
        number in every layout, as the paper's equation 24 is by all tokens; `labels` say by how
        many."""
        return Labels(labels_BS, scale=labels.scale * self.factor)

    def count(self, losses: Losses) -> None:
        """Add to what `take` gives."""
        found = torch.stack([losses.cross_entropy.double(), losses.tokens.double()])
        self.sums = found if self.sums is None else self.sums + found

    def take(self) -> Tensor | None:
        """(cross-entropy, labelled tokens) since this was last asked, fp64; None: nothing."""
        found = self.sums
        self.sums = None
        return found
