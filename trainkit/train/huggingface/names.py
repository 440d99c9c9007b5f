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
from typing import TYPE_CHECKING

from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.families.contract import HuggingFace
from trainkit.jobs.schema import Model

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class RowMapping:
    """Rows [start, start + rows) of one of our tensors are rows of `source` from source_start on,
    each `step` after the one before it; columns, where that is transposed. `expert`: of what has
    that place in the first dimension of `source`."""

    start: int
    rows: int
    source: str
    source_start: int = 0
    transposed: bool = False
    step: int = 1
    expert: int | None = None

    def part(self, start: int, stop: int) -> slice:
        """Where rows [start, stop) of ours lie in `source`."""
        first = self.source_start + (start - self.start) * self.step
        return slice(first, first + (stop - start - 1) * self.step + 1, self.step)


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
    hidden = model.hidden_size
    layers = model.blocks
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
    return entries | _further(model, entries) if model.mtp_num_layers else entries


def _further(model: Model, entries: Mapping[str, TensorMapping]) -> dict[str, TensorMapping]:
    """What predicts one token more, besides its block, and what that layer has a copy of, of
    `entries`."""
    names = model.architecture.hugging_face
    prefix = names.block.format(model.num_layers)
    hidden = model.hidden_size
    shapes: dict[str, Shape] = {"mtp.eh_proj": (hidden, 2 * hidden)}
    found = {
        f"{ours}.weight": _whole(shapes.get(ours, (hidden,)), f"{prefix}{theirs}.weight")
        for ours, theirs in names.further.items()
    }
    for ours, theirs in names.further_copies.items():
        name = f"{ours if ours != 'head' or model.untied else 'embed_tokens'}.weight"
        entry = found.get(name) or entries[name]
        found[name] = replace(entry, again=(*entry.again, f"{prefix}{theirs}.weight"))
    return found


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
    pieces = tuple(replace(piece, source=prefix + piece.source) for piece in entry.pieces)
    return TensorMapping(entry.shape, pieces, tuple(prefix + name for name in entry.again))


def _rows(model: Model, *, sparse: bool) -> dict[str, Shape]:
    """The products of a block by their names: rows of what each is put together from."""
    hidden = model.hidden_size
    heads = model.num_attention_heads
    size = model.head_size
    rows: dict[str, Shape] = {"attention.out": (hidden,)}
    if mla := model.mla:
        rows["attention.kv_a"] = (mla.kv_lora_rank + mla.qk_pos_emb_head_dim,)
        rows["attention.kv_b"] = (heads * (mla.qk_head_dim + mla.v_head_dim),)
        if mla.q_lora_rank:
            rows["attention.q_a"] = (mla.q_lora_rank,)
        rows["attention.q_b" if mla.q_lora_rank else "attention.q"] = (heads * size,)
    else:
        rows["attention.qkv"] = (heads * size, *(model.query_groups * size,) * 2)
    if not sparse or model.moe is None:
        rows[f"mlp.{model.mlp.module}"] = (model.ffn_width,) * model.mlp.projections
        return rows | {"mlp.down": (hidden,)}
    rows["mlp.router"] = (model.moe.num_experts,)
    if shared := model.moe.shared_expert_intermediate_size:
        rows |= {"mlp.shared_expert.gate_up": (shared, shared), "mlp.shared_expert.down": (hidden,)}
    return rows


def _columns(model: Model) -> dict[str, int]:
    """Those of products that do not read the residual stream."""
    heads = model.num_attention_heads
    columns = {"attention.out": heads * model.head_size, "mlp.down": model.ffn_width}
    if mla := model.mla:
        columns |= {"attention.out": heads * mla.v_head_dim, "attention.kv_b": mla.kv_lora_rank}
        columns["attention.q_b"] = mla.q_lora_rank or 0
    if model.moe is not None:
        columns["mlp.shared_expert.down"] = model.moe.shared_expert_intermediate_size or 0
    return columns


def _norms(model: Model) -> dict[str, int]:
    """Widths of the norms of a block."""
    together = model.query_key_norm == "projection"
    heads = model.num_attention_heads
    groups = model.query_groups
    norms = dict.fromkeys(model.norms, model.hidden_size)
    if model.query_key_norm != "none":
        norms["attention.q_norm"] = model.head_size * (heads if together else 1)
        norms["attention.k_norm"] = model.head_size * (groups if together else 1)
    if mla := model.mla:
        norms["attention.kv_a_norm"] = mla.kv_lora_rank
        if mla.q_lora_rank:
            norms["attention.q_a_norm"] = mla.q_lora_rank
    return norms


def _vectors(model: Model, *, sparse: bool) -> dict[str, int]:
    """Lengths of a block's other vectors, by their whole names."""
    found: dict[str, int] = {}
    if model.architecture.sinks:
        found["attention.sinks.weight"] = model.num_attention_heads
    if sparse and model.routing.expert_bias:
        found["mlp.router.expert_bias"] = model.routing.experts
    return found


# Qwen2-MoE's names of the expert that every token takes, for families that have none
_SHARED = {
    "mlp.shared_expert.gate_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "mlp.shared_expert.down": ("mlp.shared_expert.down_proj",),
}


def _block(model: Model, *, sparse: bool) -> dict[str, TensorMapping]:
    """One block's parameters, with names from within the block. `sparse`: it has experts."""
    family = model.architecture
    names = family.hugging_face
    rows = _rows(model, sparse=sparse)
    columns = _columns(model)
    norms = _norms(model)
    biased = {
        "attention.qkv": model.qkv_bias,
        "attention.out": family.bias or family.out_bias,
        "mlp.router": sparse and model.routing.bias,
    }
    entries: dict[str, TensorMapping] = {}
    for module, theirs in {**names.inside, **_SHARED, **names.inside}.items():
        kinds: tuple[str, ...] = ()  # this block has no such module
        if module in rows:
            kinds = ("weight", "bias") if biased.get(module, family.bias) else ("weight",)
        elif module.startswith("attention."):
            kinds = ("weight",) if module in norms else ()
        elif module in norms or (module == "mlp_norm" and model.gpt_j_tied):
            kinds = family.norm.parameters
        for kind in kinds:
            name = f"{module}.{kind}"
            sources = tuple(f"{their}.{kind}" for their in theirs)
            if module == "mlp_norm" and model.gpt_j_tied:
                shared = f"attention_norm.{kind}"
                entries[shared] = replace(entries[shared], again=sources)
            elif module in norms:
                entries[name] = _whole((norms[module],), sources[0])
            else:
                shape: Shape = (sum(rows[module]),)
                if kind == "weight":
                    shape = (*shape, columns.get(module, model.hidden_size))
                pieces = _pieces(model, name, rows[module], sources)
                entries[name] = TensorMapping(shape, tuple(pieces))
    for name, length in _vectors(model, sparse=sparse).items():
        if theirs_too := names.vectors.get(name):
            entries[name] = _whole((length,), theirs_too)
    return entries | (_experts(model) if sparse else {})


def _experts(model: Model) -> dict[str, TensorMapping]:
    """The matrices of a block's experts, of all of them one below the other."""
    moe = model.moe
    hidden = model.hidden_size
    assert moe is not None
    count = moe.num_experts
    width = moe.ffn_hidden_size
    theirs = model.architecture.hugging_face.experts
    if all("{}" not in name for names in theirs.values() for name in names):
        return _stacked_experts(model)
    entries: dict[str, TensorMapping] = {}
    for module, names in theirs.items():
        sources = [f"{name.format(i)}.weight" for i in range(count) for name in names]
        transposed = module == "mlp.experts.down"
        pieces = tuple(
            RowMapping(i * width, width, source, transposed=transposed)
            for i, source in enumerate(sources)
        )
        entries[f"{module}.weight"] = TensorMapping((len(sources) * width, hidden), pieces)
    return entries


def _stacked_experts(model: Model) -> dict[str, TensorMapping]:
    """Where one of their tensors is of all experts."""
    moe = model.moe
    hidden = model.hidden_size
    assert moe is not None
    count = moe.num_experts
    width = moe.ffn_hidden_size
    theirs = model.architecture.hugging_face.experts
    (up,), (down,) = theirs["mlp.experts.gate_up"], theirs["mlp.experts.down"]
    gates_and_values = [
        RowMapping((2 * i + half) * width, width, up, half, True, 2, i)
        for i in range(count)
        for half in (0, 1)
    ]
    of_bias = [replace(p, source=f"{up}_bias", transposed=False) for p in gates_and_values]
    downs = [RowMapping(i * width, width, down, expert=i) for i in range(count)]
    outs = [RowMapping(i * hidden, hidden, f"{down}_bias", expert=i) for i in range(count)]
    return {
        "mlp.experts.gate_up.weight": TensorMapping(
            (2 * count * width, hidden), tuple(gates_and_values)
        ),
        "mlp.experts.gate_up.bias": TensorMapping((2 * count * width,), tuple(of_bias)),
        "mlp.experts.down.weight": TensorMapping((count * width, hidden), tuple(downs)),
        "mlp.experts.down.bias": TensorMapping((count * hidden,), tuple(outs)),
    }


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
            experts = {piece.expert for piece in pieces}
            rows = sum(piece.rows for piece in pieces) // len(experts)
            shape = (rows, *entry.shape[1:])
            shape = shape[::-1] if pieces[0].transposed else shape
            shape = shape if experts == {None} else (len(experts), *shape)
            found[source] = PublishedTensor(shape, name, tuple(pieces))
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
