"""How engines of Megatron's kind store our tensors: rows in another order, and split over
tensor-parallel ranks.

Ours are whole: `attention.qkv` has all queries, then all keys, then all values. Theirs lie query
group by query group: the queries of a group, its key, its value (Megatron-LM, checkpoint version
3; with as many groups as heads that is GPT-NeoX's order too).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import Shape

Split = Literal["replicated", "rows", "columns", "gated", "vocabulary", "summed"]


@dataclass(frozen=True)
class EngineTensor:
    """One of our tensors as an engine stores it.

    Args:
        ours: our name.
        theirs: the engine's; of a block's tensors, from within the block.
        split: how tensor-parallel ranks share it. replicated: each has all of it; rows, columns:
            equal parts; gated: equal parts of the gates, then of the values; vocabulary: equal
            parts of rows after padding; summed: it is the sum of what they have.
        by_group: rows lie query group by query group.
    """

    ours: str
    theirs: str
    split: Split = "replicated"
    by_group: bool = False


def block_tensors(model: Model, theirs: dict[str, str], row_bias: Split) -> list[EngineTensor]:
    """The tensors of one block, with names from within it on both sides.

    Args:
        model: the shape.
        theirs: the engine's module for each of ours.
        row_bias: how ranks share the biases of the two projections that they sum up.
    """
    family = model.architecture
    up: Split = "gated" if model.mlp.gated else "rows"
    splits: dict[str, tuple[Split, Split]] = {
        "attention.qkv": ("rows", "rows"),
        **{f"attention.{name}": ("rows", "rows") for name in ("q", "q_a", "q_b", "kv_a", "kv_b")},
        "attention.out": ("columns", row_bias),
        f"mlp.{model.mlp.module}": (up, up),
        "mlp.down": ("columns", row_bias),
        "mlp.router": ("replicated", "replicated"),
        "mlp.shared_expert.gate_up": ("gated", "gated"),
        "mlp.shared_expert.down": ("columns", row_bias),
    }
    found = []
    for ours, their in theirs.items():
        if ours in splits:
            weight, bias = splits[ours]
            by_group = ours == "attention.qkv"
            found.append(EngineTensor(f"{ours}.weight", f"{their}.weight", weight, by_group))
            if model.qkv_bias if by_group else family.bias:
                found.append(EngineTensor(f"{ours}.bias", f"{their}.bias", bias, by_group))
        elif ours.endswith("norm"):
            found += [
                EngineTensor(f"{ours}.{kind}", f"{their}.{kind}") for kind in family.norm.parameters
            ]
    return found


def _order(model: Model) -> Tensor:
    """For each of the engine's rows of the fused projection, ours."""
    size = model.head_size
    groups = model.query_groups
    queries = model.num_attention_heads * size
    q = torch.arange(queries).view(groups, -1)
    k = (queries + torch.arange(groups * size)).view(groups, size)
    v = k + groups * size
    return torch.cat([q, k, v], dim=1).flatten()


def indivisible_problem(model: Model, ranks: int) -> str | None:
    """Why so many tensor-parallel ranks cannot share a model; None: they can."""
    sizes = {
        "num_attention_heads": model.num_attention_heads,
        "num_query_groups": model.query_groups,
    }
    if not model.sparse(0):
        sizes["ffn_hidden_size"] = model.ffn_width
    if model.moe is not None:
        sizes["moe.ffn_hidden_size"] = model.moe.ffn_hidden_size
        shared = model.moe.shared_expert_intermediate_size
        sizes["moe.shared_expert_intermediate_size"] = shared or ranks
    for key, size in sizes.items():
        if size % ranks:
            return f"{key} {size} does not divide by --tensor-parallel-size {ranks}"
    return None


def part(found: Tensor, how: EngineTensor, model: Model, rank: int, ranks: int) -> Tensor:
    """What one tensor-parallel rank stores of a tensor of ours, contiguous.

    Args:
        found: ours, whole; for split "vocabulary" already padded.
        how: as it is stored.
        model: the shape.
        rank, ranks: which of how many.
    """
    if how.by_group:
        found = found[_order(model)]
    if how.split == "columns":
        found = found.chunk(ranks, dim=1)[rank]
    elif how.split == "gated":
        found = torch.cat([half.chunk(ranks)[rank] for half in found.chunk(2)])
    elif how.split in ("rows", "vocabulary"):
        found = found.chunk(ranks)[rank]
    elif how.split == "summed" and rank > 0:
        found = torch.full_like(found, -0.0)  # x + -0.0 is x, also where x is -0.0
    # one storage each: torch.save writes all of what a view looks into
    return found.clone(memory_format=torch.contiguous_format)


def whole(parts: Sequence[Tensor], how: EngineTensor, model: Model) -> Tensor:
    """A tensor of ours from what all tensor-parallel ranks store, the vocabulary's padding
    included."""
    if how.split == "columns":
        found = torch.cat(list(parts), dim=1)
    elif how.split == "gated":
        halves = [part.chunk(2) for part in parts]
        found = torch.cat([half[side] for side in range(2) for half in halves])
    elif how.split in ("rows", "vocabulary"):
        found = torch.cat(list(parts))
    elif how.split == "summed" and len(parts) > 1:
        # One after the other: torch's own sum begins with 0.0, which loses the sign of -0.0.
        found = reduce(torch.add, [part.double() for part in parts]).to(parts[0].dtype)
    else:
        found = _agreed(parts)
    if how.by_group:
        ours = torch.empty_like(found)
        ours[_order(model)] = found
        found = ours
    return found


def _agreed(parts: Sequence[Tensor]) -> Tensor:
    """What all ranks have alike; their mean where rounding has driven them apart, as GPT-NeoX's
    own conversion takes it (tools/ckpts/convert_neox_to_hf.py)."""
    if all(torch.equal(part, parts[0]) for part in parts[1:]):
        return parts[0].clone()
    return torch.stack([part.double() for part in parts]).mean(0).to(parts[0].dtype)


def part_shape(shape: Shape, how: EngineTensor, ranks: int) -> Shape:
    """The shape of what one tensor-parallel rank stores; of the vocabulary, `shape` is padded."""
    if how.split == "columns":
        return (shape[0], shape[1] // ranks)
    if how.split in ("rows", "gated", "vocabulary"):
        return (shape[0] // ranks, *shape[1:])
    return shape


def padded(found: Tensor, rows: int) -> Tensor:
    """An embedding with rows of zeros up to so many."""
    return torch.cat([found, found.new_zeros(rows - len(found), *found.shape[1:])])


def as_tensor(value: object, name: str, place: Path) -> Tensor:
    """A value of a checkpoint that must be a dense tensor of numbers. Raises ConfigError."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_quantized:
        raise ConfigError(f"{name} in {place} is not a plain tensor, but a {type(value).__name__}")
    if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(
            f"{name} in {place} is of {value.dtype}; only fp32, bf16 and fp16 are taken"
        )
    return value
