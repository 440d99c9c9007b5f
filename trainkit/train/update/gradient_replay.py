"""Hosts that compute wrong numbers without a word: every few steps a micro-batch is computed by a
second rank too, and the gradients must have equal bits.

Ranks that compute a micro-batch together are a replica; its peers have the same weights before a
step, whatever ZeRO does with them. A ring: replica r computes the first micro-batch of replica r -
1, before the step, and its own within it. What each rank finds is compared before the update. Where
it differs, two further replicas compute the same: with two replicas both do it again.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from trainkit.base.errors import Exit, TrainkitError
from trainkit.train.batches import Feed
from trainkit.train.model.batch import Batch
from trainkit.train.parallel.context_parallel import own_tokens
from trainkit.train.parallel.data_parallel import World
from trainkit.train.update.step import Step

CHUNK = 1 << 20  # words of 8 bytes that are added up at once
OPINIONS = 4  # replicas, or two replicas twice, that compute a micro-batch which differs

Sums = tuple[tuple[str, int], ...]  # of a micro-batch's gradients, in the order of backward
Place = tuple[int, str]  # in that order, and whose gradient


def bit_sum(x: Tensor, odd_C: Tensor) -> Tensor:
    """All bits of a tensor in one number, int64, shape (): its words of 8 bytes, each times an odd
    number, added up mod 2**64. A word that differs alone always shows, for an odd number has an
    inverse.

    Args:
        odd_C: CHUNK odd numbers.
    """
    raw = x.detach().contiguous().view(-1).view(torch.uint8)
    if len(raw) % 8 or raw.storage_offset() % 8:
        raw = F.pad(raw, (0, -len(raw) % 8))
    words = torch.split(raw.view(torch.int64), CHUNK)
    parts = [(part * odd_C[: len(part)]).sum() for part in words]
    return (torch.stack(parts) * odd_C[: len(parts)]).sum()


class ReplayVerdict(NamedTuple):
    """Who computed something else than the others.

    Args:
        ranks: and the first tensor, in the order of backward, whose gradient differed there.
        certain: else it is one of them, and the others were right.
    """

    ranks: dict[int, str]
    certain: bool


def _difference(sums: Sums, other: Sums) -> Place:
    return next((n, mine[0]) for n, mine in enumerate(sums) if mine != other[n])


def judge(found: Sequence[Sequence[Sums]], together: int) -> ReplayVerdict:
    """Who is wrong: of those that compute a micro-batch, who makes two things of it, or something
    else than most. Of a replica's ranks those where it began: what one computes wrong reaches the
    others with what it sends them.

    Args:
        found: of every rank, what it made of the micro-batch of each of the replicas 0, 1, 2 ...
            before its own.
        together: ranks of a replica.
    """
    certain: dict[int, Place] = {}
    unsure: dict[int, Place] = {}
    for owner in range(len(found)):
        made: dict[int, list[Sums]] = {}
        for back in range(len(found[owner])):
            rank = (owner + back * together) % len(found)
            made.setdefault(rank, []).append(found[rank][back])
        every = {sums for of_rank in made.values() for sums in of_rank}
        steady = Counter(of_rank[0] for of_rank in made.values() if len(set(of_rank)) == 1)
        first, second = [*steady.most_common(2), ((), 0), ((), 0)][:2]
        accused = certain if first[1] > second[1] else unsure
        right = {first[0]} if accused is certain else every
        for rank, of_rank in made.items():
            places = [_difference(s, r) for s in of_rank for r in right if s != r]
            if places:
                accused[rank] = min(*places, accused.get(rank, places[0]))
    named = certain or unsure
    begins: dict[int, Place] = {}
    for rank, place in named.items():
        replica = rank // together
        begins[replica] = min(place, begins.get(replica, place))
    return ReplayVerdict(
        {rank: at[1] for rank, at in sorted(named.items()) if at == begins[rank // together]},
        bool(certain),
    )


def wait_for_its_end() -> None:
    """The error of the rank that is named must be the first: wait to be ended, or until torch says
    that it is gone."""
    dist.all_reduce(torch.zeros(1))


class GradientReplay:
    """Compares what ranks compute, at every training.replay_interval-th step.

    Args:
        step: makes the steps.
        feed: this rank's samples, and those of others.
    """

    def __init__(self, step: Step, feed: Feed) -> None:
        self.step = step
        self.feed = feed
        self.together = step.mesh.degrees.together
        self.agreed = 0  # the last step whose gradients were equal everywhere, in this process
        self._weights: dict[str, Tensor] = {}
        self._at: tuple[int, int, int] | None = None  # the step, samples before it and in it
        self._made: dict[str, Tensor] = {}  # of this rank's micro-batch within the step
        self._others: dict[str, Tensor] = {}  # of its neighbour's
        self._watched = ExitStack()

    def read(self, number: int, consumed: int, samples: int) -> Iterator[Batch]:
        """This rank's micro-batches of the step of this number, of so many samples after
        `consumed`. Where it is due this computes the neighbour's first one before, and watches
        what becomes of the first."""
        batches = self.feed.read(consumed, samples)
        interval = self.step.job.training.replay_interval
        self._at = None
        if interval is None or number % interval:
            return batches
        self._at = (number, consumed, samples)
        self._others = self._compute(1)
        return self._watch_first(batches)

    def compare(self) -> None:
        """Call before the update of a step: where `read` began to, all ranks compare what they
        found. Raises TrainkitError (exit 10) on the rank that computed something else; the others
        do not come back."""
        if self._at is None:
            return
        self._watched.close()
        mine = torch.stack([self._joined(self._made), self._joined(self._others)])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        sums: list[list[int]] = torch.stack(everyone).tolist()
        number = self._at[0]
        if all(
            own == sums[(rank + self.together) % len(sums)][1] for rank, (own, _) in enumerate(sums)
        ):
            self.agreed = number
            return
        rank = dist.get_rank()
        verdict, hosts = self._find()
        error = self._error(number, verdict, hosts)
        if rank in verdict.ranks:
            raise error
        if rank == 0:
            print(f"ERROR: {error}", file=sys.stderr, flush=True)
        wait_for_its_end()

    @cached_property
    def _odd_C(self) -> Tensor:
        return torch.arange(1, 2 * CHUNK, 2, device=self.step.device)

    def _joined(self, made: dict[str, Tensor]) -> Tensor:
        return bit_sum(torch.stack([*made.values()]), self._odd_C)

    def _compute(self, back: int) -> dict[str, Tensor]:
        """Gradients of the first micro-batch of the replica `back` places before this one, as
        their sums of bits: by weight, in the order of backward. Nothing is left of them."""
        assert self._at is not None
        _, consumed, samples = self._at
        mesh = self.step.mesh
        of_replica = self.together // (mesh.degrees.tensor * mesh.degrees.context)
        own = mesh.data_world
        world = World((own.rank - back * of_replica) % own.size, own.size)
        batch = own_tokens(self.feed.first_of(world, consumed, samples), mesh.context)
        losses = self.step.forward(batch, self.step.loss_factor(samples), last=False)
        with self._watching(keep=False) as made, self.step.timers("backward"):
            losses.objective.backward()  # type: ignore[no-untyped-call]
        self.step.take_counts()
        return made

    def _watch_first(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        self._made = self._watched.enter_context(self._watching(keep=True))
        yield next(batches)
        self._watched.close()
        yield from batches

    @contextmanager
    def _watching(self, *, keep: bool) -> Iterator[dict[str, Tensor]]:
        """Sums of the bits of all gradients that come up meanwhile, of one micro-batch, before
        they are added to others or to other ranks'. Without `keep` they go no further."""
        made: dict[str, Tensor] = {}

        def take(name: str, weight: Tensor) -> None:
            assert weight.grad is not None
            made[name] = bit_sum(weight.grad, self._odd_C)
            if not keep:
                weight.grad = None

        with ExitStack() as handles:
            for name, weight in self._gathered().items():
                handle: Any = cast(Any, weight).register_post_accumulate_grad_hook(
                    partial(take, name)
                )
                handles.callback(handle.remove)
            yield made

    def _gathered(self) -> dict[str, Tensor]:
        """The weights that are computed with, which fully_shard makes once and fills each time. It
        wants to have seen a forward first."""
        if self._weights:
            return self._weights
        (module,) = self.step.model_parts.modules
        for prefix, unit in module.named_modules():
            if isinstance(unit, FSDPModule):
                unit.unshard()
                named = unit.named_parameters(prefix=prefix)  # type: ignore[attr-defined]
                self._weights |= {name: w for name, w in named if not isinstance(w, DTensor)}
                if self.step.zero_stage == 3:
                    unit.reshard()
        return self._weights

    def _find(self) -> tuple[ReplayVerdict, list[str]]:
        """Have further replicas compute what differed; who is wrong, and all ranks' hosts."""
        made = [self._made, self._others, *(self._compute(back) for back in range(2, OPINIONS))]
        sums = [tuple((name, int(value)) for name, value in of.items()) for of in made]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (os.uname().nodename, sums))
        return judge([of for _, of in everyone], self.together), [host for host, _ in everyone]

    def _error(self, number: int, verdict: ReplayVerdict, hosts: Sequence[str]) -> TrainkitError:
        """What is said of it; failure_rules.toml knows the words."""
        named = list(dict.fromkeys(hosts[rank] for rank in verdict.ranks))
        who = (" and " if verdict.certain else " or ").join(
            f"rank {rank} on {hosts[rank]} (first: {name})" for rank, name in verdict.ranks.items()
        )
        where = f"host {named[0]}" if len(named) == 1 else f"one of the hosts {', '.join(named)}"
        return TrainkitError(
            f"step {number}: of the same samples and weights {who} computed other gradients than"
            f" its peers: a silent fault of {where}; this step has not touched the weights",
            exit=Exit.RANK_INFRA,
            hint=(
                f"test {', '.join(named)} before another run. Nothing was compared since"
                f" {f'step {self.agreed}' if self.agreed else 'this attempt began'}: checkpoints"
                " written since may hold what was computed wrong"
            ),
        )
