"""Stages of `train` that Slurm makes: which they are, what this machine does of them before, and
the graph that is submitted with the run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.schema import Job
from trainkit.launch.array_units import split_units
from trainkit.launch.preparation import Notice, Preparation, StageUi, term_interrupts
from trainkit.launch.slurm.array_scripts import ArrayPlace
from trainkit.launch.slurm.arrays import (
    array_place,
    describe_arrays,
    follow_arrays,
)
from trainkit.launch.slurm.job_graph import (
    GraphPart,
    StageGraph,
    SubmittedArrays,
    describe_active_job,
    describe_finish_job,
    finish_job_script,
    stages_folder,
)
from trainkit.launch.slurm.shared_arrays import SharedArrayStatus
from trainkit.runs.folder import RunFolder
from trainkit.stages.contract import Need
from trainkit.stages.execute import (
    StageReporter,
    StageWork,
    begin_need,
    complete_need,
    delete_scratch,
    missing_units,
    stage_lock,
    stamps_folder,
    wait_for_arrays,
)
from trainkit.stages.in_flight import ArraysInFlight, all_in_flight, clear_in_flight, need_digest
from trainkit.stages.stamps import check_freshness, file_identities
from trainkit.stages.unit_process import execute_locally


@dataclass(frozen=True)
class SlurmNeeds:
    """What a job needs that Slurm has to make.

    Args:
        needs: stale, and where they are made.
        deferred: stages of which nobody knows what is needed until those are made.
    """

    needs: list[tuple[ArrayPlace, Need]]
    deferred: list[str]


def _slurm_needs(job: Job, preparation: Preparation, *, dry_run: bool) -> SlurmNeeds:
    """Ask each stage in turn what the job needs of it. What is not Slurm's is brought up to date
    at once, or shown."""
    # only what submits asks: no supervisor imports the stages
    from trainkit.stages.registry import STAGES

    found = SlurmNeeds([], [])
    others = preparation.show if dry_run else preparation.make
    for stage in STAGES:
        if {need.stage for _, need in found.needs}.intersection(stage.waits_for(job)):
            found.deferred.append(stage.name)
            continue
        place = array_place(job, stage.name, preparation.ui.say)
        stamps = stamps_folder(preparation.root, stage.name)
        for need in stage.needs(job, stamps):
            if place is None or check_freshness(need, stamps).fresh:
                others([need])
            else:
                found.needs.append((place, need))
    return found


@contextlib.contextmanager
def hold_stage_graph(job: Job, preparation: Preparation) -> Iterator[StageGraph]:
    """What Slurm has to make before `job` can run; all other stages are up to date then. In the
    block the stages' locks are held: submit it there.

    Raises TrainkitError as `update_stage`.
    """
    ui = preparation.ui
    array_status = SharedArrayStatus(ui.say)
    while True:
        queued = _slurm_needs(job, preparation, dry_run=False)
        if not queued.needs:
            yield StageGraph(())
            return
        for _, need in queued.needs:
            if need.announcement is not None:
                ui.agree(need.announcement)
        with _held(job, queued, ui.reporter):
            if (other := _in_the_way(job, queued, array_status)) is None:
                # while it is submitted too: half a graph is withdrawn again
                with term_interrupts():
                    parts = tuple(
                        part
                        for place, need in queued.needs
                        if (part := _part(job, place, need, ui)) is not None
                    )
                    if parts:
                        yield StageGraph(parts, tuple(queued.deferred))
                        return
                # another run has made them meanwhile: what comes after may be known now
                continue
        need, arrays = other
        ui.reporter.waiting(need, arrays.words())
        # without the locks: those jobs need them to say that they are done
        wait_for_arrays(arrays, array_status)


@contextlib.contextmanager
def _held(job: Job, queued: SlurmNeeds, reporter: StageReporter) -> Iterator[None]:
    """Hold the locks of all queued needs, in an order that is the same for everybody."""
    needs = {(need.stage, need.lock): need for _, need in queued.needs}
    with contextlib.ExitStack() as stack:
        for (stage, _), need in sorted(needs.items(), key=lambda item: item[0]):
            stamps = stamps_folder(job.cluster.root_folder, stage)
            stack.enter_context(stage_lock(need, stamps, reporter))
        yield


def _in_the_way(
    job: Job, queued: SlurmNeeds, array_status: SharedArrayStatus
) -> tuple[Need, ArraysInFlight] | None:
    """A need that cannot begin yet, and another run's arrays that still write into the same
    folders; None where all can begin, or wait for those very arrays.

    Records of arrays that are over are dropped.
    """
    for _, need in queued.needs:
        stamps = stamps_folder(job.cluster.root_folder, need.stage)
        going = []
        for arrays in all_in_flight(stamps, need.lock):
            if (progress := array_status.progress(arrays)) == "over":
                clear_in_flight(stamps, arrays.name)
            else:
                going.append((arrays, progress))
        shared = any(_is_same(arrays, need) and progress == "going" for arrays, progress in going)
        if going and not shared:
            return need, going[0][0]
    return None


def _is_same(arrays: ArraysInFlight, need: Need) -> bool:
    """Whether a run can wait for these arrays: they make the very same, and nobody is taking
    them out."""
    return (
        bool(arrays.runs)
        and arrays.name == need.name
        and arrays.digest == need_digest(need, file_identities(need.inputs))
    )


def _part(job: Job, place: ArrayPlace, need: Need, ui: StageUi) -> GraphPart | None:
    """A need as part of the graph, after what only this machine can do of it; None where nothing
    is left for Slurm."""
    reporter = ui.reporter
    stamps = stamps_folder(job.cluster.root_folder, need.stage)
    verdict = check_freshness(need, stamps)
    reporter.verdict(verdict)
    if verdict.fresh:
        delete_scratch(need)
        return None
    shared = next(
        (arrays for arrays in all_in_flight(stamps, need.lock) if _is_same(arrays, need)), None
    )
    if shared is not None:
        return GraphPart(place, need, (), file_identities(need.inputs), shared)
    units, inputs = begin_need(need, stamps, verdict)
    here, there = split_units(units, in_image=place.box is not None)
    if here:
        reporter.started(need, here)
        try:
            execute_locally(StageWork(need, here, stamps, reporter))
        finally:
            reporter.finished(need)
    if not there:
        complete_need(need, stamps, inputs)
        return None
    return GraphPart(place, need, tuple(there), inputs)


def show_stage_graph(job: Job, preparation: Preparation) -> StageGraph:
    """Say what would be made where, and print the scripts of the graph but for the run's own.
    Nothing is written."""
    ui = preparation.ui
    parts = list[GraphPart]()
    before = None
    queued = _slurm_needs(job, preparation, dry_run=True)
    run = RunFolder(job.cluster.root_folder.absolute() / "runs" / job.name / "RUN")
    for place, need in queued.needs:
        stamps = stamps_folder(job.cluster.root_folder, need.stage)
        ui.reporter.verdict(check_freshness(need, stamps))
        units = missing_units(need, stamps, force=False)
        lines, before = describe_arrays(place, need, units, stages_folder(run), before)
        for line in lines:
            ui.say(f"  {line}")
        if there := split_units(units, in_image=place.box is not None)[1]:
            parts.append(GraphPart(place, need, tuple(there), []))
    graph = StageGraph(tuple(parts), tuple(queued.deferred))
    if parts:
        ui.say(f"  would submit {describe_finish_job(job, graph, before or '')}")
        for line in finish_job_script(run, job, graph).splitlines():
            ui.say(f"    {line}")
    return graph


class ArrayFollower:
    """Follows the arrays of a run that was just submitted.

    Args:
        run: the run.
        followed: its arrays in order.
    """

    def __init__(self, run: RunFolder, followed: list[SubmittedArrays]) -> None:
        self.run = run
        self.followed = followed
        self._last = ""

    def follow(self, ui: StageUi, on_waiting: Notice) -> None:
        def look() -> None:
            at_work = describe_active_job(self.run)
            if at_work not in ("", self._last):
                self._last = at_work
                on_waiting(at_work)

        for each in self.followed:
            ui.reporter.started(each.part.need, each.part.units)
            try:
                follow_arrays(each.ids, each.units, ui.reporter, ui.say, look)
            finally:
                ui.reporter.finished(each.part.need)
