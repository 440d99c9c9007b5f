"""The tasks about hosts: nodes, doctor, setup-hosts, fleet; and about trainkit's own checkout:
test, bench, docs."""

from __future__ import annotations

from trainkit.cli.options import CLUSTER, HOSTFILE, SetupOptions
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    help={
        "path": "only this file, folder or test; `test PATH` is the same",
        "slow": "run the slow tests too, with more examples of each property",
        "gpu": "only the tests that need a GPU",
        "k": "pytest's -k: only tests whose names match",
        "last-failed": "only tests that failed the last time",
        "torch": "run tests/train, tests/ops or PATH with this release of torch, as 2.15, in"
        " .venv-torch-2.15",
        "no-lint": "skip ruff and mypy (skipped anyway if only some tests run)",
    },
)
def test(
    task: TaskContext,
    path: tuple[str, ...] = (),
    slow: bool = False,
    gpu: bool = False,
    k: str = "",
    last_failed: bool = False,
    torch: str = "",
    no_lint: bool = False,
) -> None:
    """Run ruff, mypy and the tests of this checkout."""
    from trainkit.cli.checkout.test import test as run

    lint = not no_lint
    run(path, slow=slow, gpu=gpu, k=k, last_failed=last_failed, torch=torch, lint=lint)


@make_task(
    help={
        "name": "only benchmarks/NAME.py",
        "list": "list the benchmarks and what they claim",
        "quick": "only what takes a minute",
        "device": "device for benchmarks that support several: cpu or cuda",
    },
    takes_json=True,
)
def bench(
    task: TaskContext, name: str = "", list: bool = False, quick: bool = False, device: str = ""
) -> TaskResult:
    """Run the benchmarks of this checkout, trainkit beside its peers.

    The peers are installed into .venv-bench at the first use. Exit 6 if a benchmark fails.
    """
    from trainkit.cli.checkout.bench import bench as run

    return run(task, name, list_only=list, quick=quick, device=device)


@make_task(
    help={"output": "folder to write (default: site/ of the checkout)"},
    takes_json=True,
)
def docs(task: TaskContext, output: str = "") -> TaskResult:
    """Build the documentation of this checkout as a website (needs the extra `docs`)."""
    from trainkit.cli.checkout.test import docs as run

    return run(task, output)


@make_task(
    help={
        **CLUSTER,
        **HOSTFILE,
        "leave-out": "put these hosts (NAME,NAME) into quarantine, such as slow ones",
        "release": "let these hosts in quarantine (NAME,NAME or all) run again",
        "top": "show what runs on each host: nvidia-smi, neuron-ls or top, once",
    },
    takes_json=True,
)
def nodes(
    task: TaskContext,
    cluster: str = "",
    hostfile: str = "",
    leave_out: str = "",
    release: str = "",
    top: bool = False,
) -> TaskResult:
    """Show which hosts are reachable, busy or in quarantine.

    Exit 7 if a host cannot be used.
    """
    from trainkit.cli.hosts import nodes as room

    if top:
        return room.nodes_top(task, cluster, hostfile)
    if leave_out:
        return room.leave_out(task, cluster, hostfile, leave_out)
    return room.release(task, cluster, release) if release else room.nodes(task, cluster, hostfile)


@make_task(
    help={
        **CLUSTER,
        **HOSTFILE,
        "all-reduce": "also measure all-reduces between pairs of hosts, to find a slow one",
    },
    takes_json=True,
)
def doctor(
    task: TaskContext, cluster: str = "", hostfile: str = "", all_reduce: bool = False
) -> TaskResult:
    """Find problems with the hosts of a cluster, with advice.

    Exit 7 if there is one.
    """
    from trainkit.cli.hosts.doctor import doctor as examine

    return examine(task, cluster, hostfile, all_reduce=all_reduce)


@make_task(options=SetupOptions, takes_json=True, takes_dry_run=True)
def setup_hosts(task: TaskContext, options: SetupOptions) -> TaskResult:
    """Print or run the steps that turn bare machines into a cluster.

    They set up SSH keys, an NFS share and a hostfile, and can be run again at any time. Exit 7 if
    a step fails.
    """
    from trainkit.cli.hosts.setup_hosts import setup_hosts as run

    return run(task, options)


@make_task(
    help={
        "verb": "start, stop or status",
        "cluster": "a cluster of jobs.toml with a fleet (default: that of [defaults].job)",
        "wait": "seconds that start or stop may take",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"wait": 0},
)
def fleet(task: TaskContext, verb: str, cluster: str = "", wait: float = 900.0) -> TaskResult:
    """Start, stop or show the nodes of an AWS ParallelCluster.

    start and stop wait until it is done.
    """
    from trainkit.cli.hosts.setup_hosts import fleet as run

    return run(task, verb, cluster, wait)
