"""Which Hugging Face tensors ours are made of, read in both directions. The names of each family
stand in trainkit/families.

Our tensors are rows of theirs: all of one (a norm), some of each of several (Llama's q, k and v
projections are rows of our `qkv`), many small runs (GPT-NeoX lays q, k and v out head by head), or
all of each of many (a matrix of ours holds that of every expert). GPT-2's projections are Conv1D,
which stores (in, out): there rows are columns, as in experts' projections down, which we store so.
Layouts: transformers, models/{gpt2,gpt_neox,llama,mixtral}/modeling_*.py and
conversion_mapping.py. Imports no torch: stages look at names before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from trainkit.families.contract import HuggingFace
from trainkit.jobs.schema import Model

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RowMapping:
    """Rows [start, start + rows) of one of our tensors are rows [source_start, source_start +
    rows) of `source`; columns, where that is transposed."""

    start: int
    rows: int
    source: str
    source_start: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors. `again` names tensors that hold the same once more."""

    shape: Shape
    pieces: tuple[RowMapping, ...]
    again: tuple[str, ...] = ()


def table(model: Model, vocab_size: int) -> dict[str, TensorMapping]:
    """Every parameter of a model by its name here, in the order of the network."""
    family = model.architecture
    names = family.hugging_face
    hidden, layers = model.hidden_size, model.num_layers
    entries = {
        "embed_tokens.weight": _whole(
            (vocab_size, hidden), f"{names.outside['embed_tokens']}.weight"
        )
    }
    if family.learned_positions:
        entries["embed_positions.weight"] = _whole(
            (model.positions, hidden), f"{names.outside['embed_positions']}.weight"
        )
    blocks = {sparse: _block(model, sparse=sparse) for sparse in map(model.sparse, range(layers))}
    for i in range(layers):
        for name, entry in blocks[model.sparse(i)].items():
            entries[f"layers.{i}.{name}"] = _in_block(entry, names.block.format(i))
    entries |= {
        f"final_norm.{kind}": _whole((hidden,), f"{names.outside['final_norm']}.{kind}")
        for kind in family.norm.parameters
    }
    if model.untied:
        entries["head.weight"] = _whole((vocab_size, hidden), f"{names.outside['head']}.weight")
    return entries


def with_output_factor(name: str, found: Tensor, model: Model, factor: float) -> Tensor:
    """One of our tensors with logits multiplied by `factor`: other programs know no multiplier of
    muP, so that the last norm's weight has it there. Exact where the factor is a power of two."""
    if factor == 1 or not name.startswith("final_norm."):
        return found
    offset = model.architecture.norm.offset if name.endswith(".weight") else 0.0
    return (found.float() + offset) * factor - offset


def _whole(shape: Shape, source: str) -> TensorMapping:
    return TensorMapping(shape, (RowMapping(0, shape[0], source),))


def _in_block(entry: TensorMapping, prefix: str) -> TensorMapping:
    pieces = tuple(
        RowMapping(p.start, p.rows, prefix + p.source, p.source_start, p.transposed)
        for p in entry.pieces
    )
    return TensorMapping(entry.shape, pieces, tuple(prefix + name for name in entry.again))


def _block(model: Model, *, sparse: bool) -> dict[str, TensorMapping]:
    """One block's parameters, with names from within the block. `sparse`: it has experts."""
    family = model.architecture
    hidden = model.hidden_size
    width = model.ffn_width
    q = model.num_attention_heads * model.head_size
    kv = model.query_groups * model.head_size
    rows: dict[str, Shape] = {
        "attention.qkv": (q, kv, kv),
        "attention.out": (hidden,),
        f"mlp.{model.mlp.module}": (width,) * model.mlp.projections,
        "mlp.down": (hidden,),
    }
    absent: set[str] = {f"mlp.{model.mlp.module}", "mlp.down"} if sparse else {"mlp.router"}
    if model.moe is not None:
        rows["mlp.router"] = (model.moe.num_experts,)
    columns = {"attention.out": q, "mlp.down": width}
    together = model.query_key_norm == "projection"
    heads_norms = {
        "attention.q_norm": q if together else model.head_size,
        "attention.k_norm": kv if together else model.head_size,
    }
    entries: dict[str, TensorMapping] = {}
    for module, theirs in family.hugging_face.inside.items():
        if module in absent:
            continue
        is_norm = module not in rows
        if module in heads_norms:
            kinds: tuple[str, ...] = ("weight",)
        elif is_norm:
            kinds = family.norm.parameters
        else:
            bias = model.qkv_bias if module == "attention.qkv" else family.bias
            kinds = ("weight", "bias") if bias else ("weight",)
        for kind in kinds:
            name = f"{module}.{kind}"
            sources = tuple(f"{their}.{kind}" for their in theirs)
            if module == "mlp_norm" and model.gpt_j_tied:
                shared = f"attention_norm.{kind}"
                entries[shared] = replace(entries[shared], again=sources)
            elif is_norm:
                entries[name] = _whole((heads_norms.get(module, hidden),), sources[0])
            else:
                shape: Shape = (sum(rows[module]),)
                if kind == "weight":
                    shape = (*shape, columns.get(module, hidden))
                pieces = _pieces(model, name, rows[module], sources)
                entries[name] = TensorMapping(shape, tuple(pieces))
    return entries | (_experts(model) if sparse else {})


def _experts(model: Model) -> dict[str, TensorMapping]:
    """The matrices of a block's experts, of all of them one below the other, and of the one that
    every token takes besides. That has the names of Qwen2-MoE: no family here has it there."""
    moe, hidden = model.moe, model.hidden_size
    assert moe is not None
    entries: dict[str, TensorMapping] = {}
    for module, theirs in model.architecture.hugging_face.experts.items():
        sources = [f"{name.format(i)}.weight" for i in range(moe.num_experts) for name in theirs]
        width, transposed = moe.ffn_hidden_size, module == "mlp.experts.down"
        pieces = tuple(
            RowMapping(i * width, width, source, transposed=transposed)
            for i, source in enumerate(sources)
        )
        entries[f"{module}.weight"] = TensorMapping((len(sources) * width, hidden), pieces)
    if shared := moe.shared_expert_intermediate_size:
        gate, up, down = (f"mlp.shared_expert.{of}_proj.weight" for of in ("gate", "up", "down"))
        entries["mlp.shared_expert.gate_up.weight"] = TensorMapping(
            (2 * shared, hidden), (RowMapping(0, shared, gate), RowMapping(shared, shared, up))
        )
        entries["mlp.shared_expert.down.weight"] = _whole((hidden, shared), down)
    return entries


def _pieces(model: Model, name: str, rows: Shape, sources: Sequence[str]) -> Iterator[RowMapping]:
    """What our projection `name` is put together from, `rows` of each of its parts."""
    names = model.architecture.hugging_face
    if names.by_head and name.startswith("attention.qkv."):
        heads = model.num_attention_heads
        size = model.head_size
        for part in range(3):
            for head in range(heads):
                start = (part * heads + head) * size
                yield RowMapping(start, size, sources[0], (head * 3 + part) * size)
    elif len(sources) == 1:
        transposed = names.conv1d and name.endswith(".weight")
        yield RowMapping(0, sum(rows), sources[0], transposed=transposed)
    else:
        for i, source in enumerate(sources):
            yield RowMapping(sum(rows[:i]), rows[i], source)


@dataclass(frozen=True)
class PublishedTensor:
    """One Hugging Face tensor: its shape, and the pieces of ours that make it up, with the name
    of ours."""

    shape: Shape
    ours: str
    pieces: tuple[RowMapping, ...]


def published(entries: Mapping[str, TensorMapping]) -> dict[str, PublishedTensor]:
    """The Hugging Face tensors that our tensors make up; every one comes from one of ours."""
    found: dict[str, PublishedTensor] = {}
    for name, entry in entries.items():
        of_source: dict[str, list[RowMapping]] = {}
        for piece in entry.pieces:
            of_source.setdefault(piece.source, []).append(piece)
        for source, pieces in of_source.items():
            shape = (sum(piece.rows for piece in pieces), *entry.shape[1:])
            found[source] = PublishedTensor(
                shape[::-1] if pieces[0].transposed else shape, name, tuple(pieces)
            )
        found |= {copy: PublishedTensor(entry.shape, name, entry.pieces) for copy in entry.again}
    return found


def canonical(name: str, names: HuggingFace) -> str:
    """A name found in a file as the table has it: folders saved without a head lack the prefix,
    and transformers 5 may call embed_out lm_head."""
    head = f"{names.outside['head']}.weight"
    if name in (head, "lm_head.weight"):
        return head
    if name.startswith(names.prefix):
        return name
    return names.prefix + name
