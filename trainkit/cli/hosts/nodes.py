"""The task `nodes`: which hosts of a cluster can be reached, what runs there, who is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.host_options import HostOptions, hosts_to_ask
from trainkit.cli.run import slurm
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.load import Jobs
from trainkit.launch.cluster_care.remote_commands import run_on_hosts
from trainkit.launch.hosts.hostfile import OVER_SSH, Host, find_hostfile
from trainkit.launch.hosts.quarantine import QuarantineEntry, end_quarantine, read_quarantine
from trainkit.launch.hosts.selection import load_hosts, this_host
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.supervise.orphan_sweep import HostReport, survey_hosts

GIB = 2**30
TOP_SECONDS = 30.0
# by kind of device: what shows the devices and the processes on them once, and how many lines of
# it. neuron-top itself needs a terminal.
TOPS: dict[str, tuple[list[str], int | None]] = {
    "cuda": (["nvidia-smi"], None),
    "neuron": (["neuron-ls", "--wide"], None),
    "cpu": (["top", "-b", "-n", "1", "-w", "160"], 15),
}


def nodes(task: TaskContext, cluster: str, hostfile: str, release_host: str) -> TaskResult:
    """The task `nodes`."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    root = Path(chosen.root or ".")
    if release_host:
        released = [
            host
            for host in (
                list(read_quarantine(root)) if release_host == "all" else release_host.split(",")
            )
            if end_quarantine(root, host)
        ]
        if not released:
            raise ConfigError(
                f"host '{release_host}' is not left out of cluster '{chosen.name}'",
                hint=f"left out: {', '.join(read_quarantine(root)) or 'none'}",
            )
        task.say(f"{', '.join(released)} may run again")
        return TaskResult(document("nodes/1", cluster=chosen.name, released=release_host, hosts=[]))
    HostOptions(hostfile=hostfile).refuse_where_unread(chosen)
    if chosen.launcher == "slurm":
        return slurm.nodes(task, chosen)
    if chosen.launcher in OVER_SSH:
        hosts = load_hosts(find_hostfile(chosen, hostfile))
    else:
        hosts = (this_host(),)
    out = read_quarantine(root)
    reports = survey_hosts(chosen, hosts, root)
    rows = [
        _row(host, report, out.get(host.name.lower()))
        for host, report in zip(hosts, reports, strict=True)
    ]
    if not task.json:
        task.console.print(_table(rows))
    unreachable = sum(not row["reachable"] for row in rows)
    if unreachable:
        task.say(f"{unreachable} of {len(rows)} hosts cannot be used")
    return TaskResult(
        document("nodes/1", cluster=chosen.name, hosts=rows),
        Exit.HEALTH if unreachable else Exit.DONE,
    )


def nodes_top(task: TaskContext, cluster: str, hostfile: str) -> TaskResult:
    """The task `nodes` with --top: what each host's own tool says, once."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    hosts, others, launcher = hosts_to_ask(chosen, hostfile, devices=False)
    argv, lines = TOPS[chosen.device_type]
    rows: list[dict[str, Any]] = [
        {"host": host, "error": why, "text": ""} for host, why in others.items()
    ]
    if hosts:
        for host, said in run_on_hosts(
            chosen, hosts, Path(chosen.root or "."), argv, TOP_SECONDS, launcher=launcher
        ).items():
            if said.error or said.code:
                failed = said.last
            else:
                failed = None
            rows.append(
                {"host": host, "error": failed, "text": "\n".join(said.out.splitlines()[:lines])}
            )
    for row in rows:
        task.say(
            f"== {row['host']}"
            + (f": {row['error']}" if row["error"] else "")
            + (f"\n{row['text']}" if row["text"] else "")
        )
    if chosen.device_type == "neuron":
        task.say("the moving picture: ssh -t HOST neuron-top")
    failures = sum(row["error"] is not None for row in rows)
    return TaskResult(
        document("top/1", cluster=chosen.name, command=argv, hosts=rows),
        Exit.HEALTH if failures else Exit.DONE,
    )


def usual_cluster(task: TaskContext, jobs: Jobs) -> str:
    """The cluster of the job in [defaults]."""
    job = jobs.default_job
    if job is None:
        raise ConfigError(
            "which cluster?", hint="nodes --cluster NAME, or name a job in [defaults]"
        )
    name = jobs.resolve(job).job.cluster.name
    task.say(f"cluster {name}, that of job {job}, named in [defaults]")
    return name


def _row(host: Host, report: HostReport, out: QuarantineEntry | None) -> dict[str, Any]:
    facts = report.facts or HostFacts(node=0)
    busy = [{"slot": slot, **holder} for slot, holder in sorted(facts.slots.items())]
    return {
        "host": host.name,
        "reachable": report.error is None,
        "error": report.error,
        "name": facts.host or None,
        "address": facts.address,
        "cpus": facts.cpus,
        "gpus": list(facts.gpus),
        "disk_free": facts.disk_free,
        "versions": dict(facts.versions),
        "busy": busy,
        "quarantine": vars(out) if out else None,
    }


def _table(rows: list[dict[str, Any]]) -> Listing:
    table = Listing(
        "host",
        "address",
        "cores",
        "GPUs",
        "disk free",
        "busy",
        "state",
        drop=("address", "cores", "disk free", "GPUs"),
    )
    for row in rows:
        runs = list(dict.fromkeys(str(each.get("run", "?")) for each in row["busy"]))
        if row["disk_free"] is None:
            free = ""
        else:
            free = f"{row['disk_free'] / GIB:,.0f} GiB"
        if row["reachable"]:
            state = "[green]reachable[/]"
        else:
            state = f"[red]{escape(str(row['error']))}[/]"
        if row["quarantine"]:
            state += (
                f", [yellow]left out until {row['quarantine']['until']}:"
                f" {escape(row['quarantine']['why'])}[/]"
            )
        if row["gpus"]:
            gpus = f"{len(row['gpus'])}"
        else:
            gpus = "none"
        table.add_row(
            escape(row["host"]),
            str(row["address"] or ""),
            str(row["cpus"] or ""),
            gpus if row["reachable"] else "",
            free,
            ", ".join(runs) or "",
            state,
        )
    return table
