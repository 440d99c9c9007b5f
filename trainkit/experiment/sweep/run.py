"""Makes the runs of a sweep: as an array of a scheduler that has a queue, else in turn where there
is room; and reads what they have come to. Each has a supervisor of its own and ends alone; what
was done stays when this process ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import LockBusy, locked
from trainkit.experiment.cancel import cancel_run
from trainkit.experiment.follow import GOING
from trainkit.experiment.hosts import quarantine_reasons
from trainkit.experiment.options import ResumeOptions, TrainOptions
from trainkit.experiment.start import (
    plan_new_run,
    plan_resumed_run,
    prepare,
    prepare_and_submit,
)
from trainkit.experiment.sweep.record import (
    Member,
    SweepRecord,
    digest_of,
    new_record,
    read_newest,
    resolve_members,
    sweeps_folder,
    with_lost_runs,
)
from trainkit.jobs.load import Jobs
from trainkit.jobs.resolved import ResolvedJob
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import find_hostfile
from trainkit.launch.hosts.selection import load_hosts
from trainkit.launch.preparation import StageUi, term_interrupts
from trainkit.launch.scheduler_contract import ArrayRequest, Start
from trainkit.launch.scheduler_registry import current, current_all, scheduler_for
from trainkit.reports.sweep import MemberResult, MemberState, SweepResults
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_thinned
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.summary import RunSummary

LOSS = ": lm loss "  # of a trainer's last words where a loss ended it (train/update/loss_policy.py)


def results_of(record: SweepRecord) -> SweepResults:
    """Read the runs of a sweep."""
    runs = {each.number: run for each in record.members if (run := record.folder_of(each))}
    records = current_all([read_run_record(run) for run in runs.values()])
    by_number = dict(zip(runs, records, strict=True))
    members = [_result(each, by_number.get(each.number)) for each in record.members]
    return SweepResults(record.id, record.job, record.folder, members)


def _result(member: Member, record: RunRecord | None) -> MemberResult:
    if record is None:
        return MemberResult(member.number, member.values, "", "waiting")
    rows = read_thinned(record.run.metrics)
    summary = RunSummary(record.run, rows.rows, rows.regular)
    training = summary.training_loss()
    validation = summary.validation_loss()
    message = str((record.root_cause or {}).get("message") or "")
    return MemberResult(
        member.number,
        member.values,
        record.run.id,
        _state(record, message),
        record.step,
        training and training[1],
        validation and validation[1],
        summary.tokens_per_second,
        message.partition(";")[0].partition("\n")[0],  # `invoke why` has all of it
        record.failure_class == "user",
    )


def _state(record: RunRecord, message: str) -> MemberState:
    if record.state == "failed" and record.failure_class == "user" and LOSS in message:
        return "diverged"
    return record.state


VISIBLE = "CUDA_VISIBLE_DEVICES"  # which GPUs a run of this machine may have, and takes first


@dataclass(frozen=True)
class SweepPlace:
    """Room for one run.

    Args:
        include: hosts of the hostfile, as --include has them; "": the run chooses.
        devices: GPUs of this machine; none: the run chooses.
    """

    include: str = ""
    devices: Sequence[str] = ()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """What is started in the block sees the place's GPUs alone."""
        before = os.environ.get(VISIBLE)
        if not self.devices:
            yield
            return
        os.environ[VISIBLE] = ",".join(self.devices)
        try:
            yield
        finally:
            if before is None:
                del os.environ[VISIBLE]
            else:
                os.environ[VISIBLE] = before


def places_of(jobs: Sequence[Job]) -> list[SweepPlace]:
    """Places that do not overlap, each with room for any of the jobs, which share a cluster; at
    least one. Raises ConfigError as the reader of hostfiles."""
    job = jobs[0]
    if job.cluster.launcher_traits.hostfile:
        return _places_of_hosts(job, max(each.nodes + each.cluster.spares for each in jobs))
    ranks = max(each.ranks_per_node for each in jobs)
    given = os.environ.get(VISIBLE, "").split(",")
    devices = [name.strip() for name in given if name.strip()]
    devices = devices or [str(number) for number in range(job.cluster.gpus_per_node)]
    named = any(VISIBLE in each.environment for each in jobs)  # by jobs.toml, which comes first
    if job.cluster.device_type != "cuda" or named or len(devices) < 2 * ranks:
        return [SweepPlace()]
    last = len(devices) - ranks
    return [
        SweepPlace(devices=devices[first : first + ranks]) for first in range(0, last + 1, ranks)
    ]


def _places_of_hosts(job: Job, nodes: int) -> list[SweepPlace]:
    bad = quarantine_reasons(job.cluster)
    found = load_hosts(find_hostfile(job.cluster, "").absolute(), slots=job.ranks_per_node)
    names = [host.name for host in found if host.name.lower() not in bad]
    groups = [names[at : at + nodes] for at in range(0, len(names) - nodes + 1, nodes)]
    if len(groups) < 2:
        return [SweepPlace()]
    return [SweepPlace(include="@".join(group)) for group in groups]


Say = Callable[[str], None]
LOOK_SECONDS = 1.0  # between two looks at runs of this machine
QUEUE_SECONDS = 5.0  # and at those of a queue, which serves the whole cluster
BUSY_SECONDS = 60.0  # until a host that other runs hold is asked again


@dataclass(frozen=True)
class OpenedSweep:
    """A sweep that was begun, and what it needs to go on.

    Args:
        jobs: those of a jobs.toml.
        record: which run has which values.
        resolved: the job of each member, by its number.
    """

    jobs: Jobs
    record: SweepRecord
    resolved: Mapping[int, ResolvedJob]

    @property
    def member_jobs(self) -> list[Job]:
        return [each.job for each in self.resolved.values()]

    @property
    def at_once(self) -> int | None:
        """So many runs at the same time."""
        sweep = self.member_jobs[0].sweep
        return sweep.at_once if sweep is not None else None


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep goes on.

    Args:
        failed: also with those that ended by their own fault.
        detach: return as soon as a queue has the runs.
    """

    failed: bool = False
    detach: bool = False


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
    root = resolved[1].job.cluster.root_folder.absolute()
    lock = sweeps_folder(root, name) / "sweep.lock"
    try:
        with locked(lock, {"sweep": name}, wait=False):
            digest = digest_of(resolved)
            record = read_newest(root, name)
            if record is None or record.digest != digest or new:
                record = new_record(root, name, sets, digest, members)
            yield OpenedSweep(jobs, with_lost_runs(record, resolved), resolved)
    except LockBusy as busy:
        raise TrainkitError(
            f"the sweep of {name} is being run already (pid {busy.holder.get('pid', '?')})",
            exit=Exit.HOSTS_BUSY,
            hint=f"invoke sweep {name} --show",
        ) from None


def unfinished(members: Sequence[MemberResult], *, failed: bool) -> list[MemberResult]:
    """Those that have no run, or one that something else has ended. `failed`: also those that
    ended by their own fault."""
    ended = ("waiting", "failed", "diverged", "cancelled", "preempted")
    return [each for each in members if each.state in ended and (failed or not each.own_fault)]


def run_sweep(sweep: OpenedSweep, ui: StageUi, options: SweepOptions) -> SweepRecord:
    """Go on with a sweep until all its runs have ended, or a queue has them; the record then.

    Args:
        sweep: the sweep; its lock is held.
        ui: how a person follows.
        options: how it goes on.

    Raises:
        TrainkitError: a run cannot be started; those that were started go on.
        KeyboardInterrupt: Ctrl-C; runs that no queue has were asked to save and stop.
    """
    scheduler = scheduler_for(sweep.member_jobs[0].cluster)
    # also those of other sweeps of the job: this may be a new one
    for line in scheduler.settle_arrays(sweeps_folder(sweep.record.root, sweep.record.job)):
        ui.say(line)
    members = results_of(sweep.record).members
    todo = unfinished(members, failed=options.failed)
    if scheduler.queues:
        record = _submit(sweep, todo, ui)
        if not options.detach:
            _follow(record, ui.say)
        return record
    if options.detach:
        raise TrainkitError(
            "--detach is for clusters with a queue: here somebody has to start one run after the"
            " other",
            exit=Exit.USAGE,
            hint="nohup, tmux or a service keep this command going",
        )
    turns = _Turns(sweep, ui)
    turns.adopt([each for each in members if each.state in GOING])
    with term_interrupts():
        return turns.run(todo)


def _submit(sweep: OpenedSweep, todo: Sequence[MemberResult], ui: StageUi) -> SweepRecord:
    """Put members into the queue: one array for all that ask for the same of it."""
    if not todo:
        return sweep.record
    by_number = {member.number: member for member in sweep.record.members}
    starts = [
        prepare(
            _start_of(sweep, by_number[each.number], SweepPlace(), new=each.state == "waiting"), ui
        )
        for each in todo
    ]
    name = f"sweep-{sweep.record.job}-{sweep.record.id}"
    asked = ArrayRequest(name, sweep.record.folder, starts, sweep.at_once)
    done = scheduler_for(sweep.member_jobs[0].cluster).submit_array(asked)
    record = sweep.record.with_runs(
        {each.number: got.run.id for each, got in zip(todo, done, strict=True)}
    )
    for each, got in zip(todo, done, strict=True):
        ui.say(f"{each.number}: {by_number[each.number].words}: run {got.run.id}, job {got.job}")
    return record


def _follow(record: SweepRecord, say: Say) -> None:
    """Until no member waits or runs."""
    states: dict[int, str] = {}
    while True:
        runs = [(each, run) for each in record.members if (run := record.folder_of(each))]
        found = current_all([read_run_record(run) for _, run in runs])
        for (member, _), seen in zip(runs, found, strict=True):
            settled = seen
            if seen.state not in GOING and states.get(member.number) in GOING:
                settled = current(seen)  # a queue may have taken it back
            if states.get(member.number) != settled.state:
                states[member.number] = settled.state
                say(_line(member, settled))
        if not any(state in GOING for state in states.values()):
            return
        time.sleep(QUEUE_SECONDS)


def _line(member: Member, record: RunRecord) -> str:
    why = str((record.root_cause or {}).get("message") or "").partition(";")[0]
    return f"{member.number}: {member.words}: {record.state}" + (f": {why}" if why else "")


def _start_of(sweep: OpenedSweep, member: Member, place: SweepPlace, *, new: bool) -> Start:
    """How a member is started, or goes on."""
    if not new:
        going_on = ResumeOptions(detach=True, include=place.include)
        return plan_resumed_run(sweep.jobs, member.run, going_on)[1]
    options = TrainOptions(
        set=(*sweep.record.sets, *member.overrides), detach=True, include=place.include
    )
    resolved = sweep.jobs.resolve(sweep.record.job, options.overrides())
    return plan_new_run(sweep.jobs, resolved, options)


class _Turns:
    """Runs that go on beside each other as far as there are places, the others after them.

    Args:
        sweep: the sweep.
        ui: how a person follows.
    """

    def __init__(self, sweep: OpenedSweep, ui: StageUi) -> None:
        self.sweep = sweep
        self.ui = ui
        self.record = sweep.record
        self.places = places_of(sweep.member_jobs)[: sweep.at_once]
        self.going: dict[int, tuple[RunFolder, SweepPlace | None]] = {}
        self.waiting: list[MemberResult] = []
        self.resting: list[tuple[float, SweepPlace]] = []  # until when, by the monotonic clock

    def adopt(self, members: Sequence[MemberResult]) -> None:
        """Members that another process has started: nobody knows on which places, so none is used
        until they have ended."""
        for each in members:
            run = RunFolder(self.record.root / "runs" / self.record.job / each.run)
            self.going[each.number] = run, None

    def run(self, todo: Sequence[MemberResult]) -> SweepRecord:
        """All to their end."""
        self.waiting = list(todo)
        try:
            while self.waiting or self.going:
                adopted = any(place is None for _, place in self.going.values())
                while self.waiting and self.places and not adopted:
                    self._start(self.waiting.pop(0))
                time.sleep(LOOK_SECONDS)
                self._look()
        except KeyboardInterrupt:
            self._stop()
            raise
        return self.record

    def _member(self, number: int) -> Member:
        return self.record.members[number - 1]

    def _start(self, each: MemberResult) -> None:
        place = self.places[0]
        member = self._member(each.number)
        with place.entered():
            start = _start_of(self.sweep, member, place, new=each.state == "waiting")
            run = prepare_and_submit(start, self.ui).run
        self.record = self.record.with_runs({member.number: run.id})
        self.places.remove(place)
        self.going[member.number] = run, place
        self.ui.say(f"{member.number}: {member.words}: run {run.id}")

    def _look(self) -> None:
        now = time.monotonic()
        self.places += [place for until, place in self.resting if until <= now]
        self.resting = [each for each in self.resting if each[0] > now]
        for number, (run, place) in list(self.going.items()):
            record = current(read_run_record(run))
            if record.state in GOING:
                continue
            del self.going[number]
            busy = record.exit == Exit.HOSTS_BUSY
            if place is not None and busy:
                self.resting.append((now + BUSY_SECONDS, place))
            elif place is not None:
                self.places.append(place)
            self.ui.say(_line(self._member(number), record))
            if busy:
                again = next(m for m in results_of(self.record).members if m.number == number)
                self.waiting.insert(0, again)
                self.ui.say(f"{number}: waits for the hosts, which are asked every minute")

    def _stop(self) -> None:
        """Tell all to save and stop."""
        for run, _ in self.going.values():
            try:
                cancel_run(run, save=True, force=False, say=self.ui.say)
            except TrainkitError as error:
                self.ui.say(str(error))
