"""The parameters of a model one by one, as units of sharding: what a stage of a pipeline holds,
and what of it one rank.

Symbols as in arithmetic.py. Tensor parallelism splits the rows of what comes first in attention
and MLP, with its biases, the columns of what comes second, and the vocabulary's rows; norms,
positions and the second's biases are whole on every rank (Shoeybi et al. 2019, arXiv:1909.08053,
section 3). Where there are fewer heads of keys and values than ranks, several ranks have the
same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.jobs.optimizers import Role, kept_of
from trainkit.jobs.ranks import share_of_rank
from trainkit.jobs.schema import Model, Training
from trainkit.plan.arithmetic import head_norms
from trainkit.plan.layout import Layout


@dataclass(frozen=True)
class Weight:
    """One parameter: rows x columns, and which of the two tensor parallelism splits.

    Args:
        split: what is split.
        parts: where several matrices lie behind one another in the split dimension, their sizes:
            each is split by itself.
        head: what is split are whole heads of so many channels; no rank has less than one of any
            part.
        role: what it is to an optimizer.
    """

    rows: int
    columns: int = 1
    split: Literal["rows", "columns", "none"] = "none"
    parts: tuple[int, ...] = ()
    head: int = 0
    role: Role = "vector"

    @property
    def matrix_rows(self) -> tuple[int, ...]:
        """Rows of each matrix that lies in it."""
        return self.parts or (self.rows,)

    def local(self, tensor: int, rank: int | None = None) -> tuple[int, int]:
        """(rows, columns) on a tensor-parallel rank of the native trainer, which may split
        unevenly; without `rank` equal parts, as other engines have."""
        if self.split == "none":
            return self.rows, self.columns
        parts = self.parts or (self.rows if self.split == "rows" else self.columns,)
        size = sum(self._local(part, tensor, rank) for part in parts)
        if self.split == "rows":
            return (size, self.columns)
        return (self.rows, size)

    def _local(self, part: int, tensor: int, rank: int | None) -> int:
        if self.head or rank is None:
            return max(self.head, -(-part // tensor))
        return share_of_rank(part, tensor, rank)[1]

    def numbers(self, tensor: int = 1, rank: int | None = None) -> int:
        """Elements on that rank."""
        rows, columns = self.local(tensor, rank)
        return rows * columns

    def shard(self, tensor: int, rank: int | None, data: int) -> int:
        """Elements of the largest shard where fully_shard splits the first dimension over `data`
        ranks."""
        rows, columns = self.local(tensor, rank)
        return -(-rows // data) * columns


Unit = tuple[Weight, ...]


def _norm(model: Model) -> Unit:
    return (Weight(model.hidden_size),) * len(model.architecture.norm.parameters)


def block_unit(model: Model) -> Unit:
    """The parameters of one block."""
    h = model.hidden_size
    f = model.ffn_width
    d = model.head_size
    q = model.num_attention_heads * model.head_size
    k = model.query_groups * model.head_size
    qkv = (q, k, k)
    up = (f,) * model.mlp.projections

    def before(columns: int, role: Role) -> Unit:
        return (
            Weight(sum(qkv), columns, "rows", qkv, d, role),
            Weight(sum(up), columns, "rows", up, role=role),
        )

    after = (
        Weight(h, q, "columns", head=d, role="matrix"),
        Weight(h, f, "columns", role="matrix"),
    )
    products = (*before(h, "matrix"), *after)
    biases: Unit = ()
    if model.architecture.bias:
        biases = (*before(1, "vector"), Weight(h), Weight(h))
    elif model.qkv_bias:
        biases = before(1, "vector")[:1]
    together = model.query_key_norm == "projection"
    norms = (
        Weight(width, split="rows", head=d) if together else Weight(width)
        for width in head_norms(model)
    )
    return products + biases + _norm(model) * len(model.norms) + tuple(norms)


def outer_unit(model: Model, vocab_size: int, *, first: bool, last: bool) -> Unit:
    """What a stage holds besides blocks: embeddings on the first; final norm and head on the
    last, a copy of the embedding where the head is tied."""
    h = model.hidden_size
    vocabulary = Weight(vocab_size, h, "rows", role="table")
    begin: Unit
    begin = (vocabulary,) if first else ()
    if first and model.architecture.learned_positions:
        begin += (Weight(model.positions, h, role="table"),)
    if not last:
        return begin
    head: Unit
    head = (vocabulary,) if model.untied or not first else ()
    return begin + _norm(model) + head


def chunk_units(
    model: Model, vocab_size: int, layers: int, *, first: bool = True, last: bool = True
) -> list[Unit]:
    """The units of a chunk of `layers` blocks, what is around them last; a whole model without
    further words. Each is gathered and reduced at once."""
    return [*([block_unit(model)] * layers), outer_unit(model, vocab_size, first=first, last=last)]


def stage_chunks(model: Model, vocab_size: int, layout: Layout, stage: int) -> list[list[Unit]]:
    """The units of each chunk on a stage of a pipeline."""
    end = len(layout.chunks) - 1
    return [
        chunk_units(model, vocab_size, layout.chunks[i], first=i == 0, last=i == end)
        for i in layout.chunks_of(stage)
    ]


def block_matrices(model: Model) -> dict[str, Weight]:
    """The matrices of each block by their names in it; `parts`: those that one holds."""
    up = "mlp.gate_up" if model.mlp.gated else "mlp.up"
    names = ("attention.qkv", up, "attention.out", "mlp.down")
    found = (weight for weight in block_unit(model) if weight.role == "matrix")
    return {f"{name}.weight": weight for name, weight in zip(names, found, strict=True)}


def newton_schulz_flops(model: Model, training: Training) -> list[int]:
    """Of Muon's iterations in a step, of each matrix or fused projection, which one rank makes
    orthogonal: of m rows and n columns, m the fewer, 4 m m n + 2 m m m an iteration."""
    if training.optimizer != "muon":
        return []
    found = []
    for weight in block_matrices(model).values():
        flops = 0
        for rows in weight.matrix_rows:
            least = min(rows, weight.columns)
            flops += 4 * least * rows * weight.columns + 2 * least**3
        found += [training.muon_num_ns_steps * flops] * model.num_layers
    return found


def _each(units: Sequence[Unit], size: Callable[[Weight], int]) -> list[int]:
    """Sizes of units; equal ones are reckoned once."""
    known = {unit: sum(map(size, unit)) for unit in set(units)}
    return [known[unit] for unit in units]


def numbers(units: Sequence[Unit], tensor: int = 1, rank: int | None = None) -> int:
    """Parameters on one tensor-parallel rank."""
    return sum(_each(units, lambda weight: weight.numbers(tensor, rank)))


def largest(units: Sequence[Unit], tensor: int = 1, rank: int | None = None) -> int:
    """Parameters of the largest unit on one tensor-parallel rank."""
    return max(_each(units, lambda weight: weight.numbers(tensor, rank)))


def gathered_at_once(
    chunks: Sequence[Sequence[Unit]], tensor: int = 1, rank: int | None = None
) -> int:
    """Parameters on one tensor-parallel rank where blocks are gathered one after another, the
    next one ahead; what is around them stays."""
    blocks = [unit for chunk in chunks for unit in chunk[:-1]]
    return numbers([*blocks[:2], *(chunk[-1] for chunk in chunks)], tensor, rank)


def shard(units: Sequence[Unit], tensor: int, rank: int | None, data: int) -> int:
    """Parameters of the largest shard under fully_shard."""
    return sum(_each(units, lambda weight: weight.shard(tensor, rank, data)))


def optimizer_state(
    units: Sequence[Unit], training: Training, size: Callable[[Weight], int] = Weight.numbers
) -> int:
    """Elements of all that the optimizer keeps of the weights of units.

    Args:
        size: how many elements of a weight are there; all of them without further words.
    """
    return sum(_each(units, lambda each: len(kept_of(training, each.role)) * size(each)))
