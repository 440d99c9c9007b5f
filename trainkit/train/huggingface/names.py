"""Which Hugging Face tensors ours are made of: one table a family, read in both directions.

Our tensors are rows of theirs: all of one (a norm), some of each of several (Llama's q, k and v
projections are rows of our `qkv`), or many small runs (GPT-NeoX lays q, k and v out head by
head). GPT-2's projections are Conv1D, which stores (in, out): there rows are columns. Layouts:
transformers, models/{gpt2,gpt_neox,llama}/modeling_*.py. Imports no torch: stages look at names
before anything is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trainkit.jobs.schema import Model

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Family:
    """How transformers names a family's modules.

    Args:
        model_type: of its config.json.
        architecture: the class with a language-model head.
        prefix: before all names but the head's; folders saved without a head lack it.
        outside: our modules outside of the blocks, and theirs.
        block: their block N.
        inside: our modules of a block, and theirs; several where ours is fused.
        buffers: what older versions saved besides parameters; it can be computed anew.
        conv1d: projections are stored (in, out).
        by_head: q, k and v of one head lie together.
    """

    model_type: str
    architecture: str
    prefix: str
    outside: Mapping[str, str]
    block: str
    inside: Mapping[str, tuple[str, ...]]
    buffers: re.Pattern[str]
    conv1d: bool = False
    by_head: bool = False


FAMILIES = {
    "gpt": Family(
        "gpt2",
        "GPT2LMHeadModel",
        "transformer.",
        {
            "embed_tokens": "transformer.wte",
            "embed_positions": "transformer.wpe",
            "final_norm": "transformer.ln_f",
            "head": "lm_head",
        },
        "transformer.h.{}.",
        {
            "attention_norm": ("ln_1",),
            "attention.qkv": ("attn.c_attn",),
            "attention.out": ("attn.c_proj",),
            "mlp_norm": ("ln_2",),
            "mlp.up": ("mlp.c_fc",),
            "mlp.down": ("mlp.c_proj",),
        },
        re.compile(r"transformer\.h\.\d+\.attn\.(bias|masked_bias)"),
        conv1d=True,
    ),
    "gpt-neox": Family(
        "gpt_neox",
        "GPTNeoXForCausalLM",
        "gpt_neox.",
        {
            "embed_tokens": "gpt_neox.embed_in",
            "final_norm": "gpt_neox.final_layer_norm",
            "head": "embed_out",
        },
        "gpt_neox.layers.{}.",
        {
            "attention_norm": ("input_layernorm",),
            "attention.qkv": ("attention.query_key_value",),
            "attention.out": ("attention.dense",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.up": ("mlp.dense_h_to_4h",),
            "mlp.down": ("mlp.dense_4h_to_h",),
        },
        re.compile(
            r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)|gpt_neox\.rotary_emb\.inv_freq"
        ),
        by_head=True,
    ),
    "llama": Family(
        "llama",
        "LlamaForCausalLM",
        "model.",
        {"embed_tokens": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
        "model.layers.{}.",
        {
            "attention_norm": ("input_layernorm",),
            "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "attention.out": ("self_attn.o_proj",),
            "mlp_norm": ("post_attention_layernorm",),
            "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "mlp.down": ("mlp.down_proj",),
        },
        re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"),
    ),
}


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + rows) of one of our tensors are rows [source_start, source_start +
    rows) of `source`; columns, where that is transposed."""

    start: int
    rows: int
    source: str
    source_start: int = 0
    transposed: bool = False


@dataclass(frozen=True)
class Entry:
    """One of our tensors. `again` names tensors that hold the same once more."""

    shape: Shape
    pieces: tuple[Piece, ...]
    again: tuple[str, ...] = ()


def table(model: Model, vocab_size: int) -> dict[str, Entry]:
    """Every parameter of a model by its name here, in the order of the network."""
    family = FAMILIES[model.family]
    hidden = model.hidden_size
    vectors = ("weight",) if model.family == "llama" else ("weight", "bias")
    entries = {
        "embed_tokens.weight": _whole(
            (vocab_size, hidden), f"{family.outside['embed_tokens']}.weight"
        )
    }
    if model.family == "gpt":
        entries["embed_positions.weight"] = _whole(
            (model.positions, hidden), f"{family.outside['embed_positions']}.weight"
        )
    for i in range(model.num_layers):
        for name, entry in _block(model, family).items():
            entries[f"layers.{i}.{name}"] = _in_block(entry, family.block.format(i))
    entries |= {
        f"final_norm.{v}": _whole((hidden,), f"{family.outside['final_norm']}.{v}") for v in vectors
    }
    if model.untied:
        entries["head.weight"] = _whole((vocab_size, hidden), f"{family.outside['head']}.weight")
    return entries


def _whole(shape: Shape, source: str, transposed: bool = False) -> Entry:
    return Entry(shape, (Piece(0, shape[0], source, transposed=transposed),))


def _in_block(entry: Entry, prefix: str) -> Entry:
    pieces = tuple(
        Piece(p.start, p.rows, prefix + p.source, p.source_start, p.transposed)
        for p in entry.pieces
    )
    return Entry(entry.shape, pieces, tuple(prefix + name for name in entry.again))


def _block(model: Model, family: Family) -> dict[str, Entry]:
    """One block's parameters, with names from within the block."""
    hidden = model.hidden_size
    width = model.ffn_width
    q = model.num_attention_heads * model.head_size
    kv = model.query_groups * model.head_size
    rows = {
        "attention.qkv": (q, kv, kv),
        "attention.out": (hidden,),
        "mlp.up": (width,),
        "mlp.gate_up": (width, width),
        "mlp.down": (hidden,),
    }
    columns = {"attention.out": q, "mlp.down": width}
    entries: dict[str, Entry] = {}
    for ours, theirs in family.inside.items():
        for vector in ("weight",) if model.family == "llama" else ("weight", "bias"):
            name = f"{ours}.{vector}"
            sources = [f"{module}.{vector}" for module in theirs]
            if ours == "mlp_norm" and model.gpt_j_tied:
                norm = entries[f"attention_norm.{vector}"]
                entries[f"attention_norm.{vector}"] = Entry(norm.shape, norm.pieces, tuple(sources))
            elif ours not in rows:
                entries[name] = _whole((hidden,), sources[0])
            else:
                shape = (
                    (sum(rows[ours]), columns.get(ours, hidden))
                    if vector == "weight"
                    else (sum(rows[ours]),)
                )
                entries[name] = Entry(
                    shape,
                    tuple(
                        _pieces(
                            model,
                            family,
                            ours,
                            rows[ours],
                            sources,
                            family.conv1d and vector == "weight",
                        )
                    ),
                )
    return entries


def _pieces(
    model: Model, family: Family, ours: str, rows: Shape, sources: list[str], transposed: bool
) -> Iterator[Piece]:
    if ours == "attention.qkv" and family.by_head:
        heads = model.num_attention_heads
        size = model.head_size
        yield from (
            Piece((part * heads + h) * size, size, sources[0], (h * 3 + part) * size)
            for part in range(3)
            for h in range(heads)
        )
    elif len(sources) == 1:
        yield Piece(0, sum(rows), sources[0], transposed=transposed)
    else:
        yield from (Piece(sum(rows[:i]), rows[i], source) for i, source in enumerate(sources))


@dataclass(frozen=True)
class Published:
    """One Hugging Face tensor: its shape, and the pieces of ours that make it up, with the name
    of ours."""

    shape: Shape
    ours: str
    pieces: tuple[Piece, ...]


def published(entries: Mapping[str, Entry]) -> dict[str, Published]:
    """The Hugging Face tensors that our tensors make up; every one comes from one of ours."""
    found: dict[str, Published] = {}
    for name, entry in entries.items():
        for source in dict.fromkeys(piece.source for piece in entry.pieces):
            pieces = tuple(piece for piece in entry.pieces if piece.source == source)
            shape = (sum(piece.rows for piece in pieces), *entry.shape[1:])
            found[source] = Published(shape[::-1] if pieces[0].transposed else shape, name, pieces)
        found |= {copy: Published(entry.shape, name, entry.pieces) for copy in entry.again}
    return found


def canonical(name: str, family: Family) -> str:
    """A name found in a file as the table has it: folders saved without a head lack the prefix,
    and transformers 5 may call embed_out lm_head."""
    head = f"{family.outside['head']}.weight"
    if name in (head, "lm_head.weight"):
        return head
    if name.startswith(family.prefix):
        return name
    return family.prefix + name
