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
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.jobs.optimizers import MUON_ROUND, rate_factor
from trainkit.jobs.schema import Model, Training
from trainkit.plan.parameter_shapes import block_matrices
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


def rows_of(name: str, model: Model) -> list[int]:
    """Rows of each matrix that a parameter of a block is made of, in their order."""
    return list(block_matrices(model)[name.split(".", 2)[2]].matrix_rows)


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
    """Where a part of a parameter lies in the whole, and whether its rank sends it: of several
    that hold the same the first does."""

    offsets: Offsets
    shape: tuple[int, ...]
    sent: bool

    @property
    def place(self) -> tuple[slice, ...]:
        return tuple(
            slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True)
        )

    @property
    def numbers(self) -> int:
        return self.shape[0] * self.shape[1]


class Exchange:
    """Puts matrices together on their owners, and takes the results apart.

    Made by all ranks of the group together.

    Args:
        matrices: of this rank.
    """

    def __init__(self, matrices: Matrices) -> None:
        self.matrices = matrices
        self.size = 1 if matrices.group is None else dist.get_world_size(matrices.group)
        self.rank = 0 if matrices.group is None else dist.get_rank(matrices.group)
        mine = {
            name: [
                _Box(
                    box.offsets,
                    tuple(box.of(local_part(sharded.parameter)).shape),
                    matrices.tensor_rank % box.replicas == 0,
                )
                for box in sharded.boxes
            ]
            for name, sharded in matrices.parameters.items()
        }
        # of each rank
        self.boxes: list[dict[str, list[_Box]]] = [mine] * self.size
        if matrices.group is not None:
            dist.all_gather_object(self.boxes, mine, matrices.group)
        self.owned = self._owners()

    def _owners(self) -> list[list[str]]:
        """Names that each rank updates: the dearest first, to the rank that has least to do."""
        shapes = {name: sharded.layout.shape for name, sharded in self.matrices.parameters.items()}
        cost = {name: min(m, n) ** 2 * max(m, n) for name, (m, n) in shapes.items()}
        owned: list[list[str]] = [[] for _ in range(self.size)]
        load = [0] * self.size
        for name in sorted(cost, key=lambda each: -cost[each]):
            rank = load.index(min(load))
            owned[rank].append(name)
            load[rank] += cost[name]
        return owned

    def gather(self, parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors that this rank owns.

        Args:
            parts: this rank's part of every one, like the parameter's.
        """
        views = {name: self.matrices.parameters[name].views(part) for name, part in parts.items()}
        sent = [
            [
                views[name][box.offsets]
                for name in names
                for box in self.boxes[self.rank][name]
                if box.sent
            ]
            for names in self.owned
        ]
        names = self.owned[self.rank]
        taken = [
            [(name, box) for name in names for box in boxes[name] if box.sent]
            for boxes in self.boxes
        ]
        any_part = next(iter(parts.values()))
        flat = self._swap(sent, [sum(box.numbers for _, box in each) for each in taken], any_part)
        whole = {
            name: any_part.new_empty(self.matrices.parameters[name].layout.shape) for name in names
        }
        for part, each in zip(flat, taken, strict=True):
            start = 0
            for name, box in each:
                whole[name][box.place] = part[start : start + box.numbers].view(box.shape)
                start += box.numbers
        return whole

    def scatter(self, whole: Mapping[str, Tensor], parts: Mapping[str, Tensor]) -> None:
        """Write this rank's part of every tensor into `parts`, from the owners' whole ones."""
        sent = [
            [whole[name][box.place] for name in self.owned[self.rank] for box in boxes[name]]
            for boxes in self.boxes
        ]
        mine = self.boxes[self.rank]
        taken = [[(name, box) for name in names for box in mine[name]] for names in self.owned]
        any_part = next(iter(parts.values()))
        flat = self._swap(sent, [sum(box.numbers for _, box in each) for each in taken], any_part)
        for part, each in zip(flat, taken, strict=True):
            start = 0
            for name, box in each:
                view = self.matrices.parameters[name].views(parts[name])[box.offsets]
                view.copy_(part[start : start + box.numbers].view(box.shape))
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


def _rounds(matrices: Matrices) -> list[Matrices]:
    """Matrices that are updated together: as many as MUON_ROUND allows a rank, at least one."""
    size = 1 if matrices.group is None else dist.get_world_size(matrices.group)
    rounds: list[dict[str, ShardedParameter]] = [{}]
    filled = 0
    for name, sharded in matrices.parameters.items():
        numbers = math.prod(sharded.layout.shape)
        if rounds[-1] and filled + numbers > MUON_ROUND * size:
            rounds.append({})
            filled = 0
        rounds[-1][name] = sharded
        filled += numbers
    return [matrices._replace(parameters=each) for each in rounds if each]


class Muon:
    """One step of all matrices of this rank and its neighbours, called by all of them together.

    momentum <- mu momentum + (1 - mu) gradient, of which checkpoints hold this form (Jordan 2024
    and torch.optim.Muon; a sum, as in arXiv:2502.16982, is 1 / (1 - mu) times it); with Nesterov's
    mu momentum + (1 - mu) gradient is made orthogonal. Decay is decoupled, by the rate itself.

    Args:
        matrices: of this rank.
        training: the keys muon_*, and weight_decay.
    """

    def __init__(self, matrices: Matrices, training: Training) -> None:
        self.model = matrices.model
        self.training = training
        self.factor = rate_factor(training, "matrix", matrices.model.width_factor)
        self.rounds = [Exchange(each) for each in _rounds(matrices)]

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
        for exchange in self.rounds:
            parts = {
                name: self._direction(held[name], divisor, skip)
                for name in exchange.matrices.parameters
            }
            updates = {
                name: self._update(name, whole) for name, whole in exchange.gather(parts).items()
            }
            exchange.scatter(updates, parts)
            for name, part in parts.items():
                # a skipped step's gradient may be NaN, and so is what was made of it
                held[name].weight.mul_(kept).sub_(torch.where(skip > 0, 0, part * own))

    def _direction(self, part: MatrixShard, divisor: Tensor, skip: Tensor) -> Tensor:
        mu = self.training.muon_momentum
        gradient = part.gradient / divisor
        momentum = torch.lerp(part.momentum, gradient, 1 - mu)
        part.momentum.copy_(torch.where(skip > 0, part.momentum, momentum))
        return torch.lerp(gradient, momentum, mu) if self.training.muon_nesterov else momentum

    def _update(self, name: str, u_MN: Tensor) -> Tensor:
        return torch.cat(
            [
                orthogonal(part_MN, self.training)
                * scale_of(len(part_MN), part_MN.shape[1], self.training)
                for part_MN in torch.split(u_MN, rows_of(name, self.model))
            ]
        )
