"""The task `precompile` of engine native: the stage, and what it made in numbers."""

from __future__ import annotations

from pathlib import Path

from trainkit.base.documents import document, read_document
from trainkit.cli.run.stages import bring_up_to_date, stage_ui
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import refuse_unlaunchable
from trainkit.experiment.options import TrainOptions
from trainkit.jobs.load import Jobs
from trainkit.launch.scheduler_registry import preparation_for
from trainkit.stages.execute import needs_in_turn
from trainkit.stages.precompile import PrecompileStage
from trainkit.stages.precompile import prune as prune_graphs
from trainkit.stages.registry import STAGES
from trainkit.train.compiled_graphs import SCHEMA, GraphFiles

BEFORE = ("build", "build-container", "prep-data")  # stages that say what is compiled


def compile_graphs(
    task: TaskContext, jobs: Jobs, name: str, options: TrainOptions, *, force: bool, prune: bool
) -> TaskResult:
    """Make the graphs of a job, and say what that took.

    Args:
        task: how the task speaks.
        jobs: those of a jobs.toml.
        name: of the job.
        options: what is set otherwise than in jobs.toml.
        force: also where they are fresh.
        prune: delete the oldest graphs of other jobs.
    """
    job = jobs.resolve(name, [*options.overrides(), *options.set]).job
    refuse_unlaunchable(job)
    root = Path(job.cluster.root or ".")
    before = [stage for stage in STAGES if stage.name in BEFORE]
    own = (PrecompileStage(),)
    preparation = preparation_for(job, root, stage_ui(task), force=force)
    if task.dry_run:
        bring_up_to_date(task, needs_in_turn(job, before), root)
        verdicts = preparation.show(needs_in_turn(job, own))
    else:
        preparation_for(job, root, stage_ui(task)).make(needs_in_turn(job, before))
        verdicts = preparation.make(needs_in_turn(job, own))
    values: dict[str, object] = {"job": name, "fresh": verdicts[0].fresh}
    if not task.dry_run:
        values |= _numbers(task, GraphFiles.of(job), fresh=verdicts[0].fresh)
    if prune and not task.dry_run:
        for folder, size in prune_graphs(root, [name]):
            task.say(f"deleted {folder} ({size / 1e6:,.1f} MB)")
    return TaskResult(document("precompile/1", because=verdicts[0].because, **values))


def _numbers(task: TaskContext, files: GraphFiles, *, fresh: bool) -> dict[str, object]:
    """What is in the record of the graphs, said and returned."""
    record = read_document(files.record, SCHEMA)
    ranks = record["ranks"]
    total = sum(each["hits"] + each["misses"] for each in ranks)
    made = sum(each["misses"] for each in ranks)
    compiled = 0 if fresh else made
    seconds = record["seconds"]
    each_seconds = seconds / max(1, made)
    saved = seconds if fresh else 0.0
    task.say(
        f"total graphs {total}, compiled {compiled}, from cache {total - compiled}, failed 0;"
        f" {each_seconds:.1f} s each, {saved:.1f} s saved; {files.archive}"
    )
    return {
        "graphs": total,
        "compiled": compiled,
        "from_cache": total - compiled,
        "failed": 0,
        "seconds": seconds,
        "seconds_each": round(each_seconds, 3),
        "seconds_saved": saved,
        "archive": str(files.archive),
    }
