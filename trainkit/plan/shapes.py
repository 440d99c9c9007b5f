"""The parameters of a model one by one, as units of sharding: what a stage of a pipeline holds, and what of it one rank.

Symbols as in arithmetic.py. Tensor parallelism splits the rows of what comes first in attention and MLP, with its biases, the columns of what comes
second, and the vocabulary's rows; norms, positions and the second's biases are whole on every rank (Shoeybi et al. 2019, arXiv:1909.08053, section 3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.jobs.schema import Model


@dataclass(frozen=True)
class Weight:
    """One parameter: rows x columns, and which of the two tensor parallelism splits."""

    rows: int
    columns: int = 1
    split: Literal["rows", "columns", "none"] = "none"

    def local(self, tensor: int) -> tuple[int, int]:
        """(rows, columns) on the tensor-parallel rank that has most."""
        rows, columns = self.rows, self.columns
        return (-(-rows // tensor) if self.split == "rows" else rows), (-(-columns // tensor) if self.split == "columns" else columns)

    def numbers(self, tensor: int = 1) -> int:
        """Elements on that rank."""
        rows, columns = self.local(tensor)
        return rows * columns

    def shard(self, tensor: int, data: int) -> int:
        """Elements of the largest shard where fully_shard splits the first dimension over `data` ranks."""
        rows, columns = self.local(tensor)
        return -(-rows // data) * columns


Unit = tuple[Weight, ...]


def _norm(model: Model) -> Unit:
    return (Weight(model.hidden_size),) if model.family == "llama" else (Weight(model.hidden_size),) * 2


def block_unit(model: Model) -> Unit:
    """The parameters of one block."""
    h, f = model.hidden_size, model.ffn_width
    q, kv = model.num_attention_heads * model.head_size, 2 * model.query_groups * model.head_size
    gated = model.family == "llama"
    up = 2 * f if gated else f
    products = (Weight(q + kv, h, "rows"), Weight(h, q, "columns"), Weight(up, h, "rows"), Weight(h, f, "columns"))
    biases = () if gated else (Weight(q + kv, 1, "rows"), Weight(h), Weight(up, 1, "rows"), Weight(h))
    return products + biases + _norm(model) * (1 if model.gpt_j_tied else 2)


def outer_unit(model: Model, vocab_size: int, *, first: bool, last: bool) -> Unit:
    """What a stage holds besides blocks: embeddings on the first; final norm and head on the last, a copy of the embedding where the head is tied."""
    h = model.hidden_size
    vocabulary = Weight(vocab_size, h, "rows")
    begin: Unit = (vocabulary,) if first else ()
    if first and model.family == "gpt":
        begin += (Weight(model.positions, h),)
    if not last:
        return begin
    head: Unit = (vocabulary,) if model.untied or not first else ()
    return begin + _norm(model) + head


def stage_units(model: Model, vocab_size: int, layers: int, *, first: bool = True, last: bool = True) -> list[Unit]:
    """The units of a stage of `layers` blocks; a whole model without further words. Each is gathered and reduced at once."""
    return [*([block_unit(model)] * layers), outer_unit(model, vocab_size, first=first, last=last)]


def _each(units: Sequence[Unit], size: Callable[[Weight], int]) -> list[int]:
    """Sizes of units; equal ones are reckoned once."""
    known = {unit: sum(map(size, unit)) for unit in set(units)}
    return [known[unit] for unit in units]


def numbers(units: Sequence[Unit], tensor: int = 1) -> int:
    """Parameters on one tensor-parallel rank."""
    return sum(_each(units, lambda weight: weight.numbers(tensor)))


def largest(units: Sequence[Unit], tensor: int = 1) -> int:
    """Parameters of the largest unit on one tensor-parallel rank."""
    return max(_each(units, lambda weight: weight.numbers(tensor)))


def gathered_at_once(units: Sequence[Unit], tensor: int = 1) -> int:
    """Parameters on one tensor-parallel rank where blocks are gathered one after another, the next one ahead; what is around them stays."""
    *blocks, outer = units
    return numbers([*blocks[:2], outer], tensor)


def shard(units: Sequence[Unit], tensor: int, data: int) -> int:
    """Parameters of the largest shard under fully_shard."""
    return sum(_each(units, lambda weight: weight.shard(tensor, data)))
