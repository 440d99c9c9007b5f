"""The Python API: load jobs, plan, prepare, run, follow, read metrics. docs/python-api.md shows
it; `import trainkit` gives these names."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.experiment.cancel import Cancellation, cancel_run
from trainkit.experiment.follow import POLL_SECONDS, RunFollower
from trainkit.experiment.options import ResumeOptions, TrainOptions
from trainkit.experiment.prepare import PrepareOptions, choose_target, prepare_target
from trainkit.experiment.start import (
    has_finished,
    plan_new_run,
    plan_resumed_run,
    prepare_and_submit,
)
from trainkit.jobs.load import Jobs, find_root, load as load_jobs
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.job_plan import plan_of
from trainkit.launch.preparation import StageUi
from trainkit.launch.scheduler_registry import current
from trainkit.launch.stage_lines import StageLines
from trainkit.plan.planner import Plan
from trainkit.runs.events import EventTail
from trainkit.runs.find import all_runs as all_run_folders, find_run as find_run_folder
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsRow, MetricsTail, read_rows
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.stages.stamps import Freshness

Project = Jobs | Path | str  # a jobs.toml that is loaded, or a folder at or below one
Say = Callable[[str], None]


def _nothing(text: str) -> None:
    """Print nothing."""


def load(path: Path | str = ".") -> Jobs:
    """The jobs of the jobs.toml at `path` or above it. Raises ConfigError (exit 3) where there is
    none, or where it is wrong."""
    return load_jobs(find_root(Path(path).absolute()))


def _jobs(project: Project) -> Jobs:
    return project if isinstance(project, Jobs) else load(project)


def _ui(say: Say) -> StageUi:
    return StageUi(StageLines(say), say)


def plan_job(job: str, *, project: Project = ".", set: Sequence[str] = ()) -> Plan:
    """What a job will need, and what is wrong with it. Nothing is started or written.

    Args:
        job: its name in jobs.toml.
        project: a folder at or below one with a jobs.toml, or its jobs as `load` gives them.
        set: overrides such as "training.lr=1e-3".

    Raises ConfigError (exit 3) for what is wrong with jobs.toml. Objections of the plan are not
    raised: see `Plan.feasible` and `Plan.objections`.
    """
    return plan_of(_jobs(project).resolve(job, set).job)


def prepare(
    job: str = "",
    *,
    dataset: str = "",
    project: Project = ".",
    workers: int | None = None,
    force: bool = False,
    say: Say = _nothing,
) -> list[Freshness]:
    """Prepare the data, the index and the beginning weights of a job, or one dataset; what was
    found of each before.

    Args:
        job: its name in jobs.toml; "" for the job of [defaults].
        dataset: only this dataset.
        project: as of `plan_job`.
        workers: processes that compute at once; None: one a core.
        force: make what is fresh, too.
        say: is called with lines about the progress.

    Raises TrainkitError as a stage does (exit 5 or 6), ConfigError (exit 6) for a large download
    that jobs.toml does not accept.
    """
    jobs = _jobs(project)
    options = PrepareOptions(dataset=dataset, job=job, workers=workers, force=force)
    ui = _ui(say)
    return prepare_target(jobs, choose_target(jobs, options, ui), options, ui).verdicts


@dataclass(frozen=True)
class Run:
    """A run: started just now, or found. It belongs to its folder, not to this process."""

    folder: RunFolder

    @property
    def id(self) -> str:
        return self.folder.id

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.folder.path

    @property
    def job(self) -> Job:
        """The resolved job, as it runs now."""
        return read_job(self.folder.job)

    def status(self) -> RunRecord:
        """How the run is doing, or how it ended: `state`, `step`, `exit`, `root_cause`, ..."""
        return current(read_run_record(self.folder))

    def metrics(self) -> list[MetricsRow]:
        """The rows of metrics.jsonl so far: training steps, and evaluations (key "eval")."""
        return read_rows(self.folder.metrics)

    def follow(
        self,
        on_metrics: Callable[[MetricsRow], None] | None = None,
        on_notice: Say = _nothing,
    ) -> RunRecord:
        """Wait until the run has ended; how it ended. Ctrl-C ends only the waiting.

        Args:
            on_metrics: is called with each new row of metrics.
            on_notice: is called with one line when something happens that a person should know.
        """
        follower = RunFollower(self.folder, EventTail(self.folder, skip_existing=True), on_notice)
        tail = MetricsTail(self.folder.metrics)
        while True:
            ended = follower.poll()
            if on_metrics is not None:
                for row in tail.new_rows():
                    on_metrics(row)
            if ended is not None:
                return ended
            time.sleep(POLL_SECONDS)

    def cancel(
        self, *, save: bool = False, force: bool = False, say: Say = _nothing
    ) -> Cancellation:
        """End the run, and see what is left of it on its hosts.

        Args:
            save: first save at the end of the step; `resume` goes on from there.
            force: hosts that do not answer count as gone.
            say: is called with lines about the progress.

        Raises TrainkitError (exit 13) where the run does not end, or cannot be reached.
        """
        return cancel_run(self.folder, save=save, force=force, say=say)

    def resume(
        self, options: ResumeOptions | None = None, *, project: Project = ".", say: Say = _nothing
    ) -> Run:
        """Go on with the run from its newest valid checkpoint.

        Args:
            options: on which hosts, with what changed.
            project: as of `trainkit.plan_job`.
            say: is called with lines about the progress.

        Raises TrainkitError: 17 where it has not ended, 4 where the plan objects, 5 where its
        samples have changed.
        """
        chosen = replace(options or ResumeOptions(), detach=True)
        record, start = plan_resumed_run(_jobs(project), self.id, chosen)
        if has_finished(record, start.job):
            raise TrainkitError(
                f"run {self.id} has finished: step {record.step}",
                exit=Exit.CONFIG,
                hint='a longer run: ResumeOptions(set=["training.train_iters=..."])',
            )
        prepare_and_submit(start, _ui(say))
        return self


def run(
    job: str, *, project: Project = ".", options: TrainOptions | None = None, say: Say = _nothing
) -> Run:
    """Prepare what is stale, then start a job. Returns as soon as the run is on its way: its
    supervisor, or its place in a scheduler's queue, outlives this process.

    Args:
        job: its name in jobs.toml.
        project: as of `plan_job`.
        options: on which hosts, with which overrides.
        say: is called with lines about the progress.

    Raises TrainkitError, and then leaves no run behind: 3 for what is wrong with jobs.toml or the
    hosts, 4 where the plan objects, 5 or 6 where a stage fails, 17 where the slots are taken.
    """
    chosen = replace(options or TrainOptions(), detach=True)
    jobs = _jobs(project)
    start = plan_new_run(jobs, jobs.resolve(job, chosen.overrides()), chosen)
    return Run(prepare_and_submit(start, _ui(say), no_stages=chosen.no_stages).run)


def find_run(text: str = "last", *, project: Project = ".") -> Run:
    """The run that `text` names: an id, the beginning of one, a job's name (its newest run), or
    "last". Raises ConfigError (exit 3) where there is none or more than one."""
    return Run(find_run_folder(_jobs(project).roots(), text))


def all_runs(*, project: Project = ".") -> list[Run]:
    """All runs, oldest first."""
    return [Run(folder) for folder in all_run_folders(_jobs(project).roots())]
