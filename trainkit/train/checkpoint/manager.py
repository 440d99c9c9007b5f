"""When and how a run saves: in the step's way or behind its back, what becomes of a full disk,
which checkpoints stay, and whether training goes on from one of them or from a copy in memory."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.base.errors import TrainkitError
from trainkit.base.locks import LockBusy
from trainkit.base.printable import warn
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import Checkpoint, published_folders, step_of
from trainkit.runs.manifest import Manifest
from trainkit.runs.restored import Restored
from trainkit.runs.retention import prune
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.memory import MemoryCopies, end_timeline
from trainkit.train.checkpoint.newest import newest_valid_together
from trainkit.train.checkpoint.save_load import CheckpointMetadata, NotSaved, SaveOptions
from trainkit.train.checkpoint.staging import StagingBuffers

BEAT = 0.5  # seconds between two signs of life of one who waits
MAX_FAILURES = 2  # so many saves in a row that the disk does not take, and training stops


class CheckpointObserver:
    """What a CheckpointManager calls while it saves. Here every method does nothing."""

    def before_write(self) -> None:
        """On rank 0, in the thread that called `save`, before files are written. An OSError
        counts as the disk's."""

    def before_shipping(self) -> None:
        """In a thread of its own, before another host gets a copy of the state: what a lost host
        would take with it must be on the disk."""

    def after_publish(self) -> None:
        """On rank 0, when the checkpoint is published and nothing is deleted yet. What it raises
        is raised on all ranks."""

    def on_saved(self, stop_seconds: float) -> None:
        """A save has ended. From another thread where saves are asynchronous.

        Args:
            stop_seconds: what a stop needs from now on for its checkpoint, by the longest saves
                so far.
        """

    def on_progress(self) -> None:
        """After every part of a save, or of a deletion, that training waits for."""


class CheckpointManager:
    """Saves for one rank; all ranks call everything together, in the same order.

    A save that the disk does not take is a warning, and training goes on to the next one; the
    second in a row, and the last one of a run, raise NotSaved. What that decides is decided at
    the next save, where all ranks have waited for the one before: so they all decide it at the
    same step.

    Args:
        settings: the job's `checkpoint` table.
        folder: the run's checkpoints.
        observer: is called as its class says.
        copies: in the host's memory, where the job wants some.

    Raises:
        TrainkitError: as `refuse_without_locks` does: no save would succeed.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        folder: Path,
        observer: CheckpointObserver | None = None,
        copies: MemoryCopies | None = None,
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.observer = observer or CheckpointObserver()
        checkpoint.refuse_without_locks(folder)
        self._group: dist.ProcessGroup | None = None
        self._save_thread: ThreadPoolExecutor | None = None
        if settings.save_async:
            # A group of its own: two threads that talk in the default one abort it.
            self._group = dist.new_group(backend="gloo")
            self._save_thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._save_future: Future[None] | None = None
        # deleting takes as long as a third of a save, and need not be waited for
        self._purge_thread = ThreadPoolExecutor(1, thread_name_prefix="prune")
        self._purge_future: Future[None] | None = None
        self._stale_renamed = threading.Event()  # what goes has other names: the lock is free
        self._stale_renamed.set()
        self._stopping = threading.Event()
        self._parts_written = 0  # of a save behind training, so far
        self.save_seconds = 0.0  # of the last save
        self._longest_staging = 0.0
        self._longest_save = 0.0
        # steps of checkpoints that were there at the beginning, or that this process made (rank 0)
        self._known_steps: set[int] = set()
        self._passed_over: set[int] = set()  # steps of checkpoints that could not be loaded
        self._staging = StagingBuffers()
        self._failures = 0
        self._copies = copies
        self.restored: Restored | None = None  # what training went on from last

    def load_newest(
        self,
        tensors: Mapping[str, Tensor],
        expected: Mapping[str, tuple[int, ...]],
        *,
        memory: bool = True,
    ) -> Manifest | CheckpointMetadata | None:
        """Read the newest state there is into the tensors: of two of the same step the one in
        memory.

        Args:
            tensors, expected: as of `save_load.load`.
            memory: copies there count too.

        Returns what was saved with it; None where there is none. Raises TrainkitError as `newest`
        and `save_load.load`.
        """
        published = -1
        if self._copies and memory:
            if dist.get_rank() == 0:
                there = set(map(step_of, published_folders(self.folder)))
                self._known_steps |= there
                published = max(there, default=-1)
            published = self._copies.find(published)
            if copy := self._copies.load(published):
                self.restored = Restored(self._copies.source, copy.step, published)
                return copy
        saved = self.newest()
        step = saved.manifest.step if saved else -1
        if self._copies and step < published and (copy := self._copies.load(step + 1)):
            self.restored = Restored(self._copies.source, copy.step, step)
            return copy
        if self._copies:
            self._copies.begin_timeline()
        elif dist.get_rank() == 0:
            end_timeline(self.folder.parent)
        if saved is None:
            return None
        checkpoint.load(saved, tensors, expected)
        self.restored = Restored("disk", step, step)
        return saved.manifest

    def copy_is_due(self, step: int) -> bool:
        """Whether the tensors of this step are to be copied in memory."""
        return self._copies is not None and self._copies.due(step)

    def copy(self, metadata: CheckpointMetadata) -> None:
        """Begin to copy the tensors in memory. They may change when `wait_for_staging` has
        returned."""
        assert self._copies
        self._copies.copy(metadata, self.observer.before_shipping)

    def owes_save(self, interval: int | None) -> bool:
        """Whether training went on from memory, and a checkpoint that was due by then is not on the
        disk: it was under way, or the disk did not take it."""
        if not interval or self.restored is None or self.restored.source == "disk":
            return False
        return self.restored.step // interval > max(0, self.restored.disk_step) // interval

    @property
    def unsaved(self) -> bool:
        """Whether training went on with steps that no checkpoint holds."""
        return self.restored is not None and self.restored.step > self.restored.disk_step

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, the same on all ranks. Raises TrainkitError (exit 16)
        where there are checkpoints and none is whole."""
        self.wait_for_save()
        self._wait_for_purge_together(None, self.observer.on_progress)
        self._passed_over.clear()
        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                self._known_steps |= set(map(step_of, published_folders(self.folder)))
        return newest_valid_together(self.folder, self.settings.verify, warn, self._passed_over)

    def save(
        self, tensors: Mapping[str, Tensor], metadata: CheckpointMetadata, *, last: bool
    ) -> None:
        """Publish the checkpoint of this step and begin to delete what need not stay; with
        save_async: begin to publish.

        Args:
            tensors: what it holds, by name. They may change when `wait_for_staging` has returned.
            metadata: what the manifest says besides.
            last: it must not fail: the checkpoint is there when this returns.

        Raises:
            NotSaved: as the class says; what the save before this one has met, if it was
                asynchronous.
        """
        self.wait_for_save()
        # Rank 0 calls it here and not in the thread that saves; its error belongs to the save.
        raise_error = _call_and_keep_error(self.observer.before_write, dist.get_rank() == 0)
        if self._save_thread is None:
            self._count_failures(partial(self._save, tensors, metadata, raise_error), last)
            return
        began = time.perf_counter()
        copies = self._staging.stage(tensors)
        self._longest_staging = max(self._longest_staging, time.perf_counter() - began)
        self._save_future = self._save_thread.submit(self._save, copies, metadata, raise_error)
        if last or self._failures:  # after a failure all ranks learn at once how this one ends
            self.wait_for_save(last=last)

    def prepare_to_stop(self) -> None:
        """The run stops, on all ranks at the same step: from now on nothing is waited for that
        the checkpoint of this step can do without. Only a disk without room for it waits until
        older ones are gone; what is not deleted by then, the next run deletes."""
        self._stopping.set()

    @property
    def staging(self) -> bool:
        """Whether `wait_for_staging` would wait."""
        return self._staging.staging or (self._copies is not None and self._copies.copying)

    def wait_for_staging(self) -> None:
        """Wait until the tensors of the last save and copy may change; to be called before every
        update. It talks to no other rank."""
        self._staging.wait_for_staging()
        if self._copies:
            self._copies.wait_for_copying()

    def wait_for_save(self, *, last: bool = False) -> None:
        """Wait for the save under way. Raises NotSaved as `save` does."""
        future = self._save_future
        self._save_future = None
        if future is None:
            return
        seen = -1
        while not wait([future], BEAT).done:
            if seen != self._parts_written:  # else it may hang, and must look so
                seen = self._parts_written
                self.observer.on_progress()
        self._count_failures(future.result, last)

    def has_foreign_checkpoints(self) -> bool:
        """Whether there are checkpoints that another process has published since: to be asked on
        rank 0. Raises OSError as the disk does."""
        return any(
            step_of(folder) not in self._known_steps for folder in published_folders(self.folder)
        )

    def wait_for_purge(self) -> None:
        """Wait until what the last save deletes is gone, on this rank alone."""
        if self._purge_future is not None:
            wait([self._purge_future])

    def close(self) -> None:
        """Wait for the save and the deletion under way, whatever comes of them: the run has
        ended, perhaps with something worse. When it stops, not for the deletion: it ends with the
        process."""
        future = self._save_future
        self._save_future = None
        if future is not None:
            future.exception()
        if self._copies:
            self._copies.close()
        if not self._stopping.is_set():
            self.wait_for_purge()

    def _wait_for_purge_together(
        self, group: dist.ProcessGroup | None, on_progress: Callable[[], None]
    ) -> None:
        """By all ranks together, until what the last save deletes is gone, or the run stops: the
        next save needs the room, and would take what is half deleted for a dead writer's. All
        ranks show that they live meanwhile."""
        waits = torch.ones(1)
        while waits:
            if dist.get_rank() == 0:
                waits.fill_(
                    self._purge_future is not None
                    and not self._stopping.is_set()
                    and not wait([self._purge_future], BEAT).done
                )
            dist.broadcast(waits, src=0, group=group)
            on_progress()

    def _on_part_written(self) -> None:
        if self._save_thread is None:
            self.observer.on_progress()
        else:
            self._parts_written += 1

    def _count_failures(self, save: Callable[[], None], last: bool) -> None:
        try:
            save()
        except NotSaved as error:
            self._failures += 1
            if last or self._failures >= MAX_FAILURES:
                raise
            if dist.get_rank() == 0:
                warn(f"{error.message}; training goes on, the next save tries again")
        else:
            self._failures = 0

    def _save(
        self,
        tensors: Mapping[str, Tensor],
        metadata: CheckpointMetadata,
        raise_error: Callable[[], None],
    ) -> None:
        """One save from its first wait to the beginning of the deletion, in the thread that
        saves."""
        self._wait_for_purge_together(self._group, self._on_part_written)
        began = time.perf_counter()
        self._staging.wait_for_copies()

        def before_write() -> None:
            raise_error()
            self._stale_renamed.wait()

        wait_for_deletion = self.wait_for_purge if self._stopping.is_set() else None
        options = SaveOptions(
            group=self._group,
            before_write=before_write,
            on_progress=self._on_part_written,
            wait_for_deletion=wait_for_deletion,
            passed_over=self._passed_over,
        )
        saved = checkpoint.save(self.folder, tensors, metadata, options)
        self._report_saved(saved, time.perf_counter() - began)
        self._known_steps.add(saved.manifest.step)
        checkpoint.on_rank_0(self._group, self.observer.after_publish, "after a save")
        if dist.get_rank() == 0 and not self._stopping.is_set():
            self._stale_renamed.clear()
            self._purge_future = self._purge_thread.submit(self._purge_stale, saved.manifest.step)

    def _report_saved(self, saved: Checkpoint, seconds: float) -> None:
        self.save_seconds = seconds
        self._longest_save = max(self._longest_save, seconds)
        saves = 1 if self._save_thread is None else 2  # one may be in flight when the stop comes
        self.observer.on_saved(self._longest_staging + self._longest_save * saves)
        if dist.get_rank() == 0:
            print(
                f" saved checkpoint {saved.manifest.step}: {saved.bytes / 1e9:.3f} GB in"
                f" {seconds:.2f} s",
                flush=True,
            )

    def _purge_stale(self, newest: int) -> None:
        """Raises nothing: the new one is there, and no more is lost than room."""
        with contextlib.suppress(OSError):  # of stdout and stderr
            try:
                gone = prune(self.folder, self.settings, newest, self._lock_for_renaming())
            except (OSError, LockBusy, TrainkitError) as error:
                warn(f"an old checkpoint could not be deleted: {error}")
            except Exception as error:
                warn(f"old checkpoints could not be deleted: {error!r}")
            else:
                if gone:
                    print(f" deleted checkpoint {', '.join(map(str, gone))}", flush=True)
            finally:
                self._stale_renamed.set()

    @contextlib.contextmanager
    def _lock_for_renaming(self) -> Iterator[None]:
        with checkpoint.writer_lock(self.folder):
            yield
        self._stale_renamed.set()


def _call_and_keep_error(call: Callable[[], None], wanted: bool) -> Callable[[], None]:
    """Call it now if it is wanted. Returns what raises the OSError or TrainkitError that it
    raised."""
    future: Future[None] = Future()
    try:
        if wanted:
            call()
        future.set_result(None)
    except (OSError, TrainkitError) as error:
        future.set_exception(error)
    return future.result
