"""The Invoke tasks. Each parses its words and calls one function; what that needs is imported
only then.

A repository of your own gets them with one line in its tasks.py: `from trainkit.cli.tasks import
namespace`.
"""

from __future__ import annotations

from invoke.collection import Collection

from trainkit.cli.help_texts import DATASET, FORCE, HOSTS, JOB, RUN, SET
from trainkit.cli.tasks_model import checkpoints, clean, evaluate, export, generate, replay
from trainkit.cli.wrapper import Answer, Talk, make_task


@make_task(
    iterable=["text"],
    help={
        "text": (
            "your text, such as 'corpus/*.jsonl.zst' (one JSON object a line) or 'books/*.txt'; may"
            " be repeated"
        ),
        "vocab-size": "ids of the tokenizer that is trained on it",
    },
    reports=True,
    dry=True,
    at_least={"vocab_size": 257},
)
def init(talk: Talk, text: list[str] | None = None, vocab_size: int = 4096) -> Answer:
    """Write the first jobs.toml of this folder: a small model on text of your own."""
    from trainkit.cli import init as beginner

    return beginner.init(talk, text or [], vocab_size)


@make_task(reports=True)
def jobs(talk: Talk) -> Answer:
    """List the jobs of jobs.toml."""
    from trainkit.cli.config import jobs as lister

    return lister.jobs(talk)


@make_task(
    positional=["job"],
    iterable=["set"],
    help={
        **JOB,
        **SET,
        "explain": "say where this one key's value comes from",
        "format": "toml or json",
    },
    reports=True,
)
def show(
    talk: Talk, job: str, explain: str = "", format: str = "toml", set: list[str] | None = None
) -> Answer:
    """Print a resolved job with the origin of every value."""
    from trainkit.cli.config import jobs as lister

    return lister.show(talk, job, explain, format, set or [])


@make_task(reports=True)
def check(talk: Talk) -> Answer:
    """Check every table and every job of jobs.toml, all problems at once."""
    from trainkit.cli.config import jobs as lister

    return lister.check(talk)


@make_task(
    positional=["job"],
    iterable=["set"],
    help={
        **JOB,
        **SET,
        "nodes": "on so many nodes; 0: as the job says",
        "cluster": "on this cluster of jobs.toml",
    },
    reports=True,
    at_least={"nodes": 0},
)
def plan(
    talk: Talk, job: str, nodes: int = 0, cluster: str = "", set: list[str] | None = None
) -> Answer:
    """Say what a job will need and what is wrong with it, before anything runs; exit 4 when it
    cannot."""
    from trainkit.cli.config import plan as planner

    return planner.plan(talk, job, nodes, cluster, set or [])


@make_task(help=FORCE, reports=True, dry=True)
def build(talk: Talk, force: bool = False) -> Answer:
    """Compile the C++ extensions if their source changed."""
    from trainkit.cli.run import stages as prepare

    return prepare.build(talk, force=force)


@make_task(
    help={
        "dataset": "a dataset of jobs.toml (with the tokenizer of its table)",
        "job": "prepare what this job needs",
        "cluster": "with --dataset: below the root of this cluster; by default below this folder",
        "workers": "processes that compute at once; 0: one a core",
        **FORCE,
    },
    reports=True,
    dry=True,
    at_least={"workers": 0},
)
def prep_data(
    talk: Talk,
    dataset: str = "",
    job: str = "",
    cluster: str = "",
    workers: int = 0,
    force: bool = False,
) -> Answer:
    """Turn text into tokens; without words, for the job named in [defaults]."""
    from trainkit.cli.run import stages as prepare

    return prepare.prep_data(talk, dataset, job, cluster, workers, force=force)


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
    reports=True,
    at_least={"samples": 0, "seed": 0},
)
def data_stats(
    talk: Talk,
    dataset: str,
    job: str = "",
    count_only: bool = False,
    samples: int = 3,
    seed: int = 1234,
    picture: str = "",
) -> Answer:
    """Say what is in a prepared dataset: documents, tokens, lengths, the most frequent tokens,
    some documents."""
    from trainkit.cli.config import data

    return data.stats(
        talk, dataset, job, count_only=count_only, samples=samples, seed=seed, picture=picture
    )


@make_task(positional=["dataset"], help=DATASET, reports=True)
def data_verify(talk: Talk, dataset: str, job: str = "") -> Answer:
    """Check a prepared dataset: index against tokens, ids, ends of documents, checksums; exit 6
    with all that is wrong."""
    from trainkit.cli.config import data

    return data.verify(talk, dataset, job)


@make_task(
    positional=["job"],
    iterable=["set"],
    help={**JOB, **SET, **HOSTS, "no-stages": "fail (exit 5) instead of preparing what is stale"},
    reports=True,
    dry=True,
    at_least={"nodes": 0},
)
def train(
    talk: Talk,
    job: str,
    set: list[str] | None = None,
    no_stages: bool = False,
    cluster: str = "",
    nodes: int = 0,
    hostfile: str = "",
    include: str = "",
    exclude: str = "",
    detach: bool = False,
    foreground: bool = False,
    share: bool = False,
    existing: bool = False,
) -> Answer:
    """Prepare what is stale, then train a job and follow it."""
    from trainkit.cli.host_options import HostWords
    from trainkit.cli.run import train as run

    hosts = HostWords(cluster, nodes, hostfile, include, exclude, existing)
    following = run.Following(detach, foreground)
    return run.train(
        talk, job, set or [], stages=not no_stages, share=share, words=hosts, following=following
    )


@make_task(
    positional=["run"],
    iterable=["set"],
    help={
        **RUN,
        **HOSTS,
        "set": "a.b=value: change the number of ranks, intervals or length; may be repeated",
        "code": "run: the code that the run began with; current: that of this checkout",
    },
    reports=True,
    dry=True,
    at_least={"nodes": 0},
)
def resume(
    talk: Talk,
    run: str,
    set: list[str] | None = None,
    cluster: str = "",
    nodes: int = 0,
    hostfile: str = "",
    include: str = "",
    exclude: str = "",
    detach: bool = False,
    foreground: bool = False,
    share: bool = False,
    existing: bool = False,
    code: str = "run",
) -> Answer:
    """Go on with a run from its newest valid checkpoint, on the same or on other hosts."""
    from trainkit.cli.host_options import HostWords
    from trainkit.cli.run import train as runner

    hosts = HostWords(cluster, nodes, hostfile, include, exclude, existing)
    following = runner.Following(detach, foreground)
    return runner.resume(
        talk, run, set or [], share=share, words=hosts, following=following, code=code
    )


@make_task(positional=["run"], help=RUN, reports=True)
def attach(talk: Talk, run: str) -> Answer:
    """Follow a run to its end, from any terminal; the exit code is the run's."""
    from trainkit.cli.run import attach as attacher

    return attacher.attach(talk, run)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "save": "first save at the end of the step; it can go on from there",
        "force": (
            "where its supervisor is gone: take hosts that do not answer for gone too, so that it"
            " can be resumed"
        ),
    },
    reports=True,
)
def cancel(talk: Talk, run: str, save: bool = False, force: bool = False) -> Answer:
    """Stop a run, and ask every node what is left of it; exit 15, 12 with --save, 13 if a node
    does not answer."""
    from trainkit.cli.run import cancel as canceller

    return canceller.cancel(talk, run, save=save, force=force)


@make_task(
    help={
        "job": "only this job's",
        "table": (
            "what each achieved: nodes, tokens/s, TFLOP/s of a device (medians), memory of a rank"
        ),
        "flops": (
            "in the table also TFLOP/s as others count them: megatron-2021, palm-6n or"
            " gpt-neox-2022"
        ),
    },
    reports=True,
)
def runs(talk: Talk, job: str = "", table: bool = False, flops: str = "") -> Answer:
    """List runs, oldest first."""
    from trainkit.cli.inspect import runs as follow

    return follow.runs(talk, job, table=table, flops=flops)


@make_task(
    positional=["run"],
    help={**RUN, "watch": "again every two seconds, until the run has ended"},
    reports=True,
)
def status(talk: Talk, run: str, watch: bool = False) -> Answer:
    """Say how a run is doing, or how it ended and what to do next."""
    from trainkit.cli.inspect import runs as follow

    return follow.status(talk, run, watch=watch)


@make_task(
    positional=["run"],
    help={**RUN, "attempt": "of this attempt; 0: the newest that failed"},
    reports=True,
    at_least={"attempt": 0},
)
def why(talk: Talk, run: str, attempt: int = 0) -> Answer:
    """Say which rank failed first, on which host, how, and what to do about it."""
    from trainkit.cli.inspect import why as asker

    return asker.why(talk, run, attempt)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "rank": "whose log: 3, or 0,8-15, or failed",
        "node": "of the ranks on this host",
        "attempt": "which attempt; 0: the newest",
        "follow": "go on printing until the run ends",
        "lines": "how many of the last lines; 0: all",
    },
    reports=True,
    at_least={"attempt": 0, "lines": 0},
)
def logs(
    talk: Talk,
    run: str,
    rank: str = "",
    node: str = "",
    attempt: int = 0,
    follow: bool = False,
    lines: int = 50,
) -> Answer:
    """Print the logs of ranks; by default that of rank 0."""
    from trainkit.cli.inspect import logs as reader

    return reader.logs(talk, run, rank, node, attempt, follow=follow, lines=lines)


@make_task(
    help={
        "cluster": "of this cluster of jobs.toml; by default that of the job in [defaults]",
        "hostfile": "another hostfile than the cluster's",
        "release": "let these hosts (NAME,NAME or all) run again, which are left out for a failure",
        "top": "what runs on each: nvidia-smi, neuron-ls or top, once a host",
    },
    reports=True,
)
def nodes(
    talk: Talk, cluster: str = "", hostfile: str = "", release: str = "", top: bool = False
) -> Answer:
    """Say which hosts of a cluster can be reached, which runs they are busy with, and which are
    left out."""
    from trainkit.cli.hosts import nodes as looker

    if top:
        return looker.nodes_top(talk, cluster, hostfile)
    return looker.nodes(talk, cluster, hostfile, release)


@make_task(
    help={
        "cluster": "of this cluster of jobs.toml; by default that of the job in [defaults]",
        "hostfile": "another hostfile than the cluster's",
        "all-reduce": "also measure all-reduces between pairs of hosts: names a slow one",
    },
    reports=True,
)
def doctor(talk: Talk, cluster: str = "", hostfile: str = "", all_reduce: bool = False) -> Answer:
    """Look for what is wrong with the hosts of a cluster, with advice; exit 7 if something is."""
    from trainkit.cli.hosts import doctor as examiner

    return examiner.doctor(talk, cluster, hostfile, all_reduce=all_reduce)


@make_task(
    iterable=["host"],
    help={
        "cluster": (
            "a cluster of jobs.toml with launcher ssh or pdsh; by default that of the job in"
            " [defaults]"
        ),
        "hostfile": "the hosts of this file; with --host: the file to write",
        "host": (
            "[user@]host[:port] of a node, for a hostfile that is not there yet; may be repeated"
        ),
        "slots": "ranks of a node in that hostfile; 0: as the cluster says",
        "share": (
            "export this folder of this machine over NFS, and mount it on the hosts under the same"
            " path"
        ),
        "address": "this machine's address, as the hosts reach it",
        "perform": "do it; else it is only printed",
    },
    reports=True,
    dry=True,
    at_least={"slots": 0},
)
def setup_hosts(
    talk: Talk,
    cluster: str = "",
    hostfile: str = "",
    host: list[str] | None = None,
    slots: int = 0,
    share: str = "",
    address: str = "",
    perform: bool = False,
) -> Answer:
    """Print what bare machines need to become a cluster (keys, NFS, hostfile), or do it; it may
    run again."""
    from trainkit.cli.hosts import setup_hosts as maker

    words = maker.SetupWords(hostfile, tuple(host or ()), slots, share, address)
    return maker.setup_hosts(talk, cluster, words, performing=perform)


@make_task(
    positional=["verb"],
    help={
        "verb": "start, stop or status",
        "cluster": "a cluster of jobs.toml with a fleet; by default that of the job in [defaults]",
        "wait": "seconds until start or stop must be done",
    },
    reports=True,
    dry=True,
    at_least={"wait": 0},
)
def fleet(talk: Talk, verb: str, cluster: str = "", wait: float = 900.0) -> Answer:
    """Start or stop the compute nodes of an AWS ParallelCluster and wait until it is done, or
    say how they are."""
    from trainkit.cli.hosts import fleet as keeper

    return keeper.fleet(talk, verb, cluster, wait)


@make_task(help={"run": "only this run", "port": "the port to listen on"}, dry=True)
def tensorboard(talk: Talk, run: str = "", port: int = 6006) -> None:
    """Open TensorBoard over all runs."""
    from trainkit.cli.inspect import runs as follow

    follow.tensorboard(talk, run, port)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "picture": "also draw the loss curve into this .svg or .png (needs the extra `report`)",
        "flops": "also TFLOP/s as others count them: megatron-2021, palm-6n or gpt-neox-2022",
    },
    reports=True,
)
def report(talk: Talk, run: str, picture: str = "", flops: str = "") -> Answer:
    """Sum a run up: losses, speed, attempts, where everything lies."""
    from trainkit.cli.inspect import runs as follow

    return follow.report(talk, run, picture, flops)


@make_task(
    iterable=["path"],
    help={
        "path": "only this file, folder or test of the checkout; `test PATH` is the same",
        "slow": "the slow tests too, and more examples of each property",
        "k": "pytest's -k: only tests whose names match",
        "last-failed": "only what failed the last time",
        "no-lint": "no ruff and no mypy before pytest; nor are they run for a part of the tests",
    },
)
def test(
    talk: Talk,
    path: list[str] | None = None,
    slow: bool = False,
    k: str = "",
    last_failed: bool = False,
    no_lint: bool = False,
) -> None:
    """Run ruff, the type checker and the tests of this checkout."""
    from trainkit.cli.checkout import test as project

    project.test(path or [], slow=slow, k=k, last_failed=last_failed, lint=not no_lint)


@make_task(
    help={
        "name": "only benchmarks/NAME.py",
        "list": "say which there are and what they claim",
        "quick": "what can be done in a minute",
        "device": "what the benchmarks that know several run on: cpu or cuda",
    },
    reports=True,
)
def bench(
    talk: Talk, name: str = "", list: bool = False, quick: bool = False, device: str = ""
) -> Answer:
    """Measure trainkit beside its peers (in .venv-bench, made at the first use)."""
    from trainkit.cli.checkout import bench as runner

    return runner.bench(talk, name, listing=list, quick=quick, device=device)


namespace = Collection(
    *(
        init,
        jobs,
        show,
        check,
        plan,
        build,
        prep_data,
        data_stats,
        data_verify,
        train,
        resume,
        attach,
        cancel,
    ),
    *(runs, status, why, logs, nodes, doctor, setup_hosts, fleet, checkpoints, replay),
    *(tensorboard, report, generate, evaluate, export, clean, test, bench),
)
