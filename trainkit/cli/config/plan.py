"""The task `plan`: what a job will need, beside what its last run took; exit 4 when it cannot
run, 18 when that is not known yet."""

from __future__ import annotations

from trainkit.base.errors import ConfigError, Problem
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.config.plan_options import asked_nodes, overrides, usage
from trainkit.cli.options import PlanOptions
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import refuse_unlaunchable
from trainkit.jobs.schema import Job
from trainkit.launch.job_plan import plan_of

EXPLAINED = "time"


def plan(task: TaskContext, name: str, options: PlanOptions) -> TaskResult:
    """The task `plan`.

    Raises TrainkitError (exit 1): options that do not go together.
    """
    nodes = asked_nodes(options)
    if options.explain not in ("", EXPLAINED):
        raise usage(f"--explain '{options.explain}': only '{EXPLAINED}' is explained")
    if options.search:
        from trainkit.cli.config.plan_search import plan_search

        return plan_search(task, name, options, nodes)
    if options.write or options.price_per_gpu_hour or options.picture:
        raise usage("--write, --picture and --price-per-gpu-hour are options of --search")
    if len(nodes) > 1:
        raise usage(f"--nodes {options.nodes}: a range goes with --search; give one number")
    jobs = load_jobs(task)
    job = jobs.resolve(name, overrides(options, nodes)).job
    made = plan_of(job)
    if not task.json:
        from rich.markup import escape

        from trainkit.cli.config.render_plan import print_page
        from trainkit.cli.config.render_time import print_terms
        from trainkit.engines.registry import engine_notes

        if options.explain:
            print_terms(task.console, made)
            return TaskResult(made.to_json(), made.exit)
        print_page(
            task.console,
            job,
            made,
            task.command,
            refused=_refused(job),
            engine=job.engine_source or jobs.engine(job.engine),
        )
        for said in engine_notes(job):
            task.console.print(f"[yellow]note[/] {escape(said)}")
    return TaskResult(made.to_json(), made.exit)


def _refused(job: Job) -> list[Problem]:
    """Why this version does not launch the job, though it plans for it; nothing where it does."""
    try:
        refuse_unlaunchable(job)
    except ConfigError as error:
        return list(error.list)
    return []
