"""The lock of a run: one supervisor at a time."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

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
    with contextlib.ExitStack() as held:
        while True:
            try:
                held.enter_context(locked(run.path / "lock", {"run": run.id}, wait=False))
                break
            except LockBusy as busy:
                if not _has_ended(run) or time.monotonic() > until:
                    raise TrainkitError(
                        f"run {run.id} is running already (pid {busy.holder.get('pid', '?')})",
                        exit=Exit.HOSTS_BUSY,
                        hint=f"invoke status {run.id}",
                    ) from None
            time.sleep(POLL_SECONDS)
        yield


def _has_ended(run: RunFolder) -> bool:
    """Whether the newest attempt was the last one."""
    ended = newest_end(run)
    return ended is not None and ended.budget is None
