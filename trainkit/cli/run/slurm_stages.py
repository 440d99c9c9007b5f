"""Stages of `train` that Slurm makes: which they are, what is done of them here before, and the
graph that is submitted with the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.locks import locked
from trainkit.cli.run.attach import follow_run
from trainkit.cli.run.progress import TerminalStageReporter
from trainkit.cli.run.stages import STAGES, agree, bring_up_to_date, term_interrupts
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.schema import Job
from trainkit.launch.slurm.arrays import SlurmPlace, dry_lines, follow, slurm_place_of, split
from trainkit.launch.slurm.job_graph import (
    Followed,
    Graph,
    Part,
    describe_ready,
    ready_script,
    stages_of,
    words_of_stages,
)
from trainkit.launch.slurm.shared_arrays import Asking
from trainkit.runs.event_tail import EventTail
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.stages.contract import Need
from trainkit.stages.execute import (
    begin_need,
    complete_need,
    delete_scratch,
    missing_units,
    stamps_folder,
    wait_for_arrays,
)
from trainkit.stages.in_flight import ArraysInFlight, all_in_flight, clear_in_flight, need_digest
from trainkit.stages.local import execute_locally
from trainkit.stages.stamps import check_freshness, input_identities


@dataclass(frozen=True)
class Queued:
    """What a job needs that Slurm has to make.

    Args:
        needs: stale, and where they are made.
        deferred: stages of which nobody knows what is needed until those are made.
    """

    needs: list[tuple[SlurmPlace, Need]]
    deferred: list[str]


def _queued(task: TaskContext, job: Job, reporter: TerminalStageReporter) -> Queued:
    """Ask each stage in turn what the job needs of it; what is not Slurm's is brought up to date
    at once, under a dry run said."""
    found = Queued([], [])
    for stage in STAGES:
        if {need.stage for _, need in found.needs}.intersection(stage.waits_for(job)):
            found.deferred.append(stage.name)
            continue
        place = slurm_place_of(job, stage.name, task.say)
        stamps = stamps_folder(_root(job), stage.name)
        for need in stage.needs(job, stamps):
            if place is None or check_freshness(need, stamps).fresh:
                bring_up_to_date(task, [need], _root(job), job=job, reporter=reporter)
            else:
                found.needs.append((place, need))
    return found


@contextlib.contextmanager
def graph_of(task: TaskContext, job: Job) -> Iterator[Graph]:
    """What Slurm has to make before `job` can run; all other stages are up to date then. In the
    block the stages' locks are held: submit it there.

    Raises TrainkitError as `update_stage`.
    """
    reporter = TerminalStageReporter(task.console)
    asking = Asking(task.say)
    while True:
        queued = _queued(task, job, reporter)
        if not queued.needs:
            yield Graph(())
            return
        for _, need in queued.needs:
            if need.announcement is not None:
                agree(task, need.announcement)
        with _held(job, queued, reporter):
            if (other := _in_the_way(job, queued, asking)) is None:
                # while it is submitted too: half a graph is taken out again
                with term_interrupts():
                    if parts := [
                        part
                        for place, need in queued.needs
                        if (part := _part(job, place, need, reporter)) is not None
                    ]:
                        yield Graph(tuple(parts), tuple(queued.deferred))
                        return
                continue  # somebody has made them meanwhile: what comes after them may be known now
        need, making = other
        reporter.waiting(need, making.words())
        # without the locks: those jobs need them to say that they are done
        wait_for_arrays(making, asking)


def _root(job: Job) -> Path:
    return Path(job.cluster.root or ".")


@contextlib.contextmanager
def _held(job: Job, queued: Queued, reporter: TerminalStageReporter) -> Iterator[None]:
    """Hold the locks of all queued needs, in an order that is the same for everybody."""
    locks = {(need.stage, need.lock): need for _, need in queued.needs}
    with contextlib.ExitStack() as stack:
        for (stage, lock), need in sorted(locks.items(), key=lambda item: item[0]):

            def waits(holder: dict[str, object], need: Need = need) -> None:
                reporter.waiting(need, f"pid {holder.get('pid', '?')}")

            stack.enter_context(
                locked(
                    stamps_folder(_root(job), stage) / f"{lock}.lock",
                    {"stage": stage, "name": need.name},
                    on_wait=waits,
                )
            )
        yield


def _in_the_way(job: Job, queued: Queued, asking: Asking) -> tuple[Need, ArraysInFlight] | None:
    """A need that cannot begin yet, and another run's arrays that still write into the same
    folders; None where all can begin, or wait for those very arrays.

    Records of arrays that are over are dropped.
    """
    for _, need in queued.needs:
        stamps = stamps_folder(_root(job), need.stage)
        going = []
        for making in all_in_flight(stamps, need.lock):
            if (progress := asking.progress(making)) == "over":
                clear_in_flight(stamps, making.name)
            else:
                going.append((making, progress))
        shared = any(_is_same(making, need) and progress == "going" for making, progress in going)
        if going and not shared:
            return need, going[0][0]
    return None


def _is_same(making: ArraysInFlight, need: Need) -> bool:
    """Whether a run can wait for these arrays: they make the very same, and nobody is taking
    them out."""
    return (
        bool(making.runs)
        and making.name == need.name
        and making.digest == need_digest(need, input_identities(need))
    )


def _part(job: Job, place: SlurmPlace, need: Need, reporter: TerminalStageReporter) -> Part | None:
    """A need as part of the graph, after what only this machine can do of it; None where nothing
    is left for Slurm."""
    stamps = stamps_folder(_root(job), need.stage)
    verdict = check_freshness(need, stamps)
    reporter.verdict(verdict)
    if verdict.fresh:
        delete_scratch(need)
        return None
    shared = next(
        (making for making in all_in_flight(stamps, need.lock) if _is_same(making, need)), None
    )
    if shared is not None:
        return Part(place, need, (), input_identities(need), shared)
    units, inputs = begin_need(need, stamps, verdict)
    here, there = split(units)
    if here:
        reporter.started(need, here)
        try:
            execute_locally(need, here, stamps, reporter, counted=reporter.counted)
        finally:
            reporter.finished(need)
    if not there:
        complete_need(need, stamps, inputs)
        return None
    return Part(place, need, tuple(there), inputs)


def dry_graph(task: TaskContext, job: Job) -> Graph:
    """Say what would be made where, and print the scripts of the graph but for the run's own.
    Nothing is written."""
    reporter = TerminalStageReporter(task.console)
    parts = list[Part]()
    before = None
    queued = _queued(task, job, reporter)
    run = RunFolder(_root(job).absolute() / "runs" / job.name / "RUN")
    for place, need in queued.needs:
        stamps = stamps_folder(_root(job), need.stage)
        reporter.verdict(check_freshness(need, stamps))
        units = missing_units(need, stamps, force=False)
        lines, before = dry_lines(place, need, units, stages_of(run), before)
        for line in lines:
            task.say(f"  {line}")
        if there := split(units)[1]:
            parts.append(Part(place, need, tuple(there), []))
    graph = Graph(tuple(parts), tuple(queued.deferred))
    if parts:
        task.say(f"  would submit {describe_ready(job, graph, before or '')}")
        for line in ready_script(run, job, graph).splitlines():
            task.say(f"    {line}")
    return graph


def follow_graph(task: TaskContext, run: RunFolder, followed: list[Followed]) -> TaskResult:
    """Show how the stages of a run that was just submitted are made, then the run; Ctrl-C only
    ends the following."""
    reporter = TerminalStageReporter(task.console)
    told = [""]

    def tell() -> None:
        if (words := words_of_stages(run)) not in ("", told[-1]):
            told.append(words)
            task.console.print(f"[yellow]{escape(words)}[/]")

    try:
        for each in followed:
            reporter.started(each.part.need, each.part.units)
            try:
                follow(each.ids, each.units, reporter, reporter.counted, task.say, tell)
            finally:
                reporter.finished(each.part.need)
    except KeyboardInterrupt:
        task.say(
            f"run {run.id} goes on; {task.command} attach {run.id} follows it again, {task.command}"
            f" cancel {run.id} stops it"
        )
        return TaskResult(read_run_record(run).to_json(), Exit.INTERRUPTED)
    except TrainkitError as error:  # Slurm could not be asked just now
        task.say(str(error))
    return follow_run(task, run, EventTail(run))
