"""A sweep that was begun, and what it decides once its runs have ended: which go on from a rung,
which values are tried next."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.base.locks import LockBusy, locked
from trainkit.experiment.sweep.halving import rungs_of, survivors
from trainkit.experiment.sweep.proposals import propose
from trainkit.experiment.sweep.record import (
    Member,
    SweepRecord,
    digest_of,
    new_record,
    read_newest,
    resolve_jobs,
    resolve_members,
    sweeps_folder,
    table_of,
    with_lost_runs,
)
from trainkit.experiment.sweep.results import results_of, work_of
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Job
from trainkit.jobs.sweeps import Sweep
from trainkit.reports.sweep import Key

Say = Callable[[str], None]


@dataclass(frozen=True)
class OpenedSweep:
    """A sweep that was begun, and what it needs to go on.

    Args:
        jobs: those of a jobs.toml.
        record: which run has which values.
        resolved: the job of each member, by its number; of those that are not proposed yet, a
            draw of the same ranges.
    """

    jobs: Jobs
    record: SweepRecord
    resolved: Mapping[int, ResolvedJob]

    @property
    def member_jobs(self) -> list[Job]:
        return [each.job for each in self.resolved.values()]

    @property
    def objective(self) -> Key:
        """What its runs are compared by on the way."""
        return "validation_loss" if self.member_jobs[0].training.eval_iters else "training_loss"

    @property
    def table(self) -> Sweep:
        """What jobs.toml says of it."""
        return table_of(self.resolved)


@contextlib.contextmanager
def opened_sweep(jobs: Jobs, name: str, sets: Sequence[str], *, new: bool) -> Iterator[OpenedSweep]:
    """The job's newest sweep if it is the one that jobs.toml has now, else one that begins now. In
    the block nobody else goes on with it.

    Args:
        jobs: those of a jobs.toml.
        name: of the job.
        sets: overrides of all runs.
        new: begin again in any case.

    Raises:
        ConfigError: as `resolve_members`.
        TrainkitError: 17, another process goes on with it.
    """
    members, resolved = resolve_members(jobs, name, sets)
    rungs = rungs_of(name, resolved)
    proposed = table_of(resolved).sampler == "tpe"
    root = resolved[1].job.cluster.root_folder.absolute()
    lock = sweeps_folder(root, name) / "sweep.lock"
    try:
        with locked(lock, {"sweep": name}, wait=False):
            digest = digest_of(resolved)
            record = None if new else read_newest(root, name)
            if record is None or record.digest != digest:
                record = new_record(root, name, sets, digest, [] if proposed else members, rungs)
            if proposed:
                resolved |= resolve_jobs(jobs, name, sets, record.members)
            yield OpenedSweep(jobs, with_lost_runs(record, resolved), resolved)
    except LockBusy as busy:
        raise TrainkitError(
            f"the sweep of {name} is being run already (pid {busy.holder.get('pid', '?')})",
            exit=Exit.HOSTS_BUSY,
            hint=f"invoke sweep {name} --show",
        ) from None


def advanced(sweep: OpenedSweep, say: Say, *, failed: bool) -> OpenedSweep:
    """The sweep with what follows from its runs, once all of them have ended: who goes on from a
    rung, or which values are tried next."""
    record = sweep.record
    if any(work_of(record, failed=failed)):
        return sweep
    if sweep.table.sampler == "tpe":
        return _with_proposals(sweep)
    if (rung := record.rung) is not None and rung != record.rungs[-1]:
        if not (kept := _kept(sweep)):  # all have failed: what goes on with them is `failed`
            return sweep
        record = record.with_kept(kept)
        before = len(sweep.record.active)
        say(f"go on from step {rung.step}: {len(record.active)} of {before} runs")
    return replace(sweep, record=record)


def _kept(sweep: OpenedSweep) -> list[int]:
    """Members that go on from a rung that all have reached, or failed before."""
    halving = sweep.table.halving
    assert halving is not None, "else there are no rungs"
    results = results_of(sweep.record)
    reached = [
        replace(each, state="succeeded" if each.state == "paused" else each.state)
        for each in results.members
        if each.number in sweep.record.active
    ]
    points = replace(results, members=reached).points()
    losses = [point.mean[sweep.objective] for point in points]
    return [n for place in survivors(losses, halving.factor) for n in points[place].members]


def _with_proposals(sweep: OpenedSweep) -> OpenedSweep:
    """With the values that are tried next; the same where none are left."""
    table = sweep.table
    record = sweep.record
    points = results_of(record).points()
    tried = [(point.values, point.mean[sweep.objective]) for point in points]
    seen = [(values, math.inf if loss is None else loss) for values, loss in tried]
    width = max(1, (table.at_once or 1) // max(1, len(table.seeds)))
    count = min(width, (table.samples or 0) - len(points))
    new = [each for point in propose(table, seen, count) for each in table.seeded(point)]
    members = [Member(number, each) for number, each in enumerate(new, len(record.members) + 1)]
    resolved = resolve_jobs(sweep.jobs, record.job, record.sets, members)
    if members:
        record = record.with_members(members)
    return replace(sweep, record=record, resolved={**sweep.resolved, **resolved})
