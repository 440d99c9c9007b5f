"""Makes the runs of a sweep: as an array of a scheduler that has a queue, else in turn where there
is room, from rung to rung where it has some. Each has a supervisor of its own and ends alone; what
was done stays when this process ends.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterator, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
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
from trainkit.experiment.sweep.opened import OpenedSweep, Say, advanced
from trainkit.experiment.sweep.record import Member, SweepRecord, sweeps_folder
from trainkit.experiment.sweep.results import results_of, work_of
from trainkit.jobs.schema import Job
from trainkit.launch.hosts.hostfile import find_hostfile
from trainkit.launch.hosts.selection import load_hosts
from trainkit.launch.preparation import StageUi, term_interrupts
from trainkit.launch.scheduler_contract import ArrayRequest, Start
from trainkit.launch.scheduler_registry import current, current_all, scheduler_for
from trainkit.reports.sweep import MemberResult
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord, read_run_record

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


LOOK_SECONDS = 1.0  # between two looks at runs of this machine
QUEUE_SECONDS = 5.0  # and at those of a queue, which serves the whole cluster
BUSY_SECONDS = 60.0  # until a host that other runs hold is asked again


@dataclass(frozen=True)
class SweepOptions:
    """How a sweep goes on.

    Args:
        failed: also with those that ended by their own fault.
        detach: return as soon as a queue has the runs.
    """

    failed: bool = False
    detach: bool = False


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
    if options.detach and not scheduler.queues:
        raise TrainkitError(
            "--detach is for clusters with a queue: here somebody has to start one run after the"
            " other",
            exit=Exit.USAGE,
            hint="nohup, tmux or a service keep this command going",
        )
    failed = options.failed
    while True:
        sweep = advanced(sweep, ui.say, failed=failed)
        todo, going = work_of(sweep.record, failed=failed)
        if not todo and not going:
            return sweep.record
        if scheduler.queues:
            record = _submit(sweep, todo, ui)
            if options.detach:
                return record
            _follow(record, {each.number for each in (*todo, *going)}, ui.say)
        else:
            turns = _Turns(sweep, ui)
            turns.adopt(going)
            with term_interrupts():
                record = turns.run(todo)
        sweep = replace(sweep, record=record)
        failed = False
        if any(work_of(record, failed=False)):  # without them nothing is decided
            return record


def _submit(sweep: OpenedSweep, todo: Sequence[MemberResult], ui: StageUi) -> SweepRecord:
    """Put members into the queue: one array for all that ask for the same of it."""
    if not todo:
        return sweep.record
    by_number = {member.number: member for member in sweep.record.members}
    starts = [
        prepare(_start_of(sweep, by_number[each.number], SweepPlace(), new=not each.run), ui)
        for each in todo
    ]
    name = f"sweep-{sweep.record.job}-{sweep.record.id}"
    # of proposals no more are made than run at once
    at_once = None if sweep.table.sampler == "tpe" else sweep.table.at_once
    asked = ArrayRequest(name, sweep.record.folder, starts, at_once)
    done = scheduler_for(sweep.member_jobs[0].cluster).submit_array(asked)
    record = sweep.record.with_runs(
        {each.number: got.run.id for each, got in zip(todo, done, strict=True)}
    )
    for each, got in zip(todo, done, strict=True):
        ui.say(f"{each.number}: {by_number[each.number].words}: run {got.run.id}, job {got.job}")
    return record


def _follow(record: SweepRecord, numbers: Collection[int], say: Say) -> None:
    """Until none of these members waits or runs."""
    states: dict[int, str] = {}
    members = [each for each in record.members if each.number in numbers]
    while True:
        runs = [(each, run) for each in members if (run := record.folder_of(each))]
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
    record = sweep.record
    if not new:
        sets = [] if record.rung is None else [f"training.train_iters={record.rung.step}"]
        going_on = ResumeOptions(set=sets, detach=True, include=place.include)
        return plan_resumed_run(sweep.jobs, member.run, going_on)[1]
    sets = record.sets_of(member, sweep.resolved[member.number].job)
    options = TrainOptions(set=sets, detach=True, include=place.include)
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
        self.places = places_of(sweep.member_jobs)[: sweep.table.at_once]
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
            start = _start_of(self.sweep, member, place, new=not each.run)
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
