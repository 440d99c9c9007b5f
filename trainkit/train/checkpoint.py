"""Checkpoints: complete or not there. A folder step-NNNNNNNN whose manifest.json fits its files is one; nothing else is."""

from __future__ import annotations

import json
import math
import platform
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import xxhash
from pydantic import Field, NonNegativeInt, ValidationError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import publish_folder, write_text
from trainkit.train.storage import ALIGNMENT, DTYPE_NAMES, DTYPES, DataFile, Form, Reader, TensorEntry, TensorLoadPlanner, TensorSavePlanner, Writer

MANIFEST = "manifest.json"
FINISHED = re.compile(r"step-(\d{8,})")
UNFINISHED = ".tmp"


class Manifest(Form):
    """The form checkpoint/1: what a checkpoint holds and where it comes from.

    `tensors`: model.NAME, optimizer.exp_avg.NAME and optimizer.exp_avg_sq.NAME for every parameter, by global shape.
    `state`: what else the next step depends on, as numbers.
    """

    form: Literal["checkpoint/1"] = Field("checkpoint/1", alias="schema")
    step: NonNegativeInt
    consumed_samples: NonNegativeInt
    files: tuple[DataFile, ...]
    tensors: dict[str, TensorEntry]
    layout: dict[str, int]
    job: dict[str, Any]
    versions: dict[str, str]
    state: dict[str, int | float | bool]


class Damaged(TrainkitError):
    """A checkpoint that must not be read (exit 16)."""

    def __init__(self, folder: Path, problems: list[str]) -> None:
        self.problem_list = problems
        super().__init__(f"checkpoint {folder} is damaged: {'; '.join(problems)}", exit=Exit.NO_CHECKPOINT)


@dataclass(frozen=True)
class Checkpoint:
    """A folder with its checked manifest."""

    folder: Path
    manifest: Manifest


def folder_of(checkpoints: Path, step: int) -> Path:
    """Where the checkpoint of `step` lies, or will."""
    return checkpoints / f"step-{step:08d}"


def finished(checkpoints: Path) -> list[Path]:
    """Folders that were published, oldest first. Whether they are whole is for `open_checkpoint` to say."""
    found = [(int(m[1]), p) for p in checkpoints.iterdir() if (m := FINISHED.fullmatch(p.name))] if checkpoints.is_dir() else []
    return [path for _, path in sorted(found)]


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read and check a checkpoint's manifest, and its files' sizes. Raises Damaged with all that is wrong."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except OSError as error:
        raise Damaged(folder, [f"{MANIFEST} cannot be read: {error.strerror}"]) from None
    except ValidationError as error:
        raise Damaged(folder, [f"{MANIFEST}: {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5]]) from None
    problems = [*_step_problems(folder, manifest), *_file_problems(folder, manifest), *_tensor_problems(manifest)]
    if problems:
        raise Damaged(folder, problems)
    return Checkpoint(folder, manifest)


def _step_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    if folder.name != folder_of(folder.parent, manifest.step).name:
        yield f"its manifest says step {manifest.step}"


def _file_problems(folder: Path, manifest: Manifest) -> Iterator[str]:
    for file in manifest.files:
        if file.path != Path(file.path).name or file.path in ("", ".", ".."):
            yield f"{file.path!r} is no plain file name"
            continue
        path = folder / file.path
        if path.is_symlink() or not path.is_file():
            yield f"{file.path} is missing"
        elif path.stat().st_size != file.bytes:
            yield f"{file.path} has {path.stat().st_size} bytes, not {file.bytes}"


def _tensor_problems(manifest: Manifest) -> Iterator[str]:
    """Every part lies inside its file and its tensor, and the parts have the tensor's volume."""
    size_of = {file.path: file.bytes for file in manifest.files}
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in DTYPES:
            yield f"{name} has the unknown dtype {tensor.dtype!r}"
            continue
        width = DTYPES[tensor.dtype].itemsize
        for c in tensor.chunks:
            inside = len(c.offsets) == len(c.sizes) == len(tensor.shape) and all(o + n <= t for o, n, t in zip(c.offsets, c.sizes, tensor.shape, strict=True))
            stored = c.bytes == math.prod(c.sizes) * width and c.start % ALIGNMENT == 0 and c.start + c.bytes <= size_of.get(c.file, -1)
            if not (inside and stored):
                yield f"{name}: the part at {list(c.offsets)} does not fit its tensor or file"
        if sum(math.prod(c.sizes) for c in tensor.chunks) != math.prod(tensor.shape):
            yield f"{name}: its parts do not make up its shape {list(tensor.shape)}"


def verify(folder: Path, hashes: bool = True) -> list[str]:
    """Everything wrong with a checkpoint, an empty list if nothing is. Without `hashes` only sizes and the manifest are looked at."""
    try:
        manifest = open_checkpoint(folder).manifest
    except Damaged as damaged:
        return damaged.problem_list
    return [f"{f.path} does not have the hash {f.xxh128}" for f in manifest.files if hashes and _xxh128(folder / f.path) != f.xxh128]


def _xxh128(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with open(path, "rb") as file:
        while block := file.read(2**22):
            digest.update(block)
    return digest.hexdigest()


def newest_valid(checkpoints: Path, on_damage: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint whose manifest, sizes and hashes are right, None where there is none at all.

    Args:
        checkpoints: the run's folder of checkpoints; unfinished ones in it are not looked at.
        on_damage: told of every newer checkpoint that had to be passed over.

    Raises:
        TrainkitError: exit 16, there are checkpoints but none is valid.
    """
    folders = finished(checkpoints)
    for folder in reversed(folders):
        problems = verify(folder)
        if not problems:
            return open_checkpoint(folder)
        on_damage(Damaged(folder, problems).message)
    if folders:
        raise TrainkitError(
            f"none of the {len(folders)} checkpoints in {checkpoints} is valid",
            exit=Exit.NO_CHECKPOINT,
            hint="restore one from a copy, or start a new run; removing the folder's checkpoints makes this run start from step 0",
        )
    return None


def save(
    checkpoints: Path,
    tensors: dict[str, torch.Tensor],
    *,
    step: int,
    consumed_samples: int,
    layout: dict[str, int],
    job: dict[str, Any],
    state: dict[str, Any],
    moved: Callable[[], None] = lambda: None,
) -> None:
    """Write and publish a checkpoint; called by all ranks together.

    Every rank writes, hashes and fsyncs its file in step-N.tmp, calling `moved` after every part; rank 0 writes the manifest, renames and fsyncs the parent.

    Raises:
        TrainkitError: exit 10 on all ranks when one could not write; older checkpoints are as they were.
    """
    target, rank = folder_of(checkpoints, step), dist.get_rank()
    temporary = target.with_name(target.name + UNFINISHED)
    if rank == 0:
        for stale in checkpoints.glob(f"step-*{UNFINISHED}"):
            shutil.rmtree(stale)
        temporary.mkdir(parents=True)
    dist.barrier()
    writer = Writer(temporary, rank, moved)
    try:
        write_tensors(tensors, storage_writer=writer, planner=TensorSavePlanner())
    except CheckpointException as error:
        who, (reason, _) = next(iter(error.failures.items()))
        raise TrainkitError(f"rank {who} could not write checkpoint {target}: {reason!r}", exit=Exit.RANK_INFRA) from error
    if rank == 0:
        manifest = Manifest(
            step=step,
            consumed_samples=consumed_samples,
            files=tuple(writer.files),
            tensors=writer.tensors,
            layout=layout,
            job=job,
            versions={"trainkit": trainkit.__version__, "torch": torch.__version__, "python": platform.python_version()},
            state=state,
        )
        write_text(temporary / MANIFEST, json.dumps(manifest.model_dump(mode="json", by_alias=True), separators=(",", ":")))
        if target.exists():  # only a damaged one that resume passed over can be in the way
            shutil.rmtree(target)
        publish_folder(temporary, target)
    dist.barrier()


def prune(checkpoints: Path, keep_last: int, newest: int) -> None:
    """Delete all but the checkpoint of step `newest`, which was just saved, and the `keep_last` - 1 newest valid ones before it.

    Valid is by manifest and size here: hashes would cost reading everything again. Those of later steps neither count nor go. Training went on
    from an earlier one because they were found damaged, perhaps by their hashes alone: counted, they would push out what is whole.

    Damaged ones neither count nor go: a person may want to look. One that goes is renamed first, so that it is never half there.
    """
    saved = folder_of(checkpoints, newest)
    others = [folder for folder in finished(checkpoints) if folder != saved and not verify(folder, hashes=False)]
    older = [folder for folder in others if int(folder.name[5:]) < newest]
    for folder in older[: max(0, len(older) + 1 - keep_last)]:
        shutil.rmtree(folder.rename(folder.with_name(folder.name + UNFINISHED)))


def load(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    """Read tensors of any layout in place: with a process group by all ranks together, else in this process alone.

    Raises:
        TrainkitError: exit 3, the checkpoint is of another model; every tensor that differs is named.
    """
    saved = checkpoint.manifest.tensors
    problems = [f"{name} is not in it" for name in tensors if name not in saved]
    for name, tensor in tensors.items():
        here = tuple(tensor.shape), DTYPE_NAMES[tensor.dtype]
        if name in saved and (there := (saved[name].shape, saved[name].dtype)) != here:
            problems.append(f"{name} is {list(there[0])} {there[1]} there, {list(here[0])} {here[1]} here")
    problems += [f"{name} is not in the model" for name in saved if name.startswith("model.") and name not in tensors]
    if problems:
        raise TrainkitError(f"{checkpoint.folder} is a checkpoint of another model:\n  " + "\n  ".join(problems[:20]), exit=Exit.CONFIG)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        read_tensors(tensors, storage_reader=Reader(checkpoint.folder, saved), planner=TensorLoadPlanner(), no_dist=not dist.is_initialized())
