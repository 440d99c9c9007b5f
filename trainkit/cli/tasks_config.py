"""The tasks about jobs.toml and the data of its jobs: init, jobs, show, check, plan, scale,
coord-check, graph, data-stats, data-verify."""

from __future__ import annotations

from trainkit.cli.options import (
    DATASET,
    JOB,
    SET,
    CoordCheckOptions,
    PlanOptions,
    ScaleOptions,
    StatsOptions,
)
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    help={
        "text": (
            "files with your text, such as 'corpus/*.jsonl.zst' (a JSON object per line) or"
            " 'books/*.txt'; may be repeated"
        ),
        "vocab-size": "vocabulary size of the tokenizer that is trained on it",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"vocab_size": 257},
)
def init(task: TaskContext, text: tuple[str, ...] = (), vocab_size: int = 4096) -> TaskResult:
    """Write a first jobs.toml: a small model on your own text."""
    from trainkit.cli.config.import_job import init as run

    return run(task, text, vocab_size)


@make_task(takes_json=True)
def jobs(task: TaskContext) -> TaskResult:
    """List the jobs of jobs.toml."""
    from trainkit.cli.config.jobs import jobs as run

    return run(task)


@make_task(
    help={
        **JOB,
        **SET,
        "explain": "show only this key, and every place that sets it",
        "format": "toml or json",
    },
    takes_json=True,
)
def show(
    task: TaskContext,
    job: str,
    explain: str = "",
    format: str = "toml",
    set: tuple[str, ...] = (),
) -> TaskResult:
    """Print a resolved job and where each value comes from."""
    from trainkit.cli.config.jobs import show as run

    return run(task, job, explain, format, set)


@make_task(takes_json=True)
def check(task: TaskContext) -> TaskResult:
    """Check jobs.toml and report all problems at once.

    Every table and every job is checked. Exit 3 if there is a problem.
    """
    from trainkit.cli.config.jobs import check as run

    return run(task)


@make_task(options=PlanOptions, help=JOB, takes_json=True)
def plan(task: TaskContext, job: str, options: PlanOptions) -> TaskResult:
    """Estimate memory, time and disk of a job before it runs.

    Says also what is wrong with the job. Exit 4 if it cannot run as it is.
    """
    from trainkit.cli.config.plan import plan as run

    return run(task, job, options)


@make_task(
    options=ScaleOptions,
    help={"budget": "FLOPs (1e20), dollars ('$500') or '64 gpu-days' ('100 gpu-hours')"},
    takes_json=True,
)
def scale(task: TaskContext, budget: str, options: ScaleOptions) -> TaskResult:
    """Choose a model for a budget, and smaller ones that tell its loss before.

    Depth alone sets a size. The smaller ones are a sweep: `sweep NAME-ladder` trains them, and
    `scaling-law NAME-ladder` fits them. Exit 4 if the big run cannot be as it is.
    """
    from trainkit.cli.config.scale import scale as run

    return run(task, budget, options)


@make_task(options=CoordCheckOptions, help=JOB, takes_json=True)
def coord_check(task: TaskContext, job: str, options: CoordCheckOptions) -> TaskResult:
    """See whether activations grow with the width of a job's model.

    Trains it for 8 steps at several widths, on this machine's CPU and random ids. What stays flat
    lets a learning rate of a narrow model suit a wide one (muP).
    """
    from trainkit.cli.model.coord_check import coord_check as run

    return run(task, job, options)


@make_task(
    help={
        **JOB,
        **SET,
        "svg": "draw it as an .svg file",
        "mermaid": "print it in the words of Mermaid, which documents and websites draw",
    },
    takes_json=True,
)
def graph(
    task: TaskContext, job: str, svg: str = "", mermaid: bool = False, set: tuple[str, ...] = ()
) -> TaskResult:
    """Show the stages of a job: what is fresh, what is stale and because of what.

    The run is at the top; below each thing is what it waits for, with what that makes.
    """
    from trainkit.cli.config.graph import GraphForms, graph as run

    return run(task, job, set, GraphForms(svg, mermaid))


@make_task(
    help={
        "file": "a script, YAML files with a , between, or NeMo's folder conf; KEY=VALUE after a ,",
        "engine": "megatron-lm, gpt-neox, nemo or neuronx-nemo; by default as the file looks",
        "version": "whose options are meant, such as core-0.12.0; by default the newest",
        "name": "of the job, its model and its dataset; by default the file's",
        "cluster": "the [clusters.X] table the job is for",
        "out": "write a file, which `include` of jobs.toml names; by default print",
    },
    takes_json=True,
    name="import",
)
def import_(
    task: TaskContext,
    file: str,
    engine: str = "",
    version: str = "",
    name: str = "",
    cluster: str = "",
    out: str = "",
) -> TaskResult:
    """Turn the configuration of another engine into a job.

    Reads GPT-NeoX's YAML, configurations of NeMo's launcher, and scripts that run Megatron-LM's
    pretrain_gpt.py or are neuronx-nemo-megatron's; of a TrainJob or a JobSet of Kubernetes the
    cluster too. Nothing is run. What it cannot take is listed.
    """
    from trainkit.cli.config.import_job import ImportOptions, import_job

    return import_job(task, ImportOptions(file, engine, version, name, cluster, out))


@make_task(options=StatsOptions, help=DATASET, takes_json=True)
def data_stats(task: TaskContext, dataset: str, options: StatsOptions) -> TaskResult:
    """Show counts, lengths and samples of a prepared dataset."""
    from trainkit.cli.config.data import stats

    return stats(task, dataset, options)


@make_task(
    help={**DATASET, "document": "its trainkit_id, or the `id` that it was published with"},
    takes_json=True,
)
def data_why(task: TaskContext, dataset: str, document: str, job: str = "") -> TaskResult:
    """Say why curation left a document out.

    Names the step, the rule, the value and the limit, and shows the text; of a duplicate also the
    document that was kept. `data-stats DATASET --curation` shows examples of each reason.
    """
    from trainkit.cli.config.data import why

    return why(task, dataset, document, job)


@make_task(help=DATASET, takes_json=True)
def data_verify(task: TaskContext, dataset: str, job: str = "") -> TaskResult:
    """Check a prepared dataset for damage.

    Compares the index with the tokens, and checks token ids, ends of documents and checksums. Exit
    6 if something is wrong; every problem is listed.
    """
    from trainkit.cli.config.data import verify

    return verify(task, dataset, job)
