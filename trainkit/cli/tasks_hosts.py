"""The tasks about hosts: nodes, doctor, setup-hosts, fleet."""

from __future__ import annotations

from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    help={
        "cluster": "of this cluster of jobs.toml; by default that of the job in [defaults]",
        "hostfile": "another hostfile than the cluster's",
        "release": "let these hosts (NAME,NAME or all) run again, which are left out for a failure",
        "top": "what runs on each: nvidia-smi, neuron-ls or top, once a host",
    },
    takes_json=True,
)
def nodes(
    task: TaskContext, cluster: str = "", hostfile: str = "", release: str = "", top: bool = False
) -> TaskResult:
    """Say which hosts of a cluster can be reached, which runs they are busy with, and which are
    left out."""
    from trainkit.cli.hosts import nodes as looker

    if top:
        return looker.nodes_top(task, cluster, hostfile)
    return looker.nodes(task, cluster, hostfile, release)


@make_task(
    help={
        "cluster": "of this cluster of jobs.toml; by default that of the job in [defaults]",
        "hostfile": "another hostfile than the cluster's",
        "all-reduce": "also measure all-reduces between pairs of hosts: names a slow one",
    },
    takes_json=True,
)
def doctor(
    task: TaskContext, cluster: str = "", hostfile: str = "", all_reduce: bool = False
) -> TaskResult:
    """Look for what is wrong with the hosts of a cluster, with advice; exit 7 if something is."""
    from trainkit.cli.hosts import doctor as examiner

    return examiner.doctor(task, cluster, hostfile, all_reduce=all_reduce)


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
    takes_json=True,
    takes_dry_run=True,
    minimum={"slots": 0},
)
def setup_hosts(
    task: TaskContext,
    cluster: str = "",
    hostfile: str = "",
    host: list[str] | None = None,
    slots: int = 0,
    share: str = "",
    address: str = "",
    perform: bool = False,
) -> TaskResult:
    """Print what bare machines need to become a cluster (keys, NFS, hostfile), or do it; it may
    run again."""
    from trainkit.cli.hosts import setup_hosts as maker

    words = maker.SetupOptions(hostfile, tuple(host or ()), slots, share, address)
    return maker.setup_hosts(task, cluster, words, performing=perform)


@make_task(
    positional=["verb"],
    help={
        "verb": "start, stop or status",
        "cluster": "a cluster of jobs.toml with a fleet; by default that of the job in [defaults]",
        "wait": "seconds until start or stop must be done",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"wait": 0},
)
def fleet(task: TaskContext, verb: str, cluster: str = "", wait: float = 900.0) -> TaskResult:
    """Start or stop the compute nodes of an AWS ParallelCluster and wait until it is done, or
    say how they are."""
    from trainkit.cli.hosts import fleet as keeper

    return keeper.fleet(task, verb, cluster, wait)
