"""Muon (Jordan et al. 2024; Liu et al. 2025, arXiv:2502.16982): the momentum of a matrix, made
nearly orthogonal by Newton-Schulz iterations, is its update.

It is a function of whole matrices: those of the model, not of what a layer stores together or a
rank holds. A fused projection is several matrices, one after another in its rows. Each is put
together on one rank of those that hold parts of it, updated there, and sent back: two exchanges a
step for all of them, and the same update in every layout.

Shapes: M rows and N columns of a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.optimizers import MUON_ROUND, rate_factor
from trainkit.jobs.schema import Model, Training
from trainkit.plan.parameter_shapes import block_matrices, further_matrices
from trainkit.train.parallel.shards import Offsets, ShardedParameter
from trainkit.train.torch_compat import local_part

Triple = tuple[float, float, float]
# (a, b, c) of x <- a x + b (x x^T) x + c (x x^T)^2 x; the last is used again where there are more
# iterations. simple: Jordan 2024, singular values end at 0.7 to 1.2. quintic and polar_express
# (Amsel et al. 2025, arXiv:2505.16932): NVIDIA's Emerging-Optimizers, muon_utils.py.
COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
EPSILON = 1e-7


class Matrices(NamedTuple):
    """The matrices that a rank and its neighbours hold together.

    Args:
        model: the shape.
        parameters: this rank's part of each parameter that is made of matrices, by name; the same
            names on all ranks of the group.
        group: the ranks that hold all of them together; None: this one does.
        tensor_rank: this rank's number among those that a layer is split over.
    """

    model: Model
    parameters: Mapping[str, ShardedParameter]
    group: dist.ProcessGroup | None = None
    tensor_rank: int = 0


class MatrixShard(NamedTuple):
    """What this rank holds of a matrix: a part of the weight, and of what is like it."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor


class Item(NamedTuple):
    """What is put together, updated and taken apart by itself: a parameter, or of stacked experts
    the rows of one.

    Args:
        name: the parameter's.
        start, rows: its rows of that.
        parts: rows of each matrix in it.
        columns: of all of them.
        transposed: they are stored (in, out).
    """

    name: str
    start: int
    rows: int
    parts: tuple[int, ...]
    columns: int
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def numbers(self) -> int:
        return self.rows * self.columns

    @property
    def cost(self) -> int:
        """About the products that it takes."""
        return sum(min(m, self.columns) ** 2 * max(m, self.columns) for m in self.parts)


def items_of(name: str, shape: tuple[int, ...], model: Model) -> list[Item]:
    """A matrix, most of a block, cut into what is updated by itself."""
    inside = name.split(".", 2)[2] if name.startswith("layers.") else name
    weight = {**block_matrices(model), **further_matrices(model)}[inside]
    count = max(1, weight.experts)
    rows = shape[0] // count
    parts = weight.parts if weight.experts else weight.matrix_rows
    return [
        Item(name, n * rows, rows, tuple(parts), shape[1], weight.transposed) for n in range(count)
    ]


def orthogonal(u_MN: Tensor, training: Training) -> Tensor:
    """A matrix of u's singular vectors whose singular values are near 1, in u's dtype; of zeros,
    zeros. The iterations are in `muon_precision`, of fp64 in fp64."""
    dtype = u_MN.dtype
    if dtype != torch.float64:
        usual = "fp32" if training.precision == "fp32" else "bf16"
        dtype = DTYPES[training.muon_precision or usual]
    x = (u_MN.T if len(u_MN) > u_MN.shape[1] else u_MN).to(dtype)
    x = x / (x.norm() + EPSILON)
    table = COEFFICIENTS[training.muon_coefficient_type]
    for step in range(training.muon_num_ns_steps):
        a, b, c = table[min(step, len(table) - 1)]
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if len(u_MN) > u_MN.shape[1] else x).to(u_MN.dtype)


def scale_of(rows: int, columns: int, training: Training) -> float:
    """What an orthogonal update is multiplied with."""
    longer = math.sqrt(max(rows, columns))
    scales = {
        "spectral": longer,
        "match_rms_adamw": 0.2 * longer,
        "original": math.sqrt(max(1.0, rows / columns)),
    }
    return scales[training.muon_scale_mode]


@dataclass(frozen=True)
class _Box:
    """A part of an item on a rank.

    Args:
        offsets: of the box of the parameter's that it lies in.
        inside: its first row in that box.
        place: where it lies in the item: first row, first column.
        shape: rows and columns.
        sent: whether its rank sends it: of several that hold the same the first does.
    """

    offsets: Offsets
    inside: int
    place: tuple[int, int]
    shape: tuple[int, int]
    sent: bool

    @property
    def numbers(self) -> int:
        return self.shape[0] * self.shape[1]

    def of(self, views: Mapping[Offsets, Tensor]) -> Tensor:
        """The part, of the parameter's boxes on this rank."""
        return views[self.offsets].narrow(0, self.inside, self.shape[0])

    def whole(self, item: Tensor) -> Tensor:
        """The part, of the item put together."""
        return item.narrow(0, self.place[0], self.shape[0]).narrow(1, self.place[1], self.shape[1])


def _boxes(item: Item, sharded: ShardedParameter, tensor_rank: int) -> list[_Box]:
    """What this rank holds of an item."""
    found = []
    for box in sharded.boxes:
        rows, columns = box.of(local_part(sharded.parameter)).shape
        start = max(box.offsets[0], item.start)
        stop = min(box.offsets[0] + rows, item.start + item.rows)
        if start < stop:
            found.append(
                _Box(
                    box.offsets,
                    start - box.offsets[0],
                    (start - item.start, box.offsets[1]),
                    (stop - start, columns),
                    tensor_rank % box.replicas == 0,
                )
            )
    return found


class Exchange:
    """Puts matrices together on their owners, and takes the results apart.

    Made by all ranks of the group together.

    Args:
        matrices: of this rank.
        items: what is updated in this round, the same on all ranks.
    """

    def __init__(self, matrices: Matrices, items: Sequence[Item]) -> None:
        self.matrices = matrices
        self.items = items
        self.size = 1 if matrices.group is None else dist.get_world_size(matrices.group)
        self.rank = 0 if matrices.group is None else dist.get_rank(matrices.group)
        mine = [
            _boxes(item, matrices.parameters[item.name], matrices.tensor_rank) for item in items
        ]
        # of each rank, of each item
        self.boxes: list[list[list[_Box]]] = [mine] * self.size
        if matrices.group is not None:
            dist.all_gather_object(self.boxes, mine, matrices.group)
        self.owned = self._owners()

    def _owners(self) -> list[list[int]]:
        """Numbers of the items that each rank updates: the dearest first, to that rank of those
        that hold parts of it that has least to do."""
        owned: list[list[int]] = [[] for _ in range(self.size)]
        load = [0] * self.size
        for number in sorted(range(len(self.items)), key=lambda each: -self.items[each].cost):
            holders = [rank for rank in range(self.size) if self.boxes[rank][number]]
            rank = min(holders, key=lambda each: load[each])
            owned[rank].append(number)
            load[rank] += self.items[number].cost
        return owned

    def _views(self, parts: Mapping[str, Tensor]) -> dict[str, dict[Offsets, Tensor]]:
        return {name: self.matrices.parameters[name].views(part) for name, part in parts.items()}

    def gather(self, parts: Mapping[str, Tensor]) -> dict[int, Tensor]:
        """The whole items that this rank owns, by number.

        Args:
            parts: this rank's part of every parameter, like that.
        """
        views = self._views(parts)
        mine = self.boxes[self.rank]
        sent = [
            [
                box.of(views[self.items[number].name])
                for number in numbers
                for box in mine[number]
                if box.sent
            ]
            for numbers in self.owned
        ]
        own = self.owned[self.rank]
        taken = [
            [(number, box) for number in own for box in boxes[number] if box.sent]
            for boxes in self.boxes
        ]
        any_part = next(iter(parts.values()))
        flat = self._swap(sent, [sum(box.numbers for _, box in each) for each in taken], any_part)
        whole = {number: any_part.new_empty(self.items[number].shape) for number in own}
        for part, each in zip(flat, taken, strict=True):
            start = 0
            for number, box in each:
                given = part[start : start + box.numbers].view(box.shape)
                box.whole(whole[number]).copy_(given)
                start += box.numbers
        return whole

    def scatter(self, whole: Mapping[int, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Write this rank's part of every item into `parts`, from the owners' whole ones."""
        sent = [
            [box.whole(whole[number]) for number in self.owned[self.rank] for box in boxes[number]]
            for boxes in self.boxes
        ]
        mine = self.boxes[self.rank]
        taken = [
            [(number, box) for number in numbers for box in mine[number]] for numbers in self.owned
        ]
        any_part = next(iter(parts.values()))
        flat = self._swap(sent, [sum(box.numbers for _, box in each) for each in taken], any_part)
        views = self._views(parts)
        for part, each in zip(flat, taken, strict=True):
            start = 0
            for number, box in each:
                given = part[start : start + box.numbers].view(box.shape)
                box.of(views[self.items[number].name]).copy_(given)
                start += box.numbers

    def _swap(
        self, sent: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor
    ) -> list[Tensor]:
        """What each rank has sent to this one, so many numbers each."""
        nothing = like.new_empty(0)
        flat = [torch.cat([nothing, *(each.reshape(-1) for each in part)]) for part in sent]
        if self.matrices.group is None:
            return flat
        taken = like.new_empty(sum(sizes))
        lengths = [len(part) for part in flat]
        dist.all_to_all_single(
            taken, torch.cat(flat), list(sizes), lengths, group=self.matrices.group
        )
        return list(torch.split(taken, list(sizes)))


def _rounds(matrices: Matrices) -> list[Exchange]:
    """Items that are updated together: as many as MUON_ROUND allows a rank, at least one."""
    size = 1 if matrices.group is None else dist.get_world_size(matrices.group)
    rounds: list[list[Item]] = [[]]
    filled = 0
    for name, sharded in matrices.parameters.items():
        for item in items_of(name, sharded.layout.shape, matrices.model):
            if rounds[-1] and filled + item.numbers > MUON_ROUND * size:
                rounds.append([])
                filled = 0
            rounds[-1].append(item)
            filled += item.numbers
    return [Exchange(matrices, items) for items in rounds if items]


class Muon:
    """One step of all matrices of this rank and its neighbours, called by all of them together.

    momentum <- mu momentum + (1 - mu) gradient, of which checkpoints hold this form (Jordan 2024
    and torch.optim.Muon; a sum, as in arXiv:2502.16982, is 1 / (1 - mu) times it); with Nesterov's
    mu momentum + (1 - mu) gradient is made orthogonal. Decay is decoupled, by the rate itself.

    Args:
        matrices: of this rank, of each group of ranks that it is in.
        training: the keys muon_*, and weight_decay.
    """

    def __init__(self, matrices: Sequence[Matrices], training: Training) -> None:
        self.training = training
        self.factor = rate_factor(training, "matrix", matrices[0].model.width_factor)
        self.rounds = [exchange for each in matrices for exchange in _rounds(each)]
        # stacked experts may take several rounds
        self._last = {
            item.name: number
            for number, exchange in enumerate(self.rounds)
            for item in exchange.items
        }

    def step(
        self, held: Mapping[str, MatrixShard], *, rate: Tensor, divisor: Tensor, skip: Tensor
    ) -> None:
        """Update weights and momenta.

        Args:
            held: this rank's part of every matrix, also where it is empty.
            rate, divisor, skip: as of Optimizer.step.
        """
        rate = rate.double()
        own = rate * self.factor
        kept = 1 - rate * self.training.weight_decay * (1 - skip)
        parts: dict[str, Tensor] = {}
        for number, exchange in enumerate(self.rounds):
            names = dict.fromkeys(item.name for item in exchange.items)
            for name in names:
                if name not in parts:
                    parts[name] = self._direction(held[name], divisor, skip)
            updates = {
                item: self._update(exchange.items[item], whole)
                for item, whole in exchange.gather({name: parts[name] for name in names}).items()
            }
            exchange.scatter(updates, parts)
            for name in [name for name in names if self._last[name] == number]:
                # a skipped step's gradient may be NaN, and so is what was made of it
                part = torch.where(skip > 0, 0, parts.pop(name) * own)
                held[name].weight.mul_(kept).sub_(part)

    def _direction(self, part: MatrixShard, divisor: Tensor, skip: Tensor) -> Tensor:
        mu = self.training.muon_momentum
        gradient = part.gradient / divisor
        momentum = torch.lerp(part.momentum, gradient, 1 - mu)
        part.momentum.copy_(torch.where(skip > 0, part.momentum, momentum))
        return torch.lerp(gradient, momentum, mu) if self.training.muon_nesterov else momentum

    def _update(self, item: Item, u_MN: Tensor) -> Tensor:
        found = []
        for part_MN in torch.split(u_MN, list(item.parts)):
            rows, columns = part_MN.shape[::-1] if item.transposed else part_MN.shape
            found.append(
                orthogonal(part_MN, self.training) * scale_of(rows, columns, self.training)
            )
        return torch.cat(found)
