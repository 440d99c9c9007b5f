"""The tensors of checkpoints: written and published by all ranks together, read in any layout.
What a checkpoint is, is said in runs/checkpoints.py."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Mapping
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
from trainkit.base.locks import LockBusy, locked
from trainkit.runs.checkpoint_errors import DamagedCheckpoint, NewerCheckpoint, UnreadableCheckpoint
from trainkit.runs.checkpoints import (
    MANIFEST,
    PINNED,
    UNFINISHED_SUFFIX,
    Checkpoint,
    Manifest,
    VerifyLevel,
    check_checkpoint,
    checkpoint_folder,
    file_problems,
    files_to_hash,
    has_valid_seal,
    newest_valid,
    published_folders,
    raise_if_damaged,
    read_manifest,
    read_valid_manifest,
    set_aside,
    step_of,
    unfinished_folder,
    verify,
    wrong_hashes,
)
from trainkit.runs.checkpoints import record_evaluation as write_evaluation
from trainkit.train.checkpoint.dcp_storage import (
    DTYPE_NAMES,
    DcpReader,
    DcpWriter,
    TensorLoadPlanner,
    TensorSavePlanner,
)

LOCK = "writer.lock"  # held by rank 0 while it publishes


class NotSaved(TrainkitError):
    """The disk did not take a checkpoint (exit 10); the older ones are as they were. Raised on
    all ranks."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            exit=Exit.RANK_INFRA,
            hint=(
                "make room or mend the file system; `resume` goes on from the newest checkpoint"
                " there is"
            ),
        )


@dataclass(frozen=True)
class CheckpointMetadata:
    """What the manifest says besides the tensors: its fields of the same names."""

    step: int
    consumed_samples: int
    layout: dict[str, int | str]
    job: dict[str, Any]
    state: dict[str, int | float | bool]
    validation: dict[str, float] = field(default_factory=dict)


def on_rank_0(group: dist.ProcessGroup | None, do: Callable[[], str | None], what: str) -> str:
    """Do it on rank 0 and return on all ranks what it returned. What goes wrong is raised on
    all: NotSaved for what the disk did, else a TrainkitError."""
    told: list[tuple[str, int | None, str]] = [("", 0, "")]
    if dist.get_rank() == 0:
        try:
            told = [(do() or "", 0, "")]
        except (OSError, LockBusy) as error:
            told = [(f"{what}: {error}", None, "")]
        except TrainkitError as error:
            told = [
                (
                    error.message,
                    None if isinstance(error, NotSaved) else int(error.exit),
                    error.hint,
                )
            ]
    dist.broadcast_object_list(told, src=0, group=group)
    words, code, hint = told[0]
    if code == 0:
        return words
    raise NotSaved(words) if code is None else TrainkitError(words, exit=Exit(code), hint=hint)


def refuse_without_locks(checkpoints: Path) -> None:
    """Called by all ranks together, before the first step: it ends a run whose checkpoints could
    not be published, before it costs anything.

    Raises TrainkitError on all ranks: exit 3 where the file system has no locks; NotSaved where
    nothing can be written.
    """

    def take() -> None:
        with contextlib.suppress(LockBusy), writer_lock(checkpoints):
            pass

    on_rank_0(None, take, f"cannot write to {checkpoints}")


def _prepare(checkpoints: Path, temporary: Path) -> None:
    """An empty folder to write into."""
    checkpoints.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()


def _clean(checkpoints: Path, mine: Path) -> None:
    """Called under the lock: what else is unfinished there was left by the dead."""
    for stale in checkpoints.glob(f"step-*{UNFINISHED_SUFFIX}"):
        if stale == mine:
            continue
        try:
            remove(stale)
        except OSError as error:  # it costs room and nothing else
            print(
                f"WARNING: {stale} is left of a save that failed, and could not be deleted:"
                f" {error}",
                file=sys.stderr,
                flush=True,
            )


def _refuse_without_room(checkpoints: Path, make_room: Callable[[], None], needed: int) -> None:
    """Raises OSError where there is none after all that can be done for it."""

    def free_bytes() -> int:
        disk = os.statvfs(checkpoints)
        return disk.f_bavail * disk.f_frsize

    if (free := free_bytes()) < needed:
        make_room()
        free = free_bytes()
    if free < needed:
        raise OSError(
            f"it needs {needed / 1e9:.3f} GB, and {checkpoints} has {free / 1e9:.3f} GB free"
        )


def _refuse_unreadable(temporary: Path, target: Path, manifest: Manifest) -> None:
    """Look at what is about to be published as those who read it will: what they would refuse is
    never a checkpoint.

    Raises NotSaved where a file is not what was written, and OSError as the disk does;
    TrainkitError (exit 2) where what was written is wrong itself.
    """
    changed = list(file_problems(temporary, manifest))
    content = b""
    with contextlib.suppress(DamagedCheckpoint):
        content = read_manifest(temporary)
    if changed or not has_valid_seal(content):  # one that took us for dead deleted it
        changed = changed or [f"{MANIFEST} reads otherwise"]
        raise NotSaved(
            f"the files of checkpoint {target} have changed since they were written:"
            f" {'; '.join(changed[:3])}"
        )
    try:
        check_checkpoint(temporary, content, target.name)
    except (DamagedCheckpoint, NewerCheckpoint) as error:
        words = (
            f"checkpoint {target} was not published, for no resume would take it:"
            f" {'; '.join(error.problem_list[:3])}"
        )
        hint = (
            "this is a mistake in trainkit, please report it; `resume` goes on from the newest"
            " checkpoint there is"
        )
        raise TrainkitError(words, exit=Exit.BUG, hint=hint) from None


def _publish(
    temporary: Path, target: Path, manifest: Manifest, passed: Collection[int] = ()
) -> None:
    """Make a folder of whole files a checkpoint. What resume has passed over, of one of the
    steps `passed`, makes way."""
    manifest.write(temporary)
    _refuse_unreadable(temporary, target, manifest)
    if os.path.lexists(target):
        if manifest.step not in passed and not verify(target):
            words = (
                f"{target} was written by another process while this one trained: two of them train"
                " one run"
            )
            raise TrainkitError(
                words,
                exit=Exit.HOSTS_BUSY,
                hint="end one of them; what the other has written is whole",
            )
        aside = set_aside(target)
        print(
            f"WARNING: {target} was passed over; it is now {aside.name}",
            file=sys.stderr,
            flush=True,
        )
    publish_folder(temporary, target)


def save(
    checkpoints: Path,
    tensors: Mapping[str, Tensor],
    *,
    group: dist.ProcessGroup | None = None,
    before: Callable[[], None] = lambda: None,
    moved: Callable[[], None] = lambda: None,
    deleting: Callable[[], object] | None = None,
    passed: Collection[int] = (),
    **about: Any,
) -> Checkpoint:
    """Write and publish a checkpoint; called by all ranks together. Every rank writes, hashes
    and fsyncs its file in step-N.TOKEN.tmp, a name that only this save has; rank 0 writes the
    manifest, renames and fsyncs the parent.

    Args:
        checkpoints: the run's folder of them. tensors: by name; each rank gives what it holds.
        group: over all ranks, on the CPU; by default the default one. before: done by rank 0
        first; its OSError counts as the disk's. moved: called after every part that this rank
        has written. deleting: waits for a deletion under way. With it what is unfinished there
        is deleted only where there is no room, for time is short. passed: steps whose checkpoint
        may be replaced: it was passed over. about: the fields of About.

    Returns the checkpoint (its manifest's tables of files and tensors are empty on other ranks
    than 0).

    Raises:
        NotSaved: on all ranks when one could not write; older checkpoints are as they were and
        nothing is left of this one. TrainkitError: exit 17, another process writes this run's
        checkpoints. Exit 3: the file system has no locks.
    """
    facts = CheckpointMetadata(**about)
    rank = dist.get_rank()
    target = checkpoint_folder(checkpoints, facts.step)
    with contextlib.ExitStack() as held:  # by rank 0

        def begin() -> str:
            before()
            temporary = unfinished_folder(target)
            held.enter_context(writer_lock(checkpoints))
            # once published it has another name
            held.callback(shutil.rmtree, temporary, ignore_errors=True)
            _prepare(checkpoints, temporary)
            if deleting is None:
                _clean(checkpoints, temporary)
            return temporary.name

        def make_room() -> None:
            if deleting is not None:
                deleting()
                _clean(checkpoints, temporary)

        temporary = target.with_name(on_rank_0(group, begin, f"cannot begin checkpoint {target}"))
        writer = DcpWriter(
            temporary, rank, moved, room=partial(_refuse_without_room, checkpoints, make_room)
        )
        _write(writer, tensors, group, target)
        versions = {
            "trainkit": trainkit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        manifest = Manifest(
            files=tuple(writer.files), tensors=writer.tensors, versions=versions, **facts.__dict__
        )
        on_rank_0(
            group,
            lambda: _publish(temporary, target, manifest, passed),
            f"cannot publish checkpoint {target}",
        )
    return Checkpoint(target, manifest)


def _write(
    writer: DcpWriter, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, target: Path
) -> None:
    """All ranks' files. Raises NotSaved where a disk is to blame, else RuntimeError."""
    try:
        write_tensors(
            dict(tensors), storage_writer=writer, planner=TensorSavePlanner(), process_group=group
        )
    except CheckpointException as error:
        words, disk = _first_failure(error, f"could not write checkpoint {target}")
        raise (NotSaved if disk else RuntimeError)(words) from error


def writer_lock(checkpoints: Path) -> contextlib.AbstractContextManager[None]:
    """The lock of writers, for rank 0; entering it raises Busy where another one publishes."""
    return locked(checkpoints / LOCK, {"host": os.uname().nodename}, wait=False)


def note_evaluation(checkpoints: Path, step: int, validation: dict[str, float]) -> None:
    """As that of runs/checkpoints.py, under the lock; this process alone. Raises TrainkitError
    and OSError."""
    try:
        with writer_lock(checkpoints):
            write_evaluation(checkpoints, step, validation)
    except LockBusy as busy:
        raise NotSaved(str(busy)) from None


def _first_failure(error: CheckpointException, what: str) -> tuple[str, bool]:
    """(which rank met what, whether disks are to blame for all of it)."""
    rank, (reason, _) = next(iter(error.failures.items()))
    return f"rank {rank} {what}: {type(reason).__name__}: {reason}", all(
        isinstance(why, OSError) for why, _ in error.failures.values()
    )


def newest_valid_together(
    checkpoints: Path, how: VerifyLevel, tell: Callable[[str], None], passed: set[int] | None = None
) -> Checkpoint | None:
    """What `newest_valid` finds, by all ranks together, which have one view of it: rank 0 reads
    the manifest and looks at the sizes, all others load by what it has read. Of the files that
    `how` asks for each rank hashes its share.

    `tell` is told on rank 0 of what was passed over, and `passed` gets its steps. Where another
    one was found, what was read and is wrong is set aside: it may look whole to whoever does not
    read it, and must not push out what is. Raises TrainkitError on all ranks as `newest_valid`
    does.
    """
    there: list[list[Path]] = [published_folders(checkpoints) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(there, src=0)
    wrong: list[tuple[Path, tuple[int, int]]] = []

    def opened(folder: Path) -> Checkpoint:
        seen = _identity(folder)
        try:
            return _open_together(folder, how)
        except DamagedCheckpoint as damaged:
            if not isinstance(damaged, UnreadableCheckpoint):
                wrong.append((folder, seen))
            raise

    on_damage = (
        (lambda words: tell(f"passed over: {words}"))
        if dist.get_rank() == 0
        else lambda words: None
    )
    found = newest_valid(checkpoints, on_damage, opened, there[0])
    if found and passed is not None:
        passed.update(step for step in map(step_of, there[0]) if step > found.manifest.step)
    if found and wrong and dist.get_rank() == 0:
        _set_aside(checkpoints, wrong, tell)
    return found


def _identity(folder: Path) -> tuple[int, int]:
    """What tells a folder from another one of its name."""
    try:
        seen = folder.stat()
    except OSError:
        return 0, 0
    return seen.st_ino, seen.st_mtime_ns


def _set_aside(
    checkpoints: Path, wrong: list[tuple[Path, tuple[int, int]]], tell: Callable[[str], None]
) -> None:
    """Rename what was found damaged, but for what a person put there, and what another writer
    has put in its place since."""
    try:
        with writer_lock(checkpoints):
            for folder, seen in wrong:
                if (
                    not folder.is_symlink()
                    and not os.path.lexists(folder / PINNED)
                    and _identity(folder) == seen
                ):
                    tell(f"{folder} is now {set_aside(folder).name}")
    except (OSError, LockBusy, TrainkitError) as error:
        tell(f"{', '.join(str(folder) for folder, _ in wrong)} stay under their names: {error}")


def _open_together(folder: Path, how: VerifyLevel) -> Checkpoint:
    """Raises DamagedCheckpoint, and NewerCheckpoint, on all ranks, with what any of them found."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    read: list[tuple[bytes, type[DamagedCheckpoint | NewerCheckpoint], list[str]]] = [
        (b"", DamagedCheckpoint, [])
    ]
    if rank == 0:
        try:
            read = [(read_valid_manifest(folder), DamagedCheckpoint, [])]
        except (DamagedCheckpoint, NewerCheckpoint) as error:
            read = [(b"", type(error), error.problem_list)]
    dist.broadcast_object_list(read, src=0)
    content, kind, problems = read[0]
    if problems:
        raise kind(folder, problems)
    manifest = Manifest.model_validate_json(content)
    found: list[tuple[list[str], list[str]]] = [([], [])] * size
    wrong, unread = wrong_hashes(folder, files_to_hash(manifest, how)[rank::size])
    dist.all_gather_object(found, (wrong, [f"rank {rank}: {words}" for words in unread]))
    raise_if_damaged(
        folder,
        [words for of_rank, _ in found for words in of_rank],
        [words for _, of_rank in found for words in of_rank],
    )
    return Checkpoint(folder, manifest)


def load(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]] | None = None,
) -> None:
    """Read tensors of any layout in place: with a process group by all ranks together, else in
    this process alone.

    Args:
        checkpoint: what was chosen.
        tensors: by name, as far as they are here; only these are read.
        expected: shapes of all that the ranks hold together; by default those of `tensors`.

    Raises:
        TrainkitError: exit 3, the checkpoint is of another model; every tensor that differs is
        named. Exit 10: a file cannot be read.
    """
    saved = checkpoint.manifest.tensors
    if expected is not None:
        whole = expected
    else:
        whole = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is not in it" for name in whole if name not in saved]
    for name in (name for name in whole if name in saved):
        here = (
            whole[name],
            (DTYPE_NAMES[tensors[name].dtype] if name in tensors else saved[name].dtype),
        )
        if (there := (saved[name].shape, saved[name].dtype)) != here:
            problems.append(
                f"{name} is {list(there[0])} {there[1]} there, {list(here[0])} {here[1]} here"
            )
    problems += [
        f"{name} is not in the model"
        for name in saved
        if name.startswith("model.") and name not in whole
    ]
    if problems:
        raise TrainkitError(
            f"{checkpoint.folder} is a checkpoint of another model:\n  "
            + "\n  ".join(problems[:20]),
            exit=Exit.CONFIG,
        )
    with warnings.catch_warnings():
        # one process is meant
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            read_tensors(
                dict(tensors),
                storage_reader=DcpReader(checkpoint.folder, saved),
                planner=TensorLoadPlanner(),
                no_dist=not dist.is_initialized(),
            )
        except CheckpointException as error:
            words, disk = _first_failure(error, f"could not read checkpoint {checkpoint.folder}")
            if not disk:
                raise RuntimeError(words) from error
            hint = (
                "checkpoint.verify = 'full' finds such files before one is chosen, and passes"
                " over it"
            )
            raise TrainkitError(words, exit=Exit.RANK_INFRA, hint=hint) from error
