"""Expert parallelism, put into a plain model from outside: experts lie on several ranks, one expert
on one or on several, and rows of tokens travel to them and back (Lepikhin et al. 2020,
arXiv:2006.16668; the grid of ranks: Megatron-LM, core/parallel_state.py).

Neighbours in the order of ranks hold all experts of a layer together: `EP` parts of the experts,
each on `ETP` ranks that have a part of every one's width. A row goes to all ranks of its expert;
what they make of it is added up where it came from. Ranks of a tensor-parallel group route a part
of the tokens each, also without sequence parallelism.

Shapes: B samples, S tokens of a sample, R rows of tokens on this rank by expert, N rows that
arrive, Q that are sent, H hidden size, I width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainkit.jobs.ranks import share_of_rank
from trainkit.jobs.schema import Model
from trainkit.ops.kernels import REFERENCE, Kernels
from trainkit.train.model.experts import ExpertMLPs, MixtureOfExperts, Stacked, nothing, swiglu_of
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.shards import Segment, TensorLayout
from trainkit.train.parallel.tensor_group import TensorGroup, leave
from trainkit.train.torch_compat import begin_exchange, exchanged, finish_exchange, gathered, summed

# what every rank calls the ranks that hold all experts with it
EXPERT = "trainkit-expert"


@dataclass(frozen=True)
class ExpertGroup:
    """The ranks that hold all experts of a layer together.

    Args:
        parts: EP, parts of the experts.
        split: ETP, ranks of one expert.
        rank: of the group; those of one part are beside one another.
        name: the group's.
    """

    parts: int = 1
    split: int = 1
    rank: int = 0
    name: str = EXPERT

    @property
    def size(self) -> int:
        return self.parts * self.split


def _layout(whole: Tensor, count: int, pieces: int, group: ExpertGroup) -> TensorLayout:
    """This rank's rows of `count` experts of all that lie in `whole`, each of which has `pieces`
    matrices, or vectors, one below the other."""
    part, slot = divmod(group.rank, group.split)
    width = len(whole) // (count * group.parts * pieces)
    start, length = share_of_rank(width, group.split, slot)
    first = part * count * pieces
    segments = tuple(
        Segment(n * length, (first + n) * width + start, length) for n in range(count * pieces)
    )
    if length == width:  # one stretch
        segments = (Segment(0, first * width, count * pieces * width),)
    return TensorLayout(tuple(whole.shape), 0, segments)


def _stacked(whole: Stacked, count: int, pieces: int, group: ExpertGroup) -> Stacked:
    """This rank's part. Biases of what comes second are parts, too, of the hidden size: the sum of
    what several ranks make has each once."""
    layouts = {name: _layout(p, count, pieces, group) for name, p in whole.named_parameters()}
    parts = {
        name: whole.get_parameter(name).new_empty(layout.local_shape)
        for name, layout in layouts.items()
    }
    return Stacked(**parts, layouts=layouts)


@dataclass
class _Journey:
    """Rows on their way between ranks, `taken` from each, `sent` to each; `back`: their gradients,
    while these are."""

    taken: list[int]
    sent: list[int]
    group: str
    back: Tensor | None = None


class _Departing(torch.autograd.Function):
    """Sends rows off; nothing may read what it returns before `_Arriving`. Autograd goes through
    what was computed between the two in between, too, while gradients are on their way."""

    @staticmethod
    def forward(ctx: Any, x_QH: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return begin_exchange(x_QH, journey.taken, journey.sent, journey.group)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        back, ctx.journey.back = ctx.journey.back, None
        return finish_exchange(back), None


class _Arriving(torch.autograd.Function):
    """Waits for the rows."""

    @staticmethod
    def forward(ctx: Any, coming_NH: Tensor, journey: _Journey) -> Tensor:
        ctx.journey = journey
        return finish_exchange(coming_NH)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        j = ctx.journey
        j.back = begin_exchange(upstream[0], j.sent, j.taken, j.group)
        return upstream[0], None  # of the right shape, and not read


class ParallelExperts(ExpertMLPs):
    """As ExpertMLPs of the whole model, where this rank holds some of the experts, or a part of
    each.

    Args:
        model: the shape.
        whole: what is cut.
        group: where the others are.
        kernels: what they compute with.
    """

    def __init__(
        self, model: Model, whole: ExpertMLPs, group: ExpertGroup, kernels: Kernels
    ) -> None:
        nn.Module.__init__(self)
        self.group = group
        self.swiglu = swiglu_of(model, kernels)
        self.count = whole.count // group.parts
        self.gate_up = _stacked(whole.gate_up, self.count, 2, group)
        self.down = _stacked(whole.down, self.count, 1, group)

    def forward(
        self, x_RH: Tensor, loads_E: Tensor, meanwhile: Callable[[], None] = nothing
    ) -> Tensor:
        """Rows lie by expert of all, so many each; they travel while `meanwhile` computes."""
        group = self.group
        if group.size == 1:
            return super().forward(x_RH, loads_E)
        loads: list[int] = loads_E.tolist()
        by_part = [loads[i : i + self.count] for i in range(0, len(loads), self.count)]
        sent = [sum(of_part) for of_part in by_part for _ in range(group.split)]
        arriving = self._arriving(by_part, x_RH.device)
        taken = [sum(of_rank) for of_rank in arriving]
        # to every rank of a part the same rows
        parts = torch.split(x_RH, [sum(of_part) for of_part in by_part])
        given_QH = torch.cat([part for part in parts for _ in range(group.split)])
        journey = _Journey(taken, sent, group.name)
        coming_NH = _Departing.apply(given_QH, journey)  # type: ignore[no-untyped-call]
        meanwhile()
        x_NH = _Arriving.apply(coming_NH, journey)  # type: ignore[no-untyped-call]
        # by rank and expert, and by expert and rank
        x_NH = _reordered(x_NH, arriving)
        by_expert = [list(of_expert) for of_expert in zip(*arriving, strict=True)]
        here = [sum(of_expert) for of_expert in by_expert]
        y_NH = super().forward(x_NH, torch.tensor(here, device=x_NH.device))
        y_NH = _reordered(y_NH, by_expert)
        back_QH = exchanged(y_NH, sent, taken, group.name)
        returned = torch.split(back_QH, sent)
        if group.split == 1:
            return torch.cat(returned)
        rounds = [returned[i : i + group.split] for i in range(0, len(sent), group.split)]
        return torch.cat([torch.stack(of_part).sum(0) for of_part in rounds])

    def out_bias(self, hidden: int) -> Tensor | None:
        if self.down.bias is None:
            return None
        start, length = share_of_rank(hidden, self.group.split, self.group.rank % self.group.split)
        own = self.down.bias.view(self.count, length)
        return F.pad(own, (start, hidden - start - length))

    def _arriving(self, by_part: list[list[int]], device: torch.device) -> list[list[int]]:
        """Rows of each of this rank's experts from each rank. The host waits for them."""
        counts = torch.tensor([of for of in by_part for _ in range(self.group.split)])
        whole = [self.count] * self.group.size
        flat = counts.flatten().to(device)
        found: list[int] = exchanged(flat, whole, whole, self.group.name).tolist()
        return [found[i : i + self.count] for i in range(0, len(found), self.count)]


def _reordered(x_NH: Tensor, lengths: list[list[int]]) -> Tensor:
    """From runs of rows by (i, j) to runs by (j, i)."""
    runs = torch.split(x_NH, [length for of in lengths for length in of])
    inner = len(lengths[0])
    return torch.cat([run for j in range(inner) for run in runs[j::inner]])


def _own_tokens(x_BSH: Tensor, group: TensorGroup) -> Tensor:
    """A part of every sample's tokens, of those that all ranks of a group have."""
    return torch.tensor_split(x_BSH, group.size, dim=1)[group.rank]


def _all_tokens(y_BSH: Tensor, x_BSH: Tensor, group: TensorGroup) -> Tensor:
    """The results of all ranks' tokens, out of this one's."""
    lengths = [part.shape[1] for part in torch.tensor_split(x_BSH, group.size, dim=1)]
    before = sum(lengths[: group.rank])
    after = sum(lengths[group.rank + 1 :])
    return leave(F.pad(y_BSH, (0, 0, before, after)), group)


def apply(
    module: Transformer, group: ExpertGroup, tensor: TensorGroup, kernels: Kernels = REFERENCE
) -> None:
    """Cut the experts of a model, or of a part of one, in place; it must be on the meta device."""
    for part in module.modules():
        if isinstance(part, MixtureOfExperts):
            assert isinstance(part.experts, ExpertMLPs)
            part.experts = ParallelExperts(module.shape, part.experts, group, kernels)
            if tensor.size > 1:
                part.over_all = cast(Callable[[Tensor], Tensor], partial(_total, group=tensor))
                part.whole = partial(_of_all_ranks, group=tensor)
                part.own = partial(_own_tokens, group=tensor)
            if tensor.size > 1 and not tensor.sequence:
                part.take = partial(_own_tokens, group=tensor)
                part.give = partial(_all_tokens, group=tensor)


def _total(counts: Tensor, group: TensorGroup) -> Tensor:
    """Over the ranks that have the tokens of a micro-batch together."""
    return summed(counts, group.name)


def _of_all_ranks(x: Tensor, group: TensorGroup) -> Tensor:
    """Along the tokens, dimension 1: what the ranks have of a sample, each an equal part."""
    return torch.cat(gathered(x, group.size, group.name).chunk(group.size), dim=1)


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of experts, which lie on ranks of their own, by name."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, part in module.named_modules()
        if isinstance(part, ParallelExperts)
        for name, parameter in part.named_parameters()
    }
