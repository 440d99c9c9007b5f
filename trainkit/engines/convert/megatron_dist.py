"""Megatron-LM's checkpoints of the format `torch_dist`, read without executing anything.

iter_0000003/ holds .metadata, a pickle of torch's distributed checkpoint (torch,
distributed/checkpoint/metadata.py: tensors by name with their boxes, and for each box the file,
the place and the length of what torch.save made of it), __R_N.distcp with these, and common.pt with
`args`. Tensors are whole, not split over ranks, and layers are the first dimension, experts the
next; where layers differ, each has names of its own. Names are those of transformer_impl
"transformer_engine" (Megatron-LM, core/transformer, sharded_state_dict).
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.convert.experts import read_together
from trainkit.engines.convert.pickles import HARMLESS, InertValue, read_pickle, read_tensor
from trainkit.engines.convert.tensors import EngineTensor, as_tensor, whole
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import Shape, table

METADATA = ".metadata"
COMMON = "common.pt"
# What stands in .metadata: sizes, boxes, dtypes, plans; each becomes an InertValue.
PACKAGES = ("torch.", "collections.")


class _MetadataReader(pickle.Unpickler):
    """Makes inert values of everything, and refuses what is not torch's."""

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content))
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in HARMLESS and not f"{module}.".startswith(PACKAGES):
            raise ConfigError(
                f"{self.path} is not loaded: it asks for {module}.{name}, which could execute code"
            )
        return type(name, (InertValue,), {})


@dataclass(frozen=True)
class Box:
    """A part of a tensor, and where it lies."""

    offsets: Shape
    sizes: Shape
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class DistributedWeights:
    """Named weights in a folder of torch_dist.

    Args:
        folder: of the checkpoint.
        model: the job's.
        vocab_size: rows of the embedding without padding.
        plan: by our name, experts apart, how each is stored, and its place in the first
            dimensions of what is stored: the layer, the expert.
        sizes, boxes: by the engine's name.
        notes: what a reader should know of how they were read.
    """

    folder: Path
    model: Model
    vocab_size: int
    plan: Mapping[str, tuple[EngineTensor, Shape]]
    sizes: Mapping[str, Shape]
    boxes: Mapping[str, Sequence[Box]]
    notes: tuple[str, ...] = ()

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        return {name: entry.shape for name, entry in table(self.model, self.vocab_size).items()}

    def read(self, name: str) -> Tensor:
        return read_together(name, self.model, self._read_one)

    def _read_one(self, name: str) -> Tensor:
        how, place = self.plan[name]
        boxes = self.boxes.get(how.theirs, ())
        found = read_boxes(self.folder, how.theirs, self.sizes[how.theirs], boxes, place)
        made = whole([found], how, self.model)
        if how.split == "vocabulary":
            return made[: self.vocab_size].clone()
        return made


def read_boxes(
    folder: Path, name: str, size: Shape, boxes: Sequence[Box], place: Shape = ()
) -> Tensor:
    """A tensor put together from its parts.

    Args:
        folder: of the checkpoint.
        name: the engine's.
        size: of all of it.
        boxes: its parts.
        place: which of its first dimensions are meant.

    Raises ConfigError where a part is missing or another than .metadata says.
    """
    found: Tensor | None = None
    filled = 0
    for box in boxes:
        first = tuple(n - o for n, o in zip(place, box.offsets, strict=False))
        if not all(0 <= n < length for n, length in zip(first, box.sizes, strict=False)):
            continue
        tensor = as_tensor(_read_box(folder, box), name, folder)
        if tensor.shape != box.sizes:
            raise ConfigError(f"{folder}: a part of {name} has another shape")
        tensor = tensor[first]
        offsets = box.offsets[len(place) :]
        if found is None:
            found = tensor.new_empty(size[len(place) :])
        where = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        found[where] = tensor
        filled += tensor.numel()
    if found is None or filled != found.numel():
        raise ConfigError(f"{folder}: parts of {name} are missing")
    return found


def _read_box(folder: Path, box: Box) -> object:
    path = folder / box.file
    if box.file != path.name:
        raise ConfigError(f"{folder / METADATA}: {box.file!r} is not a plain file name")
    try:
        with open(path, "rb") as file:
            file.seek(box.start)
            content = file.read(box.length)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return read_tensor(content, path)


def read_metadata(folder: Path) -> tuple[dict[str, Shape], dict[str, list[Box]]]:
    """Sizes and boxes of all tensors by the engine's names. Raises ConfigError."""
    path = folder / METADATA
    try:
        found = _MetadataReader(path.read_bytes(), path).load()
        tensors = dict[str, Shape]()
        sizes = dict[tuple[str, Shape], Shape]()
        for name, entry in found.attributes["state_dict_metadata"].items():
            if "size" in entry.attributes:
                tensors[name] = _numbers(entry.attributes["size"])
                for chunk in entry.attributes["chunks"]:
                    place = chunk.attributes
                    sizes[name, _numbers(place["offsets"])] = _numbers(place["sizes"])
        boxes: dict[str, list[Box]] = {}
        for index, info in found.attributes["storage_data"].items():
            name = index.attributes["fqn"]
            if name in tensors:
                offsets = _numbers(index.attributes["offset"])
                box = Box(
                    offsets,
                    sizes[name, offsets],
                    str(info.attributes["relative_path"]),
                    int(info.attributes["offset"]),
                    int(info.attributes["length"]),
                )
                boxes.setdefault(name, []).append(box)
    except ConfigError:
        raise
    except Exception as error:  # whatever a wrong pickle makes Python raise
        raise ConfigError(f"{path} is not what torch writes: {error!r}") from None
    return tensors, boxes


def _numbers(size: InertValue) -> Shape:
    """A torch.Size."""
    return tuple(int(number) for number in size.made_of[0])


def args_of(folder: Path) -> Mapping[str, object]:
    """`args` of a checkpoint; nothing where it keeps none."""
    if not (folder / COMMON).is_file():
        return {}
    args = read_pickle(folder / COMMON).get("args")
    return args.attributes if isinstance(args, InertValue) else {}
