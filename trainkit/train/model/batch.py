"""What the model is given: one micro-batch.

Shapes: B samples of a micro-batch, S tokens of a sample.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from trainkit.train.model.attention import DocumentBounds


@dataclass(frozen=True)
class Batch:
    """One micro-batch; label s is the token after token s. `checksum` is the sum of xxh32 over
    its samples' tokens.

    `position` is its first sample's in the order of samples. `positions_BS` and `documents` are
    there where the job asks for them. Of samples of which only some tokens are here, positions are
    those in the whole, (S,) where they are alike in all samples, and documents those of the whole.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    checksum: int
    position: int
    positions_BS: Tensor | None = None
    documents: DocumentBounds | None = None
