"""trainkit's samples as torchtitan's dataloader gives them: data-parallel rank r has micro-batches
r, r + ranks, ... of every global batch, and the state is how many samples were begun."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader

from trainkit.engines.torchtitan.inside.native_rules import Order, RandomTokens, Windows


class SampleLoader(BaseDataLoader):
    """One split.

    Shapes: B samples of a micro-batch, S tokens of a sample.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        split: dict[str, object] = field(default_factory=dict)
        """names, sizes, weights, split and seed of `Order`; pairs or mock"""

        end_of_document: int | None = None
        """documents end with this token, and positions begin again behind it; None: nowhere"""

        infinite: bool = True
        """asked for by the validator; they always are"""

        def build(self, **given: Any) -> SampleLoader:
            return SampleLoader(self, **given)

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        **_: Any,
    ) -> None:
        split: Mapping[str, Any] = config.split
        self.order = Order(*(split[key] for key in ("names", "sizes", "weights", "split", "seed")))
        if "mock" in split:
            self.sources: list[Any] = [RandomTokens(split["mock"], seq_len)]
        else:
            self.sources = [Windows(pair, seq_len) for pair in split["pairs"]]
        self.end_of_document = config.end_of_document
        self.length = seq_len
        self.micro_batch = local_batch_size
        self.ranks = dp_world_size
        self.rank = dp_rank
        self.consumed = 0  # samples of the run that were begun by all ranks together

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = self.consumed + self.rank * self.micro_batch
            self.consumed += self.ranks * self.micro_batch
            places = [self.order.at(first + n) for n in range(self.micro_batch)]
            rows = np.stack([self.sources[dataset].read(number) for dataset, number in places])
            tokens = torch.from_numpy(rows)
            inputs = tokens[:, :-1].contiguous()
            given = {"input": inputs, "positions": self._positions(inputs)}
            yield given, tokens[:, 1:].contiguous()

    def _positions(self, inputs: torch.Tensor) -> torch.Tensor:
        """[B, S], int64: from the beginning of the document, or of the sample."""
        here = torch.arange(self.length).expand_as(inputs)
        if self.end_of_document is None:
            return here.contiguous()
        ends = torch.zeros_like(inputs)
        ends[:, 1:] = (inputs[:, :-1] == self.end_of_document) * here[:, 1:]
        return here - ends.cummax(dim=1).values

    def state_dict(self) -> dict[str, int]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.consumed = state_dict["consumed"]
