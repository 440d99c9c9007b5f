"""The tasks that look at jobs.toml: jobs, show, check."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config import render_job as look
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.load import Jobs, find_root, load


def load_jobs(task: TaskContext) -> Jobs:
    """The jobs.toml at or above the current folder."""
    return load(find_root(task.folder))


def jobs(task: TaskContext) -> TaskResult:
    """The task `jobs`."""
    loaded = load_jobs(task)
    if not task.json:
        look.print_jobs(loaded, task.console)
    return TaskResult(look.jobs_document(loaded))


def show(task: TaskContext, job: str, explain: str, format: str, sets: Sequence[str]) -> TaskResult:
    """The task `show`."""
    if format not in ("toml", "json"):
        raise ConfigError(f"--format {format!r} is neither toml nor json")
    resolved = load_jobs(task).resolve(job, sets)
    if format == "json" and not task.json:
        task.say(
            json.dumps(
                look.explain(resolved, explain) if explain else look.show_document(resolved),
                indent=2,
            )
        )
        return TaskResult({})
    if explain:
        if not task.json:
            task.say(look.explain_text(resolved, explain))
        return TaskResult(look.explain(resolved, explain))
    if not task.json:
        task.say(look.show_toml(resolved).rstrip("\n"))
    return TaskResult(look.show_document(resolved))


def check(task: TaskContext) -> TaskResult:
    """The task `check`. Raises ConfigError with every problem of the file."""
    loaded = load_jobs(task)
    problems = loaded.check()
    if problems:
        raise ConfigError(problems)
    task.say(f"{loaded.root / 'jobs.toml'}: {len(loaded.names())} jobs, no problems")
    return TaskResult(document("check/1", root=str(loaded.root), jobs=loaded.names(), problems=[]))
