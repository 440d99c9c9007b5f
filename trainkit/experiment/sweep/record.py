"""What a sweep is, in a file: ROOT/sweeps/JOB/ID/sweep.json says which run has which values, and
what was decided at each rung.

A run belongs to its sweep from the moment when its folder is complete: where the process that
made it died before it could write that down, the run is found by its job, value by value.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import canonical_json, document, read_document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import asdict, dataclass, replace
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import ResolvedJob, read_job
from trainkit.jobs.schema import Job
from trainkit.jobs.sweeps import Point, Sweep, overrides_of
from trainkit.reports.sweep import Rung
from trainkit.runs.find import all_runs
from trainkit.runs.folder import RunFolder

FORM = "sweep-record/1"
RECORD = "sweep.json"


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Args:
        number: in the sweep's order, from 1.
        values: of the job, by dotted key.
        run: the run's id; "" until it is made.
    """

    number: int
    values: Point
    run: str = ""

    @property
    def overrides(self) -> list[str]:
        """The values as --set has them."""
        return overrides_of(self.values)

    @property
    def words(self) -> str:
        """For people: lr=0.001 hidden_size=64."""
        return " ".join(
            f"{key.rpartition('.')[2]}={value if isinstance(value, str) else json.dumps(value)}"
            for key, value in self.values.items()
        )


@dataclass(frozen=True)
class SweepRecord:
    """A sweep that was begun.

    Args:
        folder: its own.
        job: whose values it changes.
        sets: overrides of all its runs.
        digest: of the job and all values: another digest is another sweep.
        members: its runs.
        rungs: where they stop; none: only at their end.
    """

    folder: Path
    job: str
    sets: Sequence[str]
    digest: str
    members: Sequence[Member]
    rungs: Sequence[Rung] = ()

    @property
    def id(self) -> str:
        return self.folder.name

    @property
    def root(self) -> Path:
        """The folder that holds runs and sweeps."""
        return self.folder.parents[2]

    @property
    def rung(self) -> Rung | None:
        """The next at which runs stop; None: they train to their end."""
        return next((each for each in self.rungs if each.kept is None), None)

    @property
    def active(self) -> set[int]:
        """Numbers of the members that no rung has stopped."""
        kept = [each.kept for each in self.rungs if each.kept is not None]
        return set(kept[-1] if kept else (member.number for member in self.members))

    def sets_of(self, member: Member, job: Job) -> list[str]:
        """The overrides that a run of a member begins with: to the next rung, at the learning
        rates of the whole training. `job`: the member's."""
        sets = [*self.sets, *member.overrides]
        if self.rung is not None:
            sets += (
                f"training.train_iters={self.rung.step}",
                f"training.lr_decay_iters={job.training.decay_iters}",
            )
        return sets

    def folder_of(self, member: Member) -> RunFolder | None:
        """A member's run; None where it has none, or that was removed."""
        run = RunFolder(self.root / "runs" / self.job / member.run)
        return run if member.run and run.job.is_file() else None

    def with_runs(self, runs: Mapping[int, str]) -> SweepRecord:
        """The record, written, with further runs by their member's number."""
        members = [replace(each, run=runs.get(each.number, each.run)) for each in self.members]
        return self._changed(members=members)

    def with_members(self, members: Sequence[Member]) -> SweepRecord:
        """The record, written, with further members."""
        return self._changed(members=[*self.members, *members])

    def with_kept(self, kept: Sequence[int]) -> SweepRecord:
        """The record, written, with what the next rung decides."""
        rungs = [replace(each, kept=kept) if each == self.rung else each for each in self.rungs]
        return self._changed(rungs=rungs)

    def _changed(
        self, members: Sequence[Member] | None = None, rungs: Sequence[Rung] | None = None
    ) -> SweepRecord:
        record = replace(self, members=members or self.members, rungs=rungs or self.rungs)
        record.write()
        return record

    def write(self) -> None:
        """Write sweep.json, whole or not at all."""
        values = {"job": self.job, "sets": list(self.sets), "digest": self.digest}
        members = [asdict(each) for each in self.members]
        rungs = [asdict(each) for each in self.rungs]
        write_json(self.folder / RECORD, document(FORM, **values, members=members, rungs=rungs))


def sweeps_folder(root: Path, job: str) -> Path:
    """The folder of a job's sweeps."""
    return root / "sweeps" / job


def read_newest(root: Path, job: str) -> SweepRecord | None:
    """A job's newest sweep. Raises ConfigError where its file is of another version."""
    found = sorted(sweeps_folder(root, job).glob(f"*/{RECORD}"))
    if not found:
        return None
    value = read_document(found[-1], FORM)
    members = [Member(**each) for each in value["members"]]
    rungs = [Rung(**each) for each in value.get("rungs", ())]  # older ones have none
    return SweepRecord(
        found[-1].parent, value["job"], value["sets"], value["digest"], members, rungs
    )


def resolve_members(
    jobs: Jobs, name: str, sets: Sequence[str]
) -> tuple[list[Member], dict[int, ResolvedJob]]:
    """The members that a job's sweep has now, and the job of each by its number. Where they are
    proposed one after the other, draws of the same ranges stand for them.

    Args:
        jobs: those of a jobs.toml.
        name: of the job.
        sets: overrides of all of them.

    Raises:
        ConfigError: the job has no sweep, a member is not a job, or their clusters differ.
    """
    base = jobs.resolve(name, sets).job
    if base.sweep is None:
        raise ConfigError(
            f"job {name} has no sweep",
            hint=f"add [jobs.{name}.sweep], such as grid.training.lr = [1e-3, 3e-4]",
        )
    members = [Member(number, point) for number, point in enumerate(base.sweep.points(), start=1)]
    return members, resolve_jobs(jobs, name, sets, members)


def resolve_jobs(
    jobs: Jobs, name: str, sets: Sequence[str], members: Sequence[Member]
) -> dict[int, ResolvedJob]:
    """The job of each member by its number; as `resolve_members`."""
    resolved = {}
    for member in members:
        try:
            resolved[member.number] = jobs.resolve(name, [*sets, *member.overrides])
        except ConfigError as error:
            problems = [replace(p, message=f"{member.words}: {p.message}") for p in error.list]
            raise ConfigError(problems) from None
    if len({each.job.cluster.name for each in resolved.values()}) > 1:
        raise ConfigError(
            f"jobs.{name}.sweep: its runs are on several clusters",
            hint="a sweep is on one; give the cluster with --set cluster=NAME",
        )
    return resolved


def table_of(resolved: Mapping[int, ResolvedJob]) -> Sweep:
    """What jobs.toml says of the sweep that has these members."""
    table = next(iter(resolved.values())).job.sweep
    assert table is not None, "resolve_members refuses a job without"
    return table


def digest_of(resolved: Mapping[int, ResolvedJob]) -> str:
    """What makes two sweeps the same: every value of every member's job."""
    jobs = [each.job.model_dump(mode="json") for each in resolved.values()]
    return hashlib.sha256(canonical_json(jobs).encode()).hexdigest()


def new_record(
    root: Path,
    job: str,
    sets: Sequence[str],
    digest: str,
    members: Sequence[Member],
    rungs: Sequence[int],
) -> SweepRecord:
    """A sweep that begins now; its file is written.

    Args:
        root: the folder that gets runs and sweeps.
        job: the job's name.
        sets: overrides of all its runs.
        digest: see `digest_of`.
        members: without runs; none where they are proposed later.
        rungs: steps at which runs stop.
    """
    moment = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = sweeps_folder(root, job) / f"{moment}-{secrets.token_hex(2)}"
    folder.mkdir(parents=True)
    record = SweepRecord(folder, job, list(sets), digest, members, list(map(Rung, rungs)))
    record.write()
    return record


def with_lost_runs(record: SweepRecord, resolved: Mapping[int, ResolvedJob]) -> SweepRecord:
    """The record with runs of its members that nobody could write down: those of its job since it
    began, of whose jobs every value is the member's."""
    taken = {member.run for member in record.members}
    found: dict[int, str] = {}
    lost = [
        run
        for run in all_runs([record.root])
        if run.job_name == record.job and run.id >= record.id[:15] and run.id not in taken
    ]
    for run in lost:
        try:
            job = read_job(run.job)
        except ConfigError:
            continue
        for member in record.members:
            made = bool(member.run) or member.number in found
            if not made and _same(record, resolved[member.number].job, job):
                found[member.number] = run.id
                break
    return record if not found else record.with_runs(found)


def _same(record: SweepRecord, whole: Job, made: Job) -> bool:
    """Whether a run was made of a member's job. But for the cluster: a hostfile's slots are its
    ranks a node; and for the length of a run that is to stop at a rung."""
    same = whole.training.decay_iters == made.training.decay_iters
    if record.rungs:
        lengths = ("train_iters", "lr_decay_iters")
        changed = {name: getattr(made.training, name) for name in lengths}
        whole = whole.model_copy(update={"training": whole.training.model_copy(update=changed)})
    apart = {"cluster"}
    return same and whole.model_dump(exclude=apart) == made.model_dump(exclude=apart)
