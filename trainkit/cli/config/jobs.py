"""The tasks that look at jobs.toml: jobs, show, check."""

from __future__ import annotations

import json
from collections.abc import Sequence

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config import render_job as look
from trainkit.cli.wrapper import Answer, Talk
from trainkit.jobs.load import Jobs, find_root, load


def load_jobs(talk: Talk) -> Jobs:
    """The jobs.toml at or above the current folder."""
    return load(find_root(talk.folder))


def jobs(talk: Talk) -> Answer:
    """The task `jobs`."""
    loaded = load_jobs(talk)
    if not talk.json:
        look.print_jobs(loaded, talk.console)
    return Answer(look.jobs_document(loaded))


def show(talk: Talk, job: str, explain: str, format: str, sets: Sequence[str]) -> Answer:
    """The task `show`."""
    if format not in ("toml", "json"):
        raise ConfigError(f"--format {format!r} is neither toml nor json")
    resolved = load_jobs(talk).resolve(job, sets)
    if format == "json" and not talk.json:
        talk.say(
            json.dumps(
                look.explain(resolved, explain) if explain else look.show_document(resolved),
                indent=2,
            )
        )
        return Answer({})
    if explain:
        if not talk.json:
            talk.say(look.explain_text(resolved, explain))
        return Answer(look.explain(resolved, explain))
    if not talk.json:
        talk.say(look.show_toml(resolved).rstrip("\n"))
    return Answer(look.show_document(resolved))


def check(talk: Talk) -> Answer:
    """The task `check`. Raises ConfigError with every problem of the file."""
    loaded = load_jobs(talk)
    problems = loaded.check()
    if problems:
        raise ConfigError(problems)
    talk.say(f"{loaded.root / 'jobs.toml'}: {len(loaded.names())} jobs, no problems")
    return Answer(document("check/1", root=str(loaded.root), jobs=loaded.names(), problems=[]))
