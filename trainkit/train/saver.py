"""When and how a run saves: in the step's way or behind its back, what becomes of a full disk, and which checkpoints stay."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from trainkit.base.errors import TrainkitError
from trainkit.jobs.schema import Checkpoint as Keep
from trainkit.runs.checkpoints import Checkpoint, prune
from trainkit.train import checkpoint
from trainkit.train.checkpoint import NotSaved
from trainkit.train.staging import Staging

FAILURES = 2  # so many saves in a row that the disk does not take, and training stops


class Saver:
    """Saves for one rank; all ranks call everything together, in the same order.

    A save that the disk does not take is a warning, and training goes on to the next one; the second in a row, and the last one of a run, raise NotSaved.
    What that decides is decided at the next save, where all ranks have waited for the one before: so they all decide it at the same step.
    Raises TrainkitError when it is made, as `checkpoint.refuse_without_locks` does: no save would succeed.

    Args:
        keep: the job's `checkpoint` table.
        folder: the run's checkpoints.
        ended: told of the seconds a save took, when it has ended; from another thread where saves are asynchronous.
        moved: called after every part of a save that training waits for.
    """

    def __init__(self, keep: Keep, folder: Path, ended: Callable[[float], None] = lambda seconds: None, moved: Callable[[], None] = lambda: None) -> None:
        self.keep, self.folder, self.ended = keep, folder, ended
        self.moved = (lambda: None) if keep.save_async else moved
        checkpoint.refuse_without_locks(folder)
        # A group of its own: a thread that talks in the default one in the midst of training's own words aborts it.
        self._group = dist.new_group(backend="gloo") if keep.save_async else None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save") if keep.save_async else None
        self._running: Future[None] | None = None
        self._pruner = ThreadPoolExecutor(1, thread_name_prefix="prune")  # deleting takes as long as a third of a save, and nobody need wait for it
        self._pruning: Future[None] | None = None
        self._staging = Staging()
        self._failures = 0

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint, the same on all ranks. Raises TrainkitError (exit 16) where there are checkpoints and none is whole."""
        self.finish()
        self.pruned()
        return checkpoint.newest_valid_together(self.folder, self.keep.verify, _warn)

    def save(self, tensors: Mapping[str, Tensor], *, before: Callable[[], None], last: bool, **about: Any) -> None:
        """Publish the checkpoint of this step and begin to delete what need not stay; with save_async: begin to publish.

        Args:
            tensors: what it holds, by name. They may change when `taken` has returned.
            before: done on rank 0 before the files are written, in this thread; its OSError counts as the disk's.
            last: it must not fail: the checkpoint is there when this returns, or NotSaved is raised.
            about: as for `checkpoint.save`.

        Raises NotSaved as the class says; what the save before this one has met, if it was asynchronous.
        """
        self.finish()
        ready = _kept(before) if dist.get_rank() == 0 else before
        if self._thread is None:
            self._end(partial(self._save, tensors, ready, **about), last)
            return
        copies = self._staging.copy(tensors)
        self._running = self._thread.submit(self._save, copies, ready, **about)
        if last or self._failures:  # after a failure nobody need wait for the next save to know
            self.finish(last=last)

    @property
    def copying(self) -> bool:
        """Whether `taken` would wait."""
        return self._staging.copying

    def taken(self) -> None:
        """Wait until the tensors of the last save may change; to be called before every update. It talks to no other rank."""
        self._staging.taken()

    def finish(self, *, last: bool = False) -> None:
        """Wait for the save under way. Raises NotSaved as `save` does."""
        running, self._running = self._running, None
        if running is not None:
            self._end(running.result, last)

    def pruned(self) -> None:
        """Wait until what the last save deletes is gone: the next one needs the room, and would take what is half deleted for a dead writer's."""
        if self._pruning is not None:
            self._pruning.result()

    def close(self) -> None:
        """Wait for the save and the deletion under way, whatever comes of them: the run has ended, perhaps with something worse."""
        running, self._running = self._running, None
        if running is not None:
            running.exception()
        self.pruned()

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

    def _save(self, tensors: Mapping[str, Tensor], before: Callable[[], None], **about: Any) -> None:
        self.pruned()
        began = time.perf_counter()
        self._staging.wait()
        saved = checkpoint.save(self.folder, tensors, group=self._group, before=before, moved=self.moved, **about)
        seconds = time.perf_counter() - began
        self.ended(seconds)
        if dist.get_rank() == 0:
            print(f" saved checkpoint {saved.manifest.step}: {saved.bytes / 1e9:.3f} GB in {seconds:.2f} s", flush=True)
            self._pruning = self._pruner.submit(self._prune, saved.manifest.step)

    def _prune(self, newest: int) -> None:
        try:
            gone = prune(self.folder, self.keep, newest)
        except OSError as error:  # the new one is there: nothing is lost but room
            _warn(f"an old checkpoint could not be deleted: {error}")
            return
        if gone:
            print(f" deleted checkpoint {', '.join(map(str, gone))}", flush=True)


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
