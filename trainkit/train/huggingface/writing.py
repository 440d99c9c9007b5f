"""Weights as a Hugging Face folder. One tensor at a time goes from the mapped files to the new
ones; no model is built."""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.base.files import names_full_file, publish_folder, temporary_name, write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.indexed.paths import DataFolder
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.schema import Job, Model
from trainkit.train.huggingface.config import to_hf_config
from trainkit.train.huggingface.folder import CONFIG, INDEX, WHOLE
from trainkit.train.huggingface.names import PublishedTensor, published, table
from trainkit.train.huggingface.weights import (
    TARGETS,
    NamedWeights,
    in_dtype,
    refuse_another_model,
    vocabulary,
)

SAFETENSORS_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
HEADER_ALIGNMENT = 8  # bytes; safetensors' own writer pads its header to it


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer.json and the token that ends a document."""

    path: Path
    eod_token: str


def tokenizer_of(job: Job) -> TokenizerFile | None:
    """The tokenizer of the job's dataset; None for random tokens. Raises ConfigError if the file
    is missing."""
    if job.dataset.tokenizer is None:
        return None
    path = DataFolder(job.cluster.root_folder, job.dataset).tokenizer
    if not path.is_file():
        raise ConfigError(
            f"the tokenizer of dataset {job.dataset.name!r} is missing: {path}",
            hint="run prep-data again",
        )
    return TokenizerFile(path, job.dataset.tokenizer.eod_token)


@dataclass(frozen=True)
class ExportedWeights:
    """What an export holds. `bytes` are those of the tensors."""

    parameters: int
    bytes: int
    files: tuple[str, ...]


def export(
    saved: NamedWeights,
    model: Model,
    target: Path,
    *,
    dtype: str,
    shard_bytes: int,
    tokenizer: TokenizerFile | None,
    about: Mapping[str, str],
) -> ExportedWeights:
    """Write weights, config and tokenizer to the new folder `target`: whole, or not at all.

    Args:
        saved: the weights; `CheckpointWeights` of a checkpoint of ours.
        model: its shape.
        target: where; nothing may be there.
        dtype: of the weights, "fp32", "bf16" or "fp16".
        shard_bytes: tensors of one file at most (but always one); more are split over several with
            an index.
        tokenizer: what goes with it; None: the model was trained on random tokens.
        about: where it comes from, kept in the files' headers.

    Raises:
        ConfigError: exit 3, `target` is there already, the weights are of another model,
        Hugging Face has no such model, or fp16 cannot hold a weight.
    """
    if os.path.lexists(target):
        raise ConfigError(
            f"{target} is there already", hint="export to a new folder, or remove it first"
        )
    rows = vocabulary(saved)
    tensors = published(table(model, rows))
    if tokenizer:
        eod = end_of_document(load_tokenizer(tokenizer.path), tokenizer.eod_token, tokenizer.path)
    else:
        eod = None
    config = to_hf_config(model, rows, dtype, eod)
    refuse_another_model(saved, model, rows)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_name(target)
    temporary.mkdir()
    try:
        with names_full_file(target):
            source = _Source(saved, dtype)
            written = _write_weights(temporary, source, tensors, shard_bytes, dict(about))
            write_json(temporary / CONFIG, config)
            ends = {"bos_token_id": eod, "eos_token_id": eod}
            write_json(temporary / "generation_config.json", ends)
            if tokenizer:
                _write_tokenizer(temporary, tokenizer, model)
        publish_folder(temporary, target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return written


class _Source:
    """Reads weights as Hugging Face tensors. Keeps the last tensor of ours: those made from one
    follow each other."""

    def __init__(self, saved: NamedWeights, dtype: str) -> None:
        self.saved = saved
        self.dtype = TARGETS[dtype]
        self._last: tuple[str, Tensor] = ("", torch.empty(0))

    def read(self, name: str, wanted: PublishedTensor) -> Tensor:
        """One tensor, contiguous."""
        ours = self._ours(wanted.ours)
        first = wanted.pieces[0]
        if len(wanted.pieces) == 1:
            found = ours[first.start : first.start + first.rows]
            found = found.T.contiguous() if first.transposed else found
        else:
            found = ours.new_empty(wanted.shape)
            for piece in wanted.pieces:
                stop = piece.start + piece.rows
                part = found if piece.expert is None else found[piece.expert]
                part = part.T if piece.transposed else part
                part[piece.part(piece.start, stop)] = ours[piece.start : stop]
        return in_dtype(name, found, self.dtype_of(wanted))

    def dtype_of(self, wanted: PublishedTensor) -> torch.dtype:
        """fp32 for biases that choose experts: they move by less than 16 bits hold."""
        return torch.float32 if wanted.ours.endswith(".expert_bias") else self.dtype

    def _ours(self, name: str) -> Tensor:
        if self._last[0] != name:
            self._last = ("", torch.empty(0))  # not two of ours at once
            self._last = (name, self.saved.read(name))
        return self._last[1]


def _write_weights(
    folder: Path,
    source: _Source,
    tensors: Mapping[str, PublishedTensor],
    shard_bytes: int,
    about: dict[str, str],
) -> ExportedWeights:
    size_of = {
        name: math.prod(tensor.shape) * source.dtype_of(tensor).itemsize
        for name, tensor in tensors.items()
    }
    shards = list(_shards(size_of, shard_bytes))
    if len(shards) == 1:
        names = [WHOLE]
    else:
        names = [
            f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)
        ]
    for file, shard in zip(names, shards, strict=True):
        _write_file(folder / file, source, {name: tensors[name] for name in shard}, about)
    total = sum(size_of.values())
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    if len(shards) > 1:
        weight_map = {
            name: file for file, shard in zip(names, shards, strict=True) for name in shard
        }
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return ExportedWeights(parameters, total, tuple(names))


def _shards(size_of: Mapping[str, int], shard_bytes: int) -> Iterator[list[str]]:
    """Names in order, as many in a shard as fit."""
    shard = list[str]()
    filled = 0
    for name, size in size_of.items():
        if shard and filled + size > shard_bytes:
            yield shard
            shard = []
            filled = 0
        shard.append(name)
        filled += size
    yield shard


def _write_file(
    path: Path, source: _Source, tensors: Mapping[str, PublishedTensor], about: dict[str, str]
) -> None:
    """One safetensors file, tensor by tensor (the library's own writer wants all of them in
    memory).

    The format (safetensors, README "Format"): the header's length as little-endian u64, the
    header as JSON that begins with "{", padded with spaces, then the tensors, row-major and
    without gaps. "format": "pt" is what transformers looks for.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    start = 0
    for name, tensor in tensors.items():
        dtype = source.dtype_of(tensor)
        end = start + math.prod(tensor.shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % HEADER_ALIGNMENT)
    with open(path, "xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tensors.items():
            file.write(
                source.read(name, tensor).contiguous().flatten().view(torch.uint8).numpy().data
            )
        file.flush()
        os.fsync(file.fileno())


def _write_tokenizer(folder: Path, tokenizer: TokenizerFile, model: Model) -> None:
    """tokenizer.json as training read it, and what AutoTokenizer asks besides."""
    write_json(folder / "tokenizer.json", json.loads(tokenizer.path.read_bytes()))
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.eod_token,
        "eos_token": tokenizer.eod_token,
        "model_max_length": model.positions,
        # else transformers 4 gives token_type_ids too, which GPT-2 would add to its embeddings
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    write_json(folder / "tokenizer_config.json", about)
