"""The tensors of checkpoints: written and published by all ranks together, read in any layout.
What a checkpoint is, is said in runs/checkpoints.py."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

import trainkit
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import publish_folder, remove
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.locks import LockBusy, locked
from trainkit.base.printable import warn
from trainkit.jobs.schema import Job
from trainkit.runs.checkpoints import (
    LOCK,
    UNFINISHED_SUFFIX,
    Checkpoint,
    DamagedCheckpoint,
    NewerCheckpoint,
    check_checkpoint,
    checkpoint_folder,
    file_problems,
    read_manifest,
    record_evaluation as write_evaluation,
    set_aside,
    unfinished_folder,
    verify,
)
from trainkit.runs.manifest import MANIFEST, DataFile, Manifest, TensorEntry, has_valid_seal
from trainkit.train.checkpoint.dcp_storage import (
    DTYPE_NAMES,
    DcpReader,
    DcpWriter,
    TensorLoadPlanner,
    TensorSavePlanner,
)


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
    layout: dict[str, int | str] = field(default_factory=dict)
    job: dict[str, object] = field(default_factory=dict)
    state: dict[str, int | float | bool] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)

    def manifest(self, files: Iterable[DataFile], tensors: dict[str, TensorEntry]) -> Manifest:
        """The manifest of these files and tensors, written by this version."""
        versions = {
            "trainkit": trainkit.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
        return Manifest(files=tuple(files), tensors=tensors, versions=versions, **self.__dict__)


def layout_entry(job: Job, world_size: int) -> dict[str, int | str]:
    """What a manifest says of the ranks that wrote it."""
    layout: dict[str, int | str] = {
        "world_size": world_size,
        "data_parallel_size": job.data_parallel_size,
    }
    for key, value in job.parallelism.model_dump(exclude_none=True).items():
        layout[key] = value if isinstance(value, str) else int(value)
    return layout


def on_rank_0(group: dist.ProcessGroup | None, call: Callable[[], str | None], what: str) -> str:
    """Call it on rank 0 and return on all ranks what it returned.

    Args:
        group: over all ranks, on the CPU; None: the default one.
        call: what is called.
        what: begins the message of an error of the disk.

    Raises:
        NotSaved: on all ranks, for what the disk did.
        TrainkitError: on all ranks, for any other error that rank 0 has named.
    """
    outcome: list[tuple[str, int | None, str]] = [("", 0, "")]
    if _rank() == 0:
        outcome = [_outcome(call, what)]
    if dist.is_initialized():
        dist.broadcast_object_list(outcome, src=0, group=group)
    message, code, hint = outcome[0]
    if code == 0:
        return message
    if code is None:
        raise NotSaved(message)
    raise TrainkitError(message, exit=Exit(code), hint=hint)


def _rank() -> int:
    """Of this process; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def _outcome(call: Callable[[], str | None], what: str) -> tuple[str, int | None, str]:
    """(result or message, exit code: None for NotSaved, hint)."""
    try:
        return call() or "", 0, ""
    except (OSError, LockBusy) as error:
        return f"{what}: {error}", None, ""
    except NotSaved as error:
        return error.message, None, error.hint
    except TrainkitError as error:
        return error.message, int(error.exit), error.hint


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
            warn(f"{stale} is left of a save that failed, and could not be deleted: {error}")


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
        raise TrainkitError(
            f"checkpoint {target} was not published, for no resume would take it:"
            f" {'; '.join(error.problem_list[:3])}",
            exit=Exit.BUG,
            hint=(
                "this is a mistake in trainkit, please report it; `resume` goes on from the newest"
                " checkpoint there is"
            ),
        ) from None


def _publish(
    temporary: Path, target: Path, manifest: Manifest, passed_over: Collection[int] = ()
) -> None:
    """Make a folder of whole files a checkpoint. What resume has passed over, of one of the
    steps `passed_over`, makes way."""
    manifest.write(temporary)
    _refuse_unreadable(temporary, target, manifest)
    if os.path.lexists(target):
        if manifest.step not in passed_over and not verify(target):
            raise TrainkitError(
                f"{target} was written by another process while this one trained: two of them train"
                " one run",
                exit=Exit.HOSTS_BUSY,
                hint="end one of them; what the other has written is whole",
            )
        aside = set_aside(target)
        warn(f"{target} was passed over; it is now {aside.name}")
    publish_folder(temporary, target)


@dataclass(frozen=True)
class SaveOptions:
    """How a checkpoint is saved, and what is called meanwhile.

    Args:
        group: over all ranks, on the CPU; None: the default one.
        before_write: called by rank 0 first; its OSError counts as the disk's.
        on_progress: called after every part that this rank has written.
        wait_for_deletion: waits for a deletion under way. With it, what is unfinished in the
            folder is deleted only where there is no room, for time is short.
        passed_over: steps whose checkpoint may be replaced: it could not be loaded.
    """

    group: dist.ProcessGroup | None = None
    before_write: Callable[[], None] = lambda: None
    on_progress: Callable[[], None] = lambda: None
    wait_for_deletion: Callable[[], object] | None = None
    passed_over: Collection[int] = ()


DEFAULT_OPTIONS = SaveOptions()


def save(
    checkpoints: Path,
    tensors: Mapping[str, Tensor],
    metadata: CheckpointMetadata,
    options: SaveOptions = DEFAULT_OPTIONS,
) -> Checkpoint:
    """Write and publish a checkpoint; called by all ranks together, or by a process alone. Every
    rank writes, hashes and fsyncs its file in step-N.TOKEN.tmp, a name that only this save has;
    rank 0 writes the manifest, renames and fsyncs the parent.

    Args:
        checkpoints: the run's folder of them.
        tensors: by name; each rank gives what it holds.
        metadata: what the manifest says besides.
        options: how; by default as `SaveOptions` says.

    Returns the checkpoint (its manifest's tables of files and tensors are empty on other ranks
    than 0).

    Raises:
        NotSaved: on all ranks when one could not write; older checkpoints are as they were and
            nothing is left of this one.
        TrainkitError: exit 17, another process writes this run's checkpoints; exit 3, the file
            system has no locks.
    """
    group = options.group
    target = checkpoint_folder(checkpoints, metadata.step)
    with contextlib.ExitStack() as until_published:  # on rank 0

        def begin() -> str:
            options.before_write()
            temporary = unfinished_folder(target)
            until_published.enter_context(writer_lock(checkpoints))
            # once published it has another name
            until_published.callback(shutil.rmtree, temporary, ignore_errors=True)
            _prepare(checkpoints, temporary)
            if options.wait_for_deletion is None:
                _clean(checkpoints, temporary)
            return temporary.name

        def make_room() -> None:
            if options.wait_for_deletion is not None:
                options.wait_for_deletion()
                _clean(checkpoints, temporary)

        temporary = target.with_name(on_rank_0(group, begin, f"cannot begin checkpoint {target}"))
        writer = DcpWriter(
            temporary,
            _rank(),
            options.on_progress,
            reserve=partial(_refuse_without_room, checkpoints, make_room),
        )
        _write(writer, tensors, group, target)
        manifest = metadata.manifest(writer.files, writer.tensors)
        on_rank_0(
            group,
            lambda: _publish(temporary, target, manifest, options.passed_over),
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
        message, disk = _first_failure(error, f"could not write checkpoint {target}")
        if disk:
            raise NotSaved(message) from error
        raise RuntimeError(message) from error


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
    problems = _mismatches(saved, tensors, expected)
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
            raise _not_read(checkpoint.folder, error) from error


def _mismatches(
    saved: Mapping[str, TensorEntry],
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, tuple[int, ...]] | None,
) -> list[str]:
    """In what a checkpoint's tensors and those of the job differ; arguments as of `load`."""
    if expected is None:
        expected = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    problems = [f"{name} is not in it" for name in expected if name not in saved]
    for name, shape in expected.items():
        if name not in saved:
            continue
        entry = saved[name]
        dtype = DTYPE_NAMES[tensors[name].dtype] if name in tensors else entry.dtype
        if (entry.shape, entry.dtype) != (shape, dtype):
            problems.append(
                f"{name} is {list(entry.shape)} {entry.dtype} there, {list(shape)} {dtype} here"
            )
    problems += [
        f"{name} is not in the model"
        for name in saved
        if name.startswith("model.") and name not in expected
    ]
    return problems


def _not_read(folder: Path, error: CheckpointException) -> Exception:
    message, disk = _first_failure(error, f"could not read checkpoint {folder}")
    if not disk:
        return RuntimeError(message)
    hint = "checkpoint.verify = 'full' finds such files before one is chosen, and passes over it"
    return TrainkitError(message, exit=Exit.RANK_INFRA, hint=hint)
