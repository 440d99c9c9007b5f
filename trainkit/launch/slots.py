"""A host's slots are locked by run: a second run on the same GPUs (or the same CPU) is refused by name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import Busy, locked
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder


def slots_folder() -> Path:
    """A folder of this host and user, not of a checkout: two checkouts share the same GPUs."""
    return Path(tempfile.gettempdir()) / f"trainkit-slots-{os.getuid()}"


def slot_names(job: Job) -> list[str]:
    """The slots the job takes on this host: "cpu", or one a GPU, by the numbers CUDA_VISIBLE_DEVICES gives them (the ranks see it too)."""
    if job.cluster.device_type == "cpu":
        return ["cpu"]
    seen = {**os.environ, **job.cluster.env, **job.env}.get("CUDA_VISIBLE_DEVICES", "")
    visible = [name.strip() for name in seen.split(",") if name.strip()]
    return [f"gpu{name}" for name in (visible or map(str, range(job.ranks_per_node)))][: job.ranks_per_node]


@contextlib.contextmanager
def locked_slots(job: Job, run: RunFolder, *, share: bool) -> Iterator[None]:
    """Hold the job's slots for the block; the kernel frees them when this process dies.

    Raises TrainkitError (exit 17) naming the run that holds one.
    """
    folder = slots_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise TrainkitError(f"{folder} belongs to another user", exit=Exit.HOSTS_BUSY, hint="set TMPDIR to a folder of your own")
    with contextlib.ExitStack() as stack:
        for name in [] if share else slot_names(job):
            try:
                stack.enter_context(locked(folder / f"{name}.lock", {"run": run.id, "folder": str(run.path)}, wait=False))
            except Busy as busy:
                who = f"run {busy.holder.get('run', 'unknown')} (pid {busy.holder.get('pid', '?')}, {busy.holder.get('folder', '?')})"
                raise TrainkitError(
                    f"{name} of this host is taken by {who}", exit=Exit.HOSTS_BUSY, hint="wait for it, stop it, or run beside it with --share"
                ) from None
        yield
