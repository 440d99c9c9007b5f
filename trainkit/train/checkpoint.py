"""The tensors of checkpoints: written and published by all ranks together, read in any layout. What a checkpoint is, is said in runs/checkpoints.py."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import publish_folder, remove
from trainkit.base.locks import Busy, locked
from trainkit.runs.checkpoints import (
    UNFINISHED,
    Checkpoint,
    Damaged,
    Manifest,
    Verify,
    checked,
    file_problems,
    files_to_hash,
    finished,
    folder_of,
    newest_valid,
    read_manifest,
    set_aside,
    step_of,
    unfinished,
    verify,
    wrong_hashes,
)
from trainkit.runs.checkpoints import note_evaluation as write_evaluation
from trainkit.train.storage import DTYPE_NAMES, Reader, TensorLoadPlanner, TensorSavePlanner, Writer

LOCK = "writer.lock"  # held by rank 0 while it publishes


class NotSaved(TrainkitError):
    """The disk did not take a checkpoint (exit 10); the older ones are as they were. Raised on all ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit=Exit.RANK_INFRA, hint="make room or mend the file system; `resume` goes on from the newest checkpoint there is")


@dataclass(frozen=True)
class About:
    """What the manifest says besides the tensors: its fields of the same names."""

    step: int
    consumed_samples: int
    layout: dict[str, int | str]
    job: dict[str, Any]
    state: dict[str, int | float | bool]
    validation: dict[str, float] = field(default_factory=dict)


def _on_rank_0(group: dist.ProcessGroup | None, do: Callable[[], str | None], what: str) -> str:
    """Do it on rank 0 and return on all ranks what it returned. What goes wrong is raised on all: NotSaved for what the disk did, else a TrainkitError."""
    told: list[tuple[str, int | None, str]] = [("", 0, "")]
    if dist.get_rank() == 0:
        try:
            told = [(do() or "", 0, "")]
        except (OSError, Busy) as error:
            told = [(f"{what}: {error}", None, "")]
        except TrainkitError as error:
            told = [(error.message, None if isinstance(error, NotSaved) else int(error.exit), error.hint)]
    dist.broadcast_object_list(told, src=0, group=group)
    words, code, hint = told[0]
    if code == 0:
        return words
    raise NotSaved(words) if code is None else TrainkitError(words, exit=Exit(code), hint=hint)


def refuse_without_locks(checkpoints: Path) -> None:
    """Called by all ranks together, before the first step: it ends a run whose checkpoints could not be published, before it costs anything.

    Raises TrainkitError on all ranks: exit 3 where the file system has no locks; NotSaved where nothing can be written.
    """

    def take() -> None:
        with contextlib.suppress(Busy), locked(checkpoints / LOCK, {"host": os.uname().nodename}, wait=False):
            pass

    _on_rank_0(None, take, f"cannot write to {checkpoints}")


def _prepare(checkpoints: Path, temporary: Path) -> None:
    """An empty folder to write into. Called under the lock: what is unfinished there was left by the dead."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    for stale in checkpoints.glob(f"step-*{UNFINISHED}"):
        try:
            remove(stale)
        except OSError as error:  # it costs room and nothing else
            print(f"WARNING: {stale} is left of a save that failed, and could not be deleted: {error}", file=sys.stderr, flush=True)
    temporary.mkdir()


def _refuse_without_room(checkpoints: Path, needed: int) -> None:
    disk = os.statvfs(checkpoints)
    free = disk.f_bavail * disk.f_frsize
    if free < needed:
        raise OSError(f"it needs {needed / 1e9:.3f} GB, and {checkpoints} has {free / 1e9:.3f} GB free")


def _publish(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Make a folder of whole files a checkpoint."""
    manifest.write(temporary)
    if problems := [*file_problems(temporary, manifest)]:  # one that took us for dead deleted it
        raise NotSaved(f"the files of checkpoint {target} have changed since they were written: {'; '.join(problems[:3])}")
    if os.path.lexists(target):  # only a damaged one that resume passed over may be in the way
        if not verify(target):
            words = f"{target} was written by another process while this one trained: two of them train one run"
            raise TrainkitError(words, exit=Exit.HOSTS_BUSY, hint="end one of them; what the other has written is whole")
        aside = set_aside(target)
        print(f"WARNING: {target} was damaged; it is now {aside.name}", file=sys.stderr, flush=True)
    publish_folder(temporary, target)


def save(
    checkpoints: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    before: Callable[[], None] = lambda: None,
    moved: Callable[[], None] = lambda: None,
    **about: Any,
) -> Checkpoint:
    """Write and publish a checkpoint; called by all ranks together. Every rank writes, hashes and fsyncs its file in step-N.TOKEN.tmp, a name that only
    this save has; rank 0 writes the manifest, renames and fsyncs the parent.

    Args:
        checkpoints: the run's folder of them.
        tensors: by name; each rank gives what it holds.
        group: over all ranks, on the CPU; by default the default one.
        before: done by rank 0 first; its OSError counts as the disk's.
        moved: called after every part that this rank has written.
        about: the fields of About.

    Returns the checkpoint (its manifest's tables of files and tensors are empty on other ranks than 0).

    Raises:
        NotSaved: on all ranks when one could not write; older checkpoints are as they were and nothing is left of this one.
        TrainkitError: exit 17, another process writes this run's checkpoints. Exit 3: the file system has no locks.
    """
    facts, rank = About(**about), dist.get_rank()
    target = folder_of(checkpoints, facts.step)
    with contextlib.ExitStack() as held:  # by rank 0

        def begin() -> str:
            before()
            temporary = unfinished(target)
            held.enter_context(locked(checkpoints / LOCK, {"host": os.uname().nodename}, wait=False))
            held.callback(shutil.rmtree, temporary, ignore_errors=True)  # once published it has another name
            _prepare(checkpoints, temporary)
            return temporary.name

        temporary = target.with_name(_on_rank_0(group, begin, f"cannot begin checkpoint {target}"))
        writer = Writer(temporary, rank, moved, room=partial(_refuse_without_room, checkpoints))
        _write(writer, tensors, group, target)
        versions = {"trainkit": trainkit.__version__, "torch": torch.__version__, "python": platform.python_version()}
        manifest = Manifest(files=tuple(writer.files), tensors=writer.tensors, versions=versions, **facts.__dict__)
        _on_rank_0(group, lambda: _publish(temporary, target, manifest), f"cannot publish checkpoint {target}")
    return Checkpoint(target, manifest)


def _write(writer: Writer, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, target: Path) -> None:
    """All ranks' files. Raises NotSaved where a disk is to blame, else RuntimeError."""
    try:
        write_tensors(dict(tensors), storage_writer=writer, planner=TensorSavePlanner(), process_group=group)
    except CheckpointException as error:
        words, disk = _first_failure(error, f"could not write checkpoint {target}")
        raise (NotSaved if disk else RuntimeError)(words) from error


def note_evaluation(checkpoints: Path, step: int, validation: dict[str, float]) -> None:
    """As that of runs/checkpoints.py, under the lock; this process alone. Raises TrainkitError and OSError."""
    try:
        with locked(checkpoints / LOCK, {"host": os.uname().nodename}, wait=False):
            write_evaluation(checkpoints, step, validation)
    except Busy as busy:
        raise NotSaved(str(busy)) from None


def _first_failure(error: CheckpointException, what: str) -> tuple[str, bool]:
    """(which rank met what, whether disks are to blame for all of it)."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return f"rank {rank} {what}: {type(reason).__name__}: {reason}", all(isinstance(why, OSError) for why, _ in error.failures.values())


def newest_valid_together(checkpoints: Path, how: Verify, tell: Callable[[str], None]) -> Checkpoint | None:
    """What `newest_valid` finds, by all ranks together, which have one view of it: rank 0 reads the manifest and looks at the sizes, all others load by what
    it has read. Of the files that `how` asks for each rank hashes its share.

    `tell` is told on rank 0 of what was passed over. Where another one was found, that is set aside: it may look whole to whoever does not read it, and
    must not push out what is. Raises TrainkitError (exit 16) on all ranks where there are checkpoints and none is whole.
    """
    there: list[list[Path]] = [finished(checkpoints) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(there, src=0)
    on_damage = (lambda words: tell(f"passed over: {words}")) if dist.get_rank() == 0 else lambda words: None
    found = newest_valid(checkpoints, on_damage, partial(_open_together, how=how), there[0])
    for folder in there[0]:
        if found and dist.get_rank() == 0 and step_of(folder) > found.manifest.step:
            try:
                tell(f"{folder} is now {set_aside(folder).name}")
            except OSError as error:
                tell(f"{folder} could not be renamed: {error}")
    return found


def _open_together(folder: Path, how: Verify) -> Checkpoint:
    """Raises Damaged on all ranks, with what any of them found."""
    rank, size = dist.get_rank(), dist.get_world_size()
    read: list[tuple[bytes, list[str]]] = [(b"", [])]
    if rank == 0:
        try:
            read = [(content := read_manifest(folder), [])]
            checked(folder, content)
        except Damaged as damaged:
            read = [(b"", damaged.problem_list)]
        except OSError as error:
            read = [(b"", [str(error)])]
    dist.broadcast_object_list(read, src=0)
    content, problems = read[0]
    if problems:
        raise Damaged(folder, problems)
    manifest = Manifest.model_validate_json(content)
    found: list[list[str]] = [[] for _ in range(size)]
    dist.all_gather_object(found, wrong_hashes(folder, files_to_hash(manifest, how)[rank::size]))
    if problems := [problem for of_rank in found for problem in of_rank]:
        raise Damaged(folder, problems)
    return Checkpoint(folder, manifest)


def load(checkpoint: Checkpoint, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Read tensors of any layout in place: with a process group by all ranks together, else in this process alone.

    Args:
        checkpoint: what was chosen.
        tensors: by name, as far as they are here; only these are read.
        expected: shapes of all that the ranks hold together; by default those of `tensors`.

    Raises:
        TrainkitError: exit 3, the checkpoint is of another model; every tensor that differs is named. Exit 10: a file cannot be read.
    """
    saved, whole = checkpoint.manifest.tensors, expected if expected is not None else {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is not in it" for name in whole if name not in saved]
    for name in (name for name in whole if name in saved):
        here = whole[name], DTYPE_NAMES[tensors[name].dtype] if name in tensors else saved[name].dtype
        if (there := (saved[name].shape, saved[name].dtype)) != here:
            problems.append(f"{name} is {list(there[0])} {there[1]} there, {list(here[0])} {here[1]} here")
    problems += [f"{name} is not in the model" for name in saved if name.startswith("model.") and name not in whole]
    if problems:
        raise TrainkitError(f"{checkpoint.folder} is a checkpoint of another model:\n  " + "\n  ".join(problems[:20]), exit=Exit.CONFIG)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
        try:
            read_tensors(dict(tensors), storage_reader=Reader(checkpoint.folder, saved), planner=TensorLoadPlanner(), no_dist=not dist.is_initialized())
        except CheckpointException as error:
            words, disk = _first_failure(error, f"could not read checkpoint {checkpoint.folder}")
            if not disk:
                raise RuntimeError(words) from error
            hint = "checkpoint.verify = 'full' finds such files before one is chosen, and passes over it"
            raise TrainkitError(words, exit=Exit.RANK_INFRA, hint=hint) from error
