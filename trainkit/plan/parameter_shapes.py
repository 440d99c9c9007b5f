"""The parameters of a model one by one, as units of sharding: what a stage of a pipeline holds,
and what of it one rank.

Symbols as in arithmetic.py. Tensor parallelism splits the rows of what comes first in attention
and MLP, with its biases, the columns of what comes second, and the vocabulary's rows; norms,
positions and the second's biases are whole on every rank (Shoeybi et al. 2019, arXiv:1909.08053,
section 3). Where there are fewer heads of keys and values than ranks, several ranks have the
same one. What makes latents is whole everywhere, what is made of them is split by heads. Experts
lie on ranks of their own order, in units of their own; routers are whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.optimizers import Role, kept_of
from trainkit.jobs.ranks import share_of_rank
from trainkit.jobs.schema import Model, Training
from trainkit.plan.arithmetic import attention_matrices, head_norms, out_bias, sparse_layers
from trainkit.plan.layout import Layout


@functools.cache
def _length(size: int, parts: int, index: int) -> int:
    """Rows of part `index` of `size`."""
    return share_of_rank(size, parts, index)[1]


@dataclass(frozen=True)
class Place:
    """Where a rank stands among those that hold a stage; one that holds all of it without
    further words.

    Args:
        tensor: ranks that layers are split over.
        rank: which of them, of the native trainer, which may split unevenly; None: equal parts,
            as other engines have.
        data: ranks that fully_shard splits over.
        expert: ranks that the experts of a layer lie on.
        expert_tensor, expert_rank, expert_data: `tensor`, `rank` and `data` of experts.
    """

    tensor: int = 1
    rank: int | None = None
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    expert_rank: int | None = None
    expert_data: int = 1


WHOLE = Place()

# parameters on a rank up to which what units cost the host counts for more than their buffers
ONE_UNIT_MOST = 2**27


@dataclass(frozen=True)
class Weight:
    """One parameter: rows x columns, and which of the two tensor parallelism splits.

    Args:
        split: what is split.
        parts: where several matrices lie behind one another in the split dimension, their sizes:
            each is split by itself. Of experts those of one.
        head: what is split are whole heads of so many channels; no rank has less than one of any
            part.
        role: what it is to an optimizer.
        experts: so many lie one below the other: whole ones go to expert-parallel ranks, where
            the rows of each are split; 0: it is none of experts.
        transposed: its matrices are stored (in, out).
    """

    rows: int
    columns: int = 1
    split: Literal["rows", "columns", "none"] = "none"
    parts: tuple[int, ...] = ()
    head: int = 0
    role: Role = "vector"
    experts: int = 0
    transposed: bool = False

    @property
    def matrix_rows(self) -> tuple[int, ...]:
        """Rows of each matrix that lies in it."""
        return (self.parts or (self.rows,)) * max(1, self.experts)

    def local(self, place: Place) -> tuple[int, int]:
        """(rows, columns) on a rank."""
        if self.split == "none":
            return self.rows, self.columns
        if self.experts:
            each = self._share(place.expert_tensor, place.expert_rank)
            return -(-self.experts // place.expert) * each, self.columns
        size = self._share(place.tensor, place.rank)
        return (size, self.columns) if self.split == "rows" else (self.rows, size)

    def _share(self, ranks: int, rank: int | None) -> int:
        """Of the split dimension, of one expert's."""
        parts = self.parts or (self.rows if self.split == "rows" else self.columns,)
        if self.head or rank is None:
            return sum(max(self.head, -(-part // ranks)) for part in parts)
        return sum(_length(part, ranks, rank) for part in parts)

    def numbers(self, place: Place = WHOLE) -> int:
        """Elements on that rank."""
        rows, columns = self.local(place)
        return rows * columns

    def shard(self, place: Place) -> int:
        """Elements of the largest shard where fully_shard splits the first dimension."""
        rows, columns = self.local(place)
        return -(-rows // (place.expert_data if self.experts else place.data)) * columns


Unit = tuple[Weight, ...]


def _norm(model: Model) -> Unit:
    return (Weight(model.hidden_size),) * len(model.architecture.norm.parameters)


def _mlp_matrices(model: Model, name: str, width: int) -> dict[str, Weight]:
    """Of an MLP of this name and width: what comes first, what comes second."""
    up = (width,) * model.mlp.projections
    h = model.hidden_size
    return {
        f"{name}.{model.mlp.module}.weight": Weight(sum(up), h, "rows", up, role="matrix"),
        f"{name}.down.weight": Weight(h, width, "columns", role="matrix"),
    }


def _expert_matrices(model: Model) -> dict[str, Weight]:
    """Of a layer with experts: the router, all experts, the shared one."""
    moe = model.moe
    assert moe is not None
    h, count, width = model.hidden_size, moe.num_experts, moe.ffn_hidden_size
    up = (width,) * model.mlp.projections
    found = {
        "mlp.router.weight": Weight(count, h, role="matrix"),
        f"mlp.experts.{model.mlp.module}.weight": Weight(
            count * sum(up), h, "rows", up, role="matrix", experts=count
        ),
        "mlp.experts.down.weight": Weight(
            count * width, h, "rows", (width,), role="matrix", experts=count, transposed=True
        ),
    }
    if moe.shared_expert_intermediate_size:
        found |= _mlp_matrices(model, "mlp.shared_expert", moe.shared_expert_intermediate_size)
    return found


def matrices_of(model: Model, *, sparse: bool) -> dict[str, Weight]:
    """The matrices of a block by their names in it; `parts`: those that one holds.

    Args:
        model: the shape.
        sparse: of a block that has experts.
    """
    mlp = _expert_matrices(model) if sparse else _mlp_matrices(model, "mlp", model.ffn_width)
    return _attention_matrices(model) | mlp


def _attention_matrices(model: Model) -> dict[str, Weight]:
    """Of a block's attention: queries, keys and values are three matrices; by latents each
    projection is one, as keys and values of a head lie together."""
    d, heads, mla = model.head_size, model.num_attention_heads, model.mla
    parts = tuple(count * d for count in (heads, *(model.query_groups,) * 2))
    # channels of a head in what is split by heads
    split = {"qkv": d, "q": d, "q_b": d, "out": d}
    if mla is not None:
        split |= {"kv_b": mla.qk_head_dim + mla.v_head_dim, "out": mla.v_head_dim}
    found = {}
    for name, (rows, columns) in attention_matrices(model).items():
        how: Literal["rows", "columns", "none"] = "rows" if name in split else "none"
        found[f"attention.{name}.weight"] = Weight(
            rows,
            columns,
            "columns" if name == "out" else how,
            parts if name == "qkv" else (),
            split.get(name, 0),
            "matrix",
        )
    return found


def _biases(matrices: Iterable[Weight]) -> Unit:
    """One each, split as the rows of what they belong to."""
    return tuple(
        Weight(m.rows, 1, "rows", m.parts, m.head) if m.split == "rows" else Weight(m.rows)
        for m in matrices
    )


def _small(model: Model, matrices: dict[str, Weight]) -> Unit:
    """Biases and sinks of a block, not of its experts."""
    family = model.architecture
    found: list[Weight] = []
    if family.bias:
        found += _biases(weight for weight in matrices.values() if not weight.experts)
    else:
        if model.qkv_bias:
            found += _biases([matrices["attention.qkv.weight"]])
        if out_bias(model):
            found += _biases([matrices["attention.out.weight"]])
    if family.sinks:
        found.append(Weight(model.num_attention_heads, split="rows", head=1))
    router = matrices.get("mlp.router.weight")
    if router is not None and model.routing.bias:
        found += _biases([router])
    return tuple(found)


def _expert_biases(model: Model) -> Unit:
    """Of all experts of a layer. Those of what comes second are cut, too: each rank adds its
    own."""
    moe = model.moe
    if moe is None or not model.routing.bias:
        return ()
    up, h, count = (
        (moe.ffn_hidden_size,) * model.mlp.projections,
        model.hidden_size,
        moe.num_experts,
    )
    return tuple(
        Weight(count * sum(parts), split="rows", parts=parts, experts=count) for parts in (up, (h,))
    )


def block_units(model: Model, *, sparse: bool) -> list[Unit]:
    """The parameters of one block, and its experts', which are gathered by themselves."""
    matrices = matrices_of(model, sparse=sparse)
    experts = tuple(weight for weight in matrices.values() if weight.experts)
    products = tuple(weight for weight in matrices.values() if not weight.experts)
    together = model.query_key_norm == "projection"
    norms = (
        Weight(width, split="rows", head=model.head_size) if together else Weight(width)
        for width in head_norms(model)
    )
    small = _small(model, matrices)
    block = products + small + _norm(model) * len(model.norms) + tuple(norms)
    return [block, experts + _expert_biases(model)] if experts else [block]


def further_matrices(model: Model) -> dict[str, Weight]:
    """Of what predicts one token more, besides its block, by their whole names."""
    h = model.hidden_size
    return {"mtp.eh_proj.weight": Weight(h, 2 * h, role="matrix")} if model.mtp_num_layers else {}


def outer_unit(model: Model, vocab_size: int, *, first: bool, last: bool) -> Unit:
    """What a stage holds besides blocks: embeddings on the first; final norm and head on the
    last, what predicts one token more, and for a tied head or for that a copy of the embedding."""
    h = model.hidden_size
    vocabulary = Weight(vocab_size, h, "rows", role="table")
    begin: Unit
    begin = (vocabulary,) if first else ()
    if first and model.architecture.learned_positions:
        begin += (Weight(model.positions, h, role="table"),)
    if not last:
        return begin
    further = tuple(further_matrices(model).values())
    embedding = not first and (model.tied or bool(further))
    tables = (vocabulary,) * (model.untied + embedding)
    return begin + _norm(model) * (1 + 3 * len(further)) + further + tables


def chunk_units(
    model: Model,
    vocab_size: int,
    layers: range | None = None,
    *,
    first: bool = True,
    last: bool = True,
) -> list[Unit]:
    """The units of a chunk of these layers, what is around them last; a whole model without
    further words. Each is gathered and reduced at once; a layer's experts come behind it."""
    layers = range(model.blocks) if layers is None else layers
    outer = outer_unit(model, vocab_size, first=first, last=last)
    return [*_blocks(model, layers, _kinds(model)), outer]


def _kinds(model: Model) -> dict[bool, list[Unit]]:
    """Units of a block without experts and of one with, where the model has those."""
    return {sparse: block_units(model, sparse=sparse) for sparse in layers_by_kind(model)}


def _blocks(model: Model, layers: range, kinds: dict[bool, list[Unit]]) -> list[Unit]:
    """The units of these layers."""
    dense = max(0, min(layers.stop, model.blocks - sparse_layers(model)) - layers.start)
    return kinds.get(False, []) * dense + kinds.get(True, []) * (len(layers) - dense)


def stage_chunks(model: Model, vocab_size: int, layout: Layout, stage: int) -> list[list[Unit]]:
    """The units of each chunk on a stage of a pipeline."""
    end = len(layout.chunks) - 1
    kinds = _kinds(model)
    return [
        [
            *_blocks(model, layout.chunk_layers(i), kinds),
            outer_unit(model, vocab_size, first=i == 0, last=i == end),
        ]
        for i in layout.chunks_of(stage)
    ]


def block_matrices(model: Model) -> dict[str, Weight]:
    """The matrices of blocks of all kinds that the model has, by their names in a block."""
    return {
        name: weight
        for sparse in layers_by_kind(model)
        for name, weight in matrices_of(model, sparse=sparse).items()
    }


def layers_by_kind(model: Model) -> dict[bool, int]:
    """How many layers have no experts (False) and have (True); kinds that are there."""
    sparse = sparse_layers(model)
    counts = {False: model.blocks - sparse, True: sparse}
    return {kind: count for kind, count in counts.items() if count}


def newton_schulz_flops(model: Model, training: Training) -> list[int]:
    """Of Muon's iterations in a step, of each matrix or fused projection (of experts of each
    expert), which one rank makes orthogonal: of m rows and n columns, m the fewer, 4 m m n + 2 m
    m m an iteration."""
    if training.optimizer != "muon":
        return []
    found = [
        training.muon_num_ns_steps * _orthogonal_flops(weight.rows, weight.columns)
        for weight in further_matrices(model).values()
    ]
    for sparse, layers in layers_by_kind(model).items():
        for weight in matrices_of(model, sparse=sparse).values():
            parts = weight.parts if weight.experts else weight.matrix_rows
            flops = sum(_orthogonal_flops(rows, weight.columns) for rows in parts)
            times = layers * max(1, weight.experts)
            found += [training.muon_num_ns_steps * flops] * times
    return found


def _orthogonal_flops(rows: int, columns: int) -> int:
    """Of one iteration."""
    least = min(rows, columns)
    return 4 * least * rows * columns + 2 * least**3


def _each(units: Sequence[Unit], size: Callable[[Weight], int]) -> list[int]:
    """Sizes of units; one that is there several times is reckoned once."""
    known = {id(unit): unit for unit in units}
    sizes = {key: sum(map(size, unit)) for key, unit in known.items()}
    return [sizes[id(unit)] for unit in units]


def numbers(units: Sequence[Unit], place: Place = WHOLE) -> int:
    """Parameters on one rank."""
    return sum(_each(units, lambda weight: weight.numbers(place)))


def is_one_unit(parameters: int, ranks: int) -> bool:
    """Whether the trainer makes one unit of fully_shard of a model, or of a stage's chunk of it,
    instead of one of each block: on one data-parallel rank there is nothing to overlap.

    Args:
        parameters: of the model or chunk, on one rank.
        ranks: data- and context-parallel ones.
    """
    return ranks == 1 and parameters <= ONE_UNIT_MOST


def largest(units: Sequence[Unit], place: Place = WHOLE) -> int:
    """Parameters of the largest unit on one rank."""
    return max(_each(units, lambda weight: weight.numbers(place)))


def gathered_at_once(chunks: Sequence[Sequence[Unit]], place: Place) -> int:
    """Parameters on one rank where blocks are gathered one after another, the next one ahead;
    what is around them stays."""
    blocks = [unit for chunk in chunks for unit in chunk[:-1]]
    layers: list[int] = []
    for unit, size in zip(blocks, _each(blocks, lambda w: w.numbers(place)), strict=True):
        if unit[0].experts:
            layers[-1] += size
        else:
            layers.append(size)
    return sum(sorted(layers)[-2:]) + numbers([chunk[-1] for chunk in chunks], place)


def shard(units: Sequence[Unit], place: Place) -> int:
    """Parameters of the largest shard under fully_shard."""
    return sum(_each(units, lambda weight: weight.shard(place)))


def optimizer_state(
    units: Sequence[Unit], training: Training, size: Callable[[Weight], int] = Weight.numbers
) -> int:
    """Elements of all that the optimizer keeps of the weights of units.

    Args:
        size: how many elements of a weight are there; all of them without further words.
    """
    return sum(_each(units, lambda each: len(kept_of(training, each.role)) * size(each)))
