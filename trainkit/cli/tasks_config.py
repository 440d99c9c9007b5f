"""The tasks about jobs.toml and the data of its jobs: init, jobs, show, check, plan, data-stats,
data-verify."""

from __future__ import annotations

from trainkit.cli.help_texts import DATASET, JOB, SET
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    iterable=["text"],
    help={
        "text": (
            "your text, such as 'corpus/*.jsonl.zst' (one JSON object a line) or 'books/*.txt'; may"
            " be repeated"
        ),
        "vocab-size": "ids of the tokenizer that is trained on it",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"vocab_size": 257},
)
def init(task: TaskContext, text: list[str] | None = None, vocab_size: int = 4096) -> TaskResult:
    """Write the first jobs.toml of this folder: a small model on text of your own."""
    from trainkit.cli import init as beginner

    return beginner.init(task, text or [], vocab_size)


@make_task(takes_json=True)
def jobs(task: TaskContext) -> TaskResult:
    """List the jobs of jobs.toml."""
    from trainkit.cli.config import jobs as lister

    return lister.jobs(task)


@make_task(
    positional=["job"],
    iterable=["set"],
    help={
        **JOB,
        **SET,
        "explain": "say where this one key's value comes from",
        "format": "toml or json",
    },
    takes_json=True,
)
def show(
    task: TaskContext,
    job: str,
    explain: str = "",
    format: str = "toml",
    set: list[str] | None = None,
) -> TaskResult:
    """Print a resolved job with the origin of every value."""
    from trainkit.cli.config import jobs as lister

    return lister.show(task, job, explain, format, set or [])


@make_task(takes_json=True)
def check(task: TaskContext) -> TaskResult:
    """Check every table and every job of jobs.toml, all problems at once."""
    from trainkit.cli.config import jobs as lister

    return lister.check(task)


@make_task(
    positional=["job"],
    iterable=["set"],
    help={
        **JOB,
        **SET,
        "nodes": "on so many nodes; 0: as the job says",
        "cluster": "on this cluster of jobs.toml",
    },
    takes_json=True,
    minimum={"nodes": 0},
)
def plan(
    task: TaskContext, job: str, nodes: int = 0, cluster: str = "", set: list[str] | None = None
) -> TaskResult:
    """Say what a job will need and what is wrong with it, before anything runs; exit 4 when it
    cannot."""
    from trainkit.cli.config import plan as planner

    return planner.plan(task, job, nodes, cluster, set or [])


@make_task(
    positional=["dataset"],
    help={
        **DATASET,
        "count-only": "only documents, sequences and tokens, from the index alone",
        "samples": "documents to show the beginnings of",
        "seed": "of their choice",
        "picture": (
            "also draw lengths and frequencies into this .svg or .png (needs the extra `report`)"
        ),
    },
    takes_json=True,
    minimum={"samples": 0, "seed": 0},
)
def data_stats(
    task: TaskContext,
    dataset: str,
    job: str = "",
    count_only: bool = False,
    samples: int = 3,
    seed: int = 1234,
    picture: str = "",
) -> TaskResult:
    """Say what is in a prepared dataset: documents, tokens, lengths, the most frequent tokens,
    some documents."""
    from trainkit.cli.config import data

    return data.stats(
        task, dataset, job, count_only=count_only, samples=samples, seed=seed, picture=picture
    )


@make_task(positional=["dataset"], help=DATASET, takes_json=True)
def data_verify(task: TaskContext, dataset: str, job: str = "") -> TaskResult:
    """Check a prepared dataset: index against tokens, ids, ends of documents, checksums; exit 6
    with all that is wrong."""
    from trainkit.cli.config import data

    return data.verify(task, dataset, job)
