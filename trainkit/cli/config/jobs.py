"""The tasks about jobs.toml: jobs, show, check."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.render_job import explain_value, find_value, job_as_toml, print_jobs
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.load import Jobs, find_root, load


def load_jobs(task: TaskContext) -> Jobs:
    """The jobs.toml at or above the current folder."""
    return load(find_root(task.folder))


def jobs(task: TaskContext) -> TaskResult:
    """The task `jobs`."""
    loaded = load_jobs(task)
    if not task.json:
        print_jobs(loaded, task.console)
    return TaskResult(
        document(
            "jobs/1",
            root=str(loaded.root),
            default=loaded.default_job,
            jobs=[asdict(job) for job in loaded.describe()],
        )
    )


def show(task: TaskContext, job: str, explain: str, format: str, sets: Sequence[str]) -> TaskResult:
    """The task `show`.

    Args:
        task: how it was called.
        job: its name.
        explain: only this key; "": all.
        format: toml or json.
        sets: overrides, KEY=VALUE.

    Raises:
        ConfigError: another format; as Jobs.resolve; no key `explain`.
    """
    if format not in ("toml", "json"):
        raise ConfigError(f"--format {format!r} is neither toml nor json")
    resolved = load_jobs(task).resolve(job, sets)
    if explain:
        found = find_value(resolved, explain)
        result = TaskResult(
            document("explain/1", job=resolved.job.name, key=explain, **found.to_json())
        )
        text = explain_value(explain, found)
    else:
        result = TaskResult(resolved.to_json())
        text = job_as_toml(resolved).rstrip("\n")
    if task.json:
        return result
    if format == "json":
        text = json.dumps(result.document, indent=2)
    task.say(text)
    return result


def check(task: TaskContext) -> TaskResult:
    """The task `check`. Raises ConfigError with every problem of the file."""
    loaded = load_jobs(task)
    problems = loaded.check()
    if problems:
        raise ConfigError(problems)
    task.say(f"{loaded.root / 'jobs.toml'}: {len(loaded.names())} jobs, no problems")
    return TaskResult(document("check/1", root=str(loaded.root), jobs=loaded.names(), problems=[]))
