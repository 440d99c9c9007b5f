"""Gradients of what several tensor-parallel ranks hold alike: their sum, and how much travels
for it. The ranks are threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from trainkit.train.parallel.mesh import Mesh
from trainkit.train.parallel.shards import (
    Segment,
    ShardedParameter,
    TensorLayout,
    replicated_layout,
)
from trainkit.train.update import replicas

SIZE = 4
# elements that all ranks hold alike, two neighbours, one alone; neither is a multiple of its ranks
WHOLE, PAIRS, OWN = 5, 7, 3


@dataclass
class Exchange:
    """An all-to-all of the threads."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(SIZE, timeout=300))
    given: dict[int, list[Tensor]] = field(default_factory=dict)
    travelled: list[int] = field(default_factory=lambda: [0] * SIZE)

    def of(self, rank: int) -> Any:
        def all_to_all(
            taken: Tensor, given: Tensor, takes: Sequence[int], gives: Sequence[int]
        ) -> None:
            self.given[rank] = list(torch.split(given, list(gives)))
            self.travelled[rank] += sum(n for other, n in enumerate(gives) if other != rank)
            self.barrier.wait()
            pieces = [self.given[other][rank] for other in range(SIZE)]
            assert [len(piece) for piece in pieces] == list(takes)
            taken.copy_(torch.cat(pieces))
            self.barrier.wait()

        return all_to_all


def held_by(rank: int) -> dict[str, ShardedParameter]:
    """A norm that all hold, a projection whose first rows are a rank's own and whose others lie
    on two ranks; gradients are other numbers on each rank."""

    def filled(size: int) -> nn.Parameter:
        parameter = nn.Parameter(torch.zeros(size))
        parameter.grad = torch.arange(size, dtype=torch.float32) * 10**rank
        return parameter

    cut = TensorLayout(
        (SIZE * OWN + 2 * PAIRS,),
        0,
        (Segment(0, rank * OWN, OWN), Segment(OWN, SIZE * OWN + rank // 2 * PAIRS, PAIRS, 2)),
    )
    return {
        "norm": ShardedParameter("norm", filled(WHOLE), replicated_layout((WHOLE,), SIZE)),
        "qkv": ShardedParameter("qkv", filled(OWN + PAIRS), cut),
    }


def test_copies_are_summed_over_those_that_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, ranks = Exchange(), [held_by(rank) for rank in range(SIZE)]

    def all_to_all(
        taken: Tensor, given: Tensor, takes: list[int], gives: list[int], group: Any
    ) -> None:
        group(taken, given, takes, gives)

    monkeypatch.setattr("torch.distributed.all_to_all_single", all_to_all)

    def add_up(rank: int) -> None:
        mesh = SimpleNamespace(
            tensor=SimpleNamespace(size=SIZE, rank=rank),
            device=torch.device("cpu"),
            tensor_group=exchange.of(rank),
            tied_group=None,
        )
        replicas.add_up(ranks[rank], cast(Mesh, mesh))

    threads = [threading.Thread(target=add_up, args=(rank,), daemon=True) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, held in enumerate(ranks):
        norm, qkv = (held[name].parameter.grad for name in ("norm", "qkv"))
        assert norm is not None and norm.tolist() == [1111.0 * i for i in range(WHOLE)]
        pair = 11.0 if rank < 2 else 1100.0
        assert qkv is not None and qkv.tolist() == [10.0**rank * i for i in range(OWN)] + [
            pair * i for i in range(OWN, OWN + PAIRS)
        ]
    # there, and the same back: of n ranks each sends (n - 1) / n
    parts = -(-WHOLE // SIZE) * (SIZE - 1) + -(-PAIRS // 2)
    assert exchange.travelled == [2 * parts] * SIZE
