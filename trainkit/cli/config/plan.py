"""The task `plan`: what a job will need, beside what its last run took; exit 4 when it cannot
run."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainkit.base.errors import ConfigError, Exit, Problem
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.engines.registry import refuse_unlaunchable
from trainkit.jobs.schema import Job
from trainkit.launch.job_plan import plan_of


def plan(task: TaskContext, name: str, nodes: int, cluster: str, sets: Sequence[str]) -> TaskResult:
    """The task `plan`."""
    given = [
        *([f"cluster={json.dumps(cluster)}"] if cluster else []),
        *([f"nodes={nodes}"] if nodes else []),
        *sets,
    ]
    jobs = load_jobs(task)
    job = jobs.resolve(name, given).job
    made = plan_of(job)
    if not task.json:
        from rich.markup import escape

        from trainkit.cli.config.render_plan import print_page
        from trainkit.engines.registry import engine_notes

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
    return TaskResult(made.to_json(), Exit.DONE if made.feasible else Exit.PLAN)


def _refused(job: Job) -> list[Problem]:
    """Why this version does not launch the job, though it plans for it; nothing where it does."""
    try:
        refuse_unlaunchable(job)
    except ConfigError as error:
        return list(error.list)
    return []
