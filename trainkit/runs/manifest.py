"""The manifest of a checkpoint (manifest.json, schema checkpoint/1): its classes, its writer, and
what can be wrong with it before any data file is opened."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt

from trainkit.base.files import write_text

MANIFEST = "manifest.json"


ALIGNMENT = 64  # bytes; where a part may start in a file, so that it can be mapped as any dtype


# bytes of an element by dtype
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}


Numbers = tuple[NonNegativeInt, ...]


# whole numbers of `state`; Megatron-LM's chances go on below 0 while the loss scale falls
WHOLE = {"hysteresis_tracker"}


COUNTS = {  # those that are never less than 0
    "optimizer_steps",
    "growth_tracker",
    "guard_seen",
    "guard_skipped_in_a_row",
    "rollbacks",
    "unlogged_skipped",
    "unlogged_nan",
}


class ManifestPart(BaseModel):
    # what is not known may matter
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


class DataFile(ManifestPart):
    """One file of a checkpoint. `path` is a plain name inside the checkpoint's folder."""

    path: str
    bytes: NonNegativeInt
    xxh128: str


class TensorChunk(ManifestPart):
    """A box of a tensor, row-major at `start` of a file."""

    offsets: Numbers
    sizes: Numbers
    file: str
    start: NonNegativeInt
    bytes: NonNegativeInt


class TensorEntry(ManifestPart):
    """One tensor by its global shape, and the boxes that cover it."""

    shape: Numbers
    dtype: str
    chunks: tuple[TensorChunk, ...]


class Manifest(ManifestPart):
    """The form checkpoint/1: what a checkpoint holds and where it comes from.

    `tensors`: model.NAME, optimizer.exp_avg.NAME and optimizer.exp_avg_sq.NAME for every
    parameter, by global shape. `state`: what else the next step depends on, as numbers.
    `validation`: losses by validation set, where they were measured at this very step. `xxh128`:
    of all the file's bytes before this field, which is the last one. Manifests of older versions
    have none and are read without.
    """

    form: Literal["checkpoint/1"] = Field("checkpoint/1", alias="schema")
    step: NonNegativeInt
    consumed_samples: NonNegativeInt
    files: tuple[DataFile, ...]
    tensors: dict[str, TensorEntry]
    layout: dict[str, int | str]
    job: dict[str, Any]
    versions: dict[str, str]
    state: dict[str, int | FiniteFloat | bool]
    validation: dict[str, float] = {}
    xxh128: str = ""

    def write(self, folder: Path) -> None:
        """Into a checkpoint's folder, whole or not at all, durable."""
        text = json.dumps(
            self.model_dump(mode="json", by_alias=True, exclude={"xxh128"}), separators=(",", ":")
        )[:-1]
        write_text(folder / MANIFEST, text + _seal(text.encode()))


def _seal(body: bytes) -> str:
    """How a manifest ends that begins so."""
    return f',"xxh128":"{xxhash.xxh3_128_hexdigest(body)}"}}'


def seal_of(folder: Path) -> str:
    """The hash at the end of a checkpoint's manifest, which its files' hashes are part of: of one
    step trained twice it tells which. "": it cannot be read."""
    try:
        with open(folder / MANIFEST, "rb") as file:
            file.seek(-len(_seal(b"")), os.SEEK_END)
            return file.read()[11:-2].decode(errors="replace")
    except OSError:
        return ""


def has_valid_seal(content: bytes) -> bool:
    """Whether it ends with the hash of all before: nothing has changed since it was written."""
    end = len(content) - len(_seal(b""))
    return content[end:] == _seal(content[:end]).encode()


def state_problems(state: Mapping[str, int | float | bool]) -> Iterator[str]:
    """Numbers of `state` that cannot be what was written: a negative or fractional count."""
    for key, value in state.items():
        if key in COUNTS and (type(value) is not int or value < 0):
            yield f"{MANIFEST}: state.{key} is {value!r}, which is not a count"
        if key in WHOLE and type(value) is not int:
            yield f"{MANIFEST}: state.{key} is {value!r}, which is not a whole number"


def tensor_problems(manifest: Manifest) -> Iterator[str]:
    """Every part lies inside its file and its tensor, no two share an element, and together they
    have the tensor's volume: they cover it."""
    size_of = {file.path: file.bytes for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPE_BYTES:
            yield f"{name} has the unknown dtype {tensor.dtype!r}"
            continue
        fits = True
        for c in tensor.chunks:
            inside = len(c.offsets) == len(c.sizes) == len(tensor.shape) and all(
                o + n <= t for o, n, t in zip(c.offsets, c.sizes, tensor.shape, strict=True)
            )
            stored = (
                c.bytes == math.prod(c.sizes) * DTYPE_BYTES[tensor.dtype]
                and c.start % ALIGNMENT == 0
                and c.start + c.bytes <= size_of.get(c.file, -1)
            )
            if not (inside and stored):
                fits = False
                yield f"{name}: the part at {list(c.offsets)} does not fit its tensor or file"
        if sum(math.prod(c.sizes) for c in tensor.chunks) != math.prod(tensor.shape):
            yield f"{name}: its parts do not make up its shape {list(tensor.shape)}"
        elif fits and (twice := _overlap(tensor.chunks)):
            yield (
                f"{name}: its parts at {list(twice[0].offsets)} and {list(twice[1].offsets)}"
                " overlap"
            )


def _overlap(chunks: Iterable[TensorChunk]) -> tuple[TensorChunk, TensorChunk] | None:
    """Two parts of a tensor that share an element."""
    # those that reach the rows of the next one: as many as the tensor is cut into columns
    beside: list[TensorChunk] = []
    for chunk in sorted((c for c in chunks if math.prod(c.sizes)), key=lambda c: c.offsets):
        beside = [
            b
            for b in beside
            if b.offsets[:1] == chunk.offsets[:1] or b.offsets[0] + b.sizes[0] > chunk.offsets[0]
        ]
        for b in beside:
            sides = zip(b.offsets, b.sizes, chunk.offsets, chunk.sizes, strict=True)
            if all(
                max(at, other) < min(at + size, other + more) for at, size, other, more in sides
            ):
                return b, chunk
        beside.append(chunk)
    return None
