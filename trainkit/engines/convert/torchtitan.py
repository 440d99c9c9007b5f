"""torchtitan's checkpoints, step-N/, in the form of torch's distributed checkpoint; read without
executing anything (megatron_dist.py).

Its tensors are Hugging Face's under other names, but for queries and keys of a Llama: those turn
neighbouring numbers of a head, Hugging Face's halves of it (torchtitan 0.3.0,
models/{llama3,qwen3}/state_dict_adapter.py). It reads folders of Hugging Face's form by itself
(checkpoint.initial_load_in_hf), so that none of its own is written here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.convert.files import existing
from trainkit.engines.convert.megatron_dist import METADATA, Box, read_boxes, read_metadata
from trainkit.engines.convert.options import refuse
from trainkit.engines.rank.torchtitan import tracked_step
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import Shape, TensorMapping, published, table

MODULES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "lm_head",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.qkv_linear.wq",
    "self_attn.k_proj": "attention.qkv_linear.wk",
    "self_attn.v_proj": "attention.qkv_linear.wv",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
# whether neighbouring numbers of a head are turned, by family
NEIGHBOURS = {"llama": True, "qwen3": False}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_OF_MODEL = re.compile(r"(layers|tok_embeddings|norm|lm_head)\.")
_TURNED = re.compile(r".+\.(wq|wk)\.weight")


@dataclass(frozen=True)
class TorchtitanWeights:
    """Named weights in a folder of torchtitan's.

    Args:
        folder: of the checkpoint.
        model: the job's.
        vocab_size: rows of the embedding.
        sizes, boxes: by torchtitan's name.
        notes: nothing is to be said.
    """

    folder: Path
    model: Model
    vocab_size: int
    sizes: Mapping[str, Shape]
    boxes: Mapping[str, Sequence[Box]]
    notes: tuple[str, ...] = ()

    @cached_property
    def _table(self) -> dict[str, TensorMapping]:
        return table(self.model, self.vocab_size)

    @property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: entry.shape for name, entry in self._table.items()}

    def read(self, name: str) -> Tensor:
        pieces = self._table[name].pieces
        parts = [
            self._published(piece.source)[piece.part(piece.start, piece.start + piece.rows)]
            for piece in pieces
        ]
        return torch.cat(parts)

    def _published(self, source: str) -> Tensor:
        """A tensor as Hugging Face has it."""
        name = _name(source)
        found = read_boxes(self.folder, name, self.sizes[name], self.boxes.get(name, ()))
        if NEIGHBOURS[self.model.family] and _TURNED.fullmatch(name):
            heads = found.view(-1, self.model.head_size // 2, 2, found.shape[1])
            found = heads.transpose(1, 2).reshape(found.shape)
        return found


def _name(source: str) -> str:
    """torchtitan's name of a tensor of Hugging Face's."""
    module, _, kind = source.rpartition(".")
    if layer := _IN_LAYER.fullmatch(module):
        return f"layers.{layer[1]}.{MODULES[layer[2]]}.{kind}"
    return f"{MODULES[module]}.{kind}"


def choose(checkpoints: Path, step: int | None) -> tuple[Path, int]:
    """A checkpoint's folder and step: of that step, or the newest whole one. Raises TrainkitError
    (exit 16) where there is none."""
    found = tracked_step(checkpoints) if step is None else step
    if found is None:
        raise TrainkitError(f"there is no whole step-N in {checkpoints}", exit=Exit.NO_CHECKPOINT)
    return existing(checkpoints / f"step-{found}"), found


def read(folder: Path, model: Model, vocab_size: int) -> TorchtitanWeights:
    """The weights of a checkpoint.

    Args:
        folder: step-N.
        model: the job's.
        vocab_size: rows of the embedding.

    Raises:
        ConfigError: exit 3, it is of another model, damaged, or would execute something.
    """
    if model.family not in NEIGHBOURS:
        refuse([f"family {model.family!r} is not converted"], "named weights", folder)
    if not (folder / METADATA).is_file():
        refuse([f"it has no {METADATA}"], "named weights", folder)
    sizes, boxes = read_metadata(folder)
    refuse(list(_other_model(sizes, model, vocab_size)), "named weights", folder)
    return TorchtitanWeights(folder, model, vocab_size, sizes, boxes)


def _other_model(sizes: Mapping[str, Shape], model: Model, vocab_size: int) -> Iterator[str]:
    wanted = {
        _name(source): entry.shape for source, entry in published(table(model, vocab_size)).items()
    }
    for name, shape in wanted.items():
        if name not in sizes:
            yield f"{name} is not in it"
        elif sizes[name] != shape:
            yield f"{name} is {list(sizes[name])} there, {list(shape)} in the job's model"
    copies = () if model.untied else ("lm_head.weight",)
    for name in sizes:
        if _OF_MODEL.match(name) and name not in wanted and name not in copies:
            yield f"{name} is not in the job's model"
