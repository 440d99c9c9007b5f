"""When and how a run saves: in the step's way or behind its back, what becomes of a full disk,
and which checkpoints stay."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.base.errors import TrainkitError
from trainkit.base.locks import LockBusy
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs.checkpoints import Checkpoint, prune, published_folders, step_of
from trainkit.train.checkpoint import save_load as checkpoint
from trainkit.train.checkpoint.host_copies import StagingBuffers
from trainkit.train.checkpoint.save_load import NotSaved

BEAT = 0.5  # seconds between two signs of life of one who waits
FAILURES = 2  # so many saves in a row that the disk does not take, and training stops


class CheckpointManager:
    """Saves for one rank; all ranks call everything together, in the same order.

    A save that the disk does not take is a warning, and training goes on to the next one; the
    second in a row, and the last one of a run, raise NotSaved. What that decides is decided at
    the next save, where all ranks have waited for the one before: so they all decide it at the
    same step. Raises TrainkitError when it is made, as `checkpoint.refuse_without_locks` does:
    no save would succeed.

    Args:
        keep: the job's `checkpoint` table. folder: the run's checkpoints. ended: told of the
        seconds that a stop needs from now on for its checkpoint, by the longest of what was
        seen, when a save has ended; from another
            thread where saves are asynchronous.
        moved: called after every part of a save, or of a deletion, that training waits for.
    """

    def __init__(
        self,
        keep: CheckpointSettings,
        folder: Path,
        ended: Callable[[float], None] = lambda seconds: None,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self.keep = keep
        self.folder = folder
        self.ended = ended
        self.moved = moved
        checkpoint.refuse_without_locks(folder)
        # A group of its own: a thread that talks in the default one in the midst of training's own
        # words aborts it.
        if keep.save_async:
            self._group = dist.new_group(backend="gloo")
        else:
            self._group = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save") if keep.save_async else None
        self._running: Future[None] | None = None
        # deleting takes as long as a third of a save, and nobody need wait for it
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="prune")
        self._pruning: Future[None] | None = None
        self._renamed = threading.Event()  # what goes has other names: the lock is free
        self._renamed.set()
        self._hurries = threading.Event()
        self._parts = 0  # of a save behind training, so far
        self.took = 0.0  # seconds of the last save
        self._copying_took = self._saving_took = 0.0  # the longest so far
        # steps of checkpoints that were there at the beginning, or that this process made (rank 0)
        self._known: set[int] = set()
        self._passed: set[int] = set()  # steps of checkpoints that were passed over
        self._staging = StagingBuffers()
        self._failures = 0

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, the same on all ranks. Raises TrainkitError (exit 16)
        where there are checkpoints and none is whole."""
        self.finish()
        self._wait_for_deletion(None, self.moved)
        self._passed.clear()
        with contextlib.suppress(OSError):
            self._known |= set(
                map(step_of, published_folders(self.folder)) if dist.get_rank() == 0 else ()
            )
        return checkpoint.newest_valid_together(self.folder, self.keep.verify, _warn, self._passed)

    def save(
        self,
        tensors: Mapping[str, Tensor],
        *,
        before: Callable[[], None],
        last: bool,
        after: Callable[[], None] = lambda: None,
        **about: Any,
    ) -> None:
        """Publish the checkpoint of this step and begin to delete what need not stay; with
        save_async: begin to publish.

        Args:
            tensors: what it holds, by name. They may change when `taken` has returned. before:
            done on rank 0 before the files are written, in this thread; its OSError counts as
            the disk's. after: done on rank 0 when it was published, and nothing is deleted yet;
            what it raises is raised on all ranks. last: it must not fail: the checkpoint is
            there when this returns, or NotSaved is raised. about: as for `checkpoint.save`.

        Raises NotSaved as the class says; what the save before this one has met, if it was
        asynchronous.
        """
        self.finish()
        if dist.get_rank() == 0:
            ready = _kept(before)
        else:
            ready = before
        if self._thread is None:
            self._end(partial(self._save, tensors, ready, after, **about), last)
            return
        began = time.perf_counter()
        copies = self._staging.copy(tensors)
        self._copying_took = max(self._copying_took, time.perf_counter() - began)
        self._running = self._thread.submit(self._save, copies, ready, after, **about)
        if last or self._failures:  # after a failure nobody need wait for the next save to know
            self.finish(last=last)

    def hurry(self) -> None:
        """Told to stop, all ranks at the same step: from now on nothing is waited for that the
        checkpoint of this step can do without. Only a disk without room for it waits until older
        ones are gone; what is not deleted by then, the next run deletes."""
        self._hurries.set()

    @property
    def copying(self) -> bool:
        """Whether `taken` would wait."""
        return self._staging.copying

    def taken(self) -> None:
        """Wait until the tensors of the last save may change; to be called before every update.
        It talks to no other rank."""
        self._staging.taken()

    def finish(self, *, last: bool = False) -> None:
        """Wait for the save under way. Raises NotSaved as `save` does."""
        running = self._running
        self._running = None
        if running is not None:
            seen = -1
            while not wait([running], BEAT).done:
                if seen != self._parts:  # else it may hang, and must look so
                    seen = self._parts
                    self.moved()
            self._end(running.result, last)

    def others(self) -> bool:
        """Whether there are checkpoints that another process has published since: to be asked on
        rank 0. Raises OSError as the disk does."""
        return any(step_of(folder) not in self._known for folder in published_folders(self.folder))

    def pruned(self) -> None:
        """Wait until what the last save deletes is gone, on this rank alone."""
        if self._pruning is not None:
            wait([self._pruning])

    def close(self) -> None:
        """Wait for the save and the deletion under way, whatever comes of them: the run has
        ended, perhaps with something worse. In a hurry, not for the deletion: it ends with the
        process."""
        running = self._running
        self._running = None
        if running is not None:
            running.exception()
        if not self._hurries.is_set():
            self.pruned()

    def _wait_for_deletion(self, group: dist.ProcessGroup | None, part: Callable[[], None]) -> None:
        """By all ranks together, until what the last save deletes is gone, or it hurries: the
        next one needs the room, and would take what is half deleted for a dead writer's. All
        ranks show that they live meanwhile."""
        waits = torch.ones(1)
        while waits:
            if dist.get_rank() == 0:
                waits.fill_(
                    self._pruning is not None
                    and not self._hurries.is_set()
                    and not wait([self._pruning], BEAT).done
                )
            dist.broadcast(waits, src=0, group=group)
            part()

    def _part(self) -> None:
        """A part of a save is done."""
        if self._thread is None:
            self.moved()
        else:
            self._parts += 1

    def _end(self, result: Callable[[], None], last: bool) -> None:
        try:
            result()
        except NotSaved as error:
            self._failures += 1
            if last or self._failures >= FAILURES:
                raise
            if dist.get_rank() == 0:
                _warn(f"{error.message}; training goes on, the next save tries again")
        else:
            self._failures = 0

    def _save(
        self,
        tensors: Mapping[str, Tensor],
        before: Callable[[], None],
        after: Callable[[], None],
        **about: Any,
    ) -> None:
        self._wait_for_deletion(self._group, self._part)
        began = time.perf_counter()
        self._staging.wait()

        def begin() -> None:
            before()
            self._renamed.wait()

        if self._hurries.is_set():
            deleting = self.pruned
        else:
            deleting = None
        saved = checkpoint.save(
            self.folder,
            tensors,
            group=self._group,
            before=begin,
            moved=self._part,
            deleting=deleting,
            passed=self._passed,
            **about,
        )
        self.took = seconds = time.perf_counter() - began
        self._saving_took = max(self._saving_took, seconds)
        # one may be in flight
        self.ended(self._copying_took + self._saving_took * (1 if self._thread is None else 2))
        if dist.get_rank() == 0:
            print(
                f" saved checkpoint {saved.manifest.step}: {saved.bytes / 1e9:.3f} GB in"
                f" {seconds:.2f} s",
                flush=True,
            )
        self._known.add(saved.manifest.step)
        checkpoint.on_rank_0(self._group, after, "after a save")
        if dist.get_rank() == 0 and not self._hurries.is_set():
            self._renamed.clear()
            self._pruning = self._pruner.submit(self._prune, saved.manifest.step)

    def _prune(self, newest: int) -> None:
        """Raises nothing: the new one is there, and no more is lost than room."""
        with contextlib.suppress(OSError):  # of stdout and stderr
            try:
                gone = prune(self.folder, self.keep, newest, self._renaming())
            except (OSError, LockBusy, TrainkitError) as error:
                _warn(f"an old checkpoint could not be deleted: {error}")
            except Exception as error:
                _warn(f"old checkpoints could not be deleted: {error!r}")
            else:
                if gone:
                    print(f" deleted checkpoint {', '.join(map(str, gone))}", flush=True)
            finally:
                self._renamed.set()

    @contextlib.contextmanager
    def _renaming(self) -> Iterator[None]:
        with checkpoint.writer_lock(self.folder):
            yield
        self._renamed.set()


def _kept(do: Callable[[], None]) -> Callable[[], None]:
    """Do it now; the OSError or TrainkitError it raised is raised when the result is called for."""
    future: Future[None] = Future()
    try:
        do()
        future.set_result(None)
    except (OSError, TrainkitError) as error:
        future.set_exception(error)
    return future.result


def _warn(words: str) -> None:
    print(f"WARNING: {words}", file=sys.stderr, flush=True)
