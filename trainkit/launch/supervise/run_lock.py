"""The lock of a run: one supervisor at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import LockBusy, locked
from trainkit.runs.events import newest_end
from trainkit.runs.folder import RunFolder

# A supervisor holds the lock until its last messages are sent: somewhat longer than the run takes
# for all who look at it.
CLOSING_SECONDS = 60.0
POLL_SECONDS = 0.02


@contextlib.contextmanager
def locked_run(run: RunFolder) -> Iterator[None]:
    """Hold the run's lock. The supervisor of a run that has ended is waited for, CLOSING_SECONDS at
    most. Raises TrainkitError (exit 17) where another holds it."""
    until = time.monotonic() + CLOSING_SECONDS
    with locked_in_time(
        run.path / "lock",
        {"run": run.id},
        lambda: _has_ended(run) and time.monotonic() <= until,
        lambda pid: TrainkitError(
            f"run {run.id} is running already (pid {pid})",
            exit=Exit.HOSTS_BUSY,
            hint=f"invoke status {run.id}",
        ),
    ):
        yield


@contextlib.contextmanager
def locked_in_time(
    path: Path,
    holder: Mapping[str, object],
    may_wait: Callable[[], bool],
    refusal: Callable[[object], TrainkitError],
) -> Iterator[None]:
    """Hold a lock, tried again and again while another process has it.

    Args:
        path: the lock file.
        holder: what others read about us.
        may_wait: whether to try again.
        refusal: what to raise where not, by the pid of the holder.
    """
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(path, holder, wait=False))
                break
            except LockBusy as busy:
                if not may_wait():
                    raise refusal(busy.holder.get("pid", "?")) from None
            time.sleep(POLL_SECONDS)
        yield


def _has_ended(run: RunFolder) -> bool:
    """Whether the newest attempt was the last one."""
    ended = newest_end(run)
    return ended is not None and ended.budget is None
