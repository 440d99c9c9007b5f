"""The task `nodes`: which hosts of a cluster are reachable, busy or in quarantine; with --top what
runs on them.

What neuron-top shows of a host without its terminal is one report of neuron-monitor, in lines.
neuron-monitor prints a JSON object a line, the first after its period of 5 s: AWS Neuron's "Neuron
Monitor User Guide"."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import asdict, dataclass, replace
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.host_options import hosts_to_ask, named
from trainkit.cli.tables import GIB, Listing, Page, gib
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.hosts import refuse_unread_options
from trainkit.experiment.options import HostOptions
from trainkit.jobs.load import Jobs
from trainkit.jobs.schema import Cluster
from trainkit.launch.cluster_care.remote_commands import run_on_hosts
from trainkit.launch.hosts.hostfile import Host
from trainkit.launch.hosts.quarantine import (
    QuarantineEntry,
    end_quarantine,
    quarantine_host,
    read_quarantine,
)
from trainkit.launch.protocol.frames import HostFacts
from trainkit.launch.scheduler_contract import ClusterNode, HostsToAsk
from trainkit.launch.scheduler_registry import scheduler_for
from trainkit.launch.supervise.orphan_sweep import HostReport, survey_hosts

# it never ends by itself: 124 of timeout(1) is as it should be
MONITOR = ("timeout", "8", "neuron-monitor")
TIMED_OUT = 124
SHOWN = 4  # cores named as the idlest


def monitor_lines(text: str) -> list[str]:
    """The newest whole report in what neuron-monitor printed; a line that says so where there is
    none."""
    for line in reversed(text.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:  # cut off when it was ended
            continue
        if isinstance(found, dict) and "neuron_runtime_data" in found:
            return _report_lines(found["neuron_runtime_data"] or [])
    return ["neuron-monitor said nothing within 8 s"]


def _report_lines(programs: Sequence[object]) -> list[str]:
    cores: dict[int, float] = {}
    errors: Counter[str] = Counter()
    used: Counter[str] = Counter()
    for program in programs:
        counters = _part(program, "report", "neuroncore_counters", "neuroncores_in_use")
        for number, core in counters.items():
            share = _number(_part(core).get("neuroncore_utilization"))
            cores[int(number)] = cores.get(int(number), 0.0) + share
        for name, count in _part(program, "report", "execution_stats", "error_summary").items():
            errors[name] += int(_number(count))
        memory = _part(program, "report", "memory_used", "neuron_runtime_used_bytes")
        for name in ("neuron_device", "host"):
            used[name] += int(_number(memory.get(name)))
    if not programs:
        return ["no program uses its NeuronCores"]
    memory_words = (
        f"{used['neuron_device'] / GIB:,.1f} GiB on devices, {used['host'] / GIB:,.1f} on"
    )
    lines = [f"{len(programs)} programs use {len(cores)} NeuronCores: {memory_words} the host"]
    if cores:
        mean = sum(cores.values()) / len(cores)
        idle = sorted(cores, key=lambda core: (cores[core], core))[:SHOWN]
        idlest = ", ".join(f"{core}: {cores[core]:.0f} %" for core in idle)
        lines.append(f"utilization {mean:.0f} % in the mean, the lowest of cores {idlest}")
    if wrong := {name: count for name, count in sorted(errors.items()) if count}:
        said = ", ".join(f"{count} {name}" for name, count in wrong.items())
        lines.append(f"errors of executions: {said}")
    return lines


def _part(value: object, *names: str) -> Mapping[str, object]:
    """What stands under these keys; empty where anything on the way is missing."""
    for name in names:
        if not isinstance(value, Mapping):
            return {}
        value = value.get(name)
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


TOP_SECONDS = 30.0
# by type of device: a command that shows devices and processes once, and how many lines of its
# output are shown. neuron-top itself needs a terminal: what it shows comes from neuron-monitor.
TOPS: dict[str, tuple[list[str], int | None]] = {
    "cuda": (["nvidia-smi"], None),
    "neuron": (["neuron-ls", "--wide"], None),
    "cpu": (["top", "-b", "-n", "1", "-w", "160"], 15),
}


@dataclass(frozen=True)
class HostRow:
    """One host: an entry of the document nodes/1.

    Args:
        host: its name in the hostfile.
        reachable: whether it can be used.
        error: why not.
        name: what it calls itself.
        address: on the cluster's network.
        cpus: how many cores a process may use.
        gpus: their names.
        disk_free: bytes on the cluster's root.
        versions: of python, torch, kernel, driver.
        busy: a row per slot that is held, with what its holder says.
        quarantine: why it is left out of runs.
    """

    host: str
    reachable: bool
    error: str | None
    name: str | None
    address: str | None
    cpus: int | None
    gpus: list[str]
    disk_free: int | None
    versions: Mapping[str, str | None]
    busy: list[Mapping[str, object]]
    quarantine: QuarantineEntry | None


@dataclass(frozen=True)
class TopRow:
    """What one host's own tool shows: an entry of the document top/1."""

    host: str
    error: str | None
    text: str


def leave_out(task: TaskContext, cluster: str, hostfile: str, names: str) -> TaskResult:
    """The task `nodes` with --leave-out: no run that begins has these hosts."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    if not chosen.launcher_traits.hostfile:
        hint = "ssh and pdsh take hosts of a hostfile"
        if chosen.launcher_traits.pods:
            hint = "`kubectl cordon NAME` keeps new pods away from a node"
        elif chosen.launcher_traits.batch:
            hint = "Slurm drains a node: scontrol update NodeName=NAME State=DRAIN Reason=WHY"
        raise ConfigError(
            f"hosts of cluster '{chosen.name}' are not trainkit's to leave out: its launcher is"
            f" {chosen.launcher}",
            hint=hint,
        )
    known = scheduler_for(chosen).hosts_to_ask(chosen, hostfile, devices=False).hosts
    wanted = [name.lower() for name in names.split(",")]
    if unknown := set(wanted) - {host.name.lower() for host in known}:
        raise ConfigError(
            f"no host {', '.join(map(repr, sorted(unknown)))} in cluster '{chosen.name}'",
            hint=f"its hosts: {named(known)}",
        )
    seconds = chosen.quarantine_seconds
    entries = [
        quarantine_host(chosen.root_folder, name, "left out by hand", "", seconds)
        for name in wanted
    ]
    page = [
        f"{', '.join(wanted)} left out until {entries[0].until}; a run that has one keeps it:"
        f" `{task.command} cancel RUN`, then `{task.command} resume RUN` goes on without it"
    ]
    return TaskResult(document("nodes/1", cluster=chosen.name, left_out=names, hosts=[]), page=page)


def release(task: TaskContext, cluster: str, names: str) -> TaskResult:
    """The task `nodes` with --release: hosts in quarantine may run again."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    root = chosen.root_folder
    wanted = list(read_quarantine(root)) if names == "all" else names.split(",")
    released = [host for host in wanted if end_quarantine(root, host)]
    if not released:
        raise ConfigError(
            f"host '{names}' is not left out of cluster '{chosen.name}'",
            hint=f"left out: {', '.join(read_quarantine(root)) or 'none'}",
        )
    return TaskResult(
        document("nodes/1", cluster=chosen.name, released=names, hosts=[]),
        page=[f"{', '.join(released)} may run again"],
    )


def nodes(task: TaskContext, cluster: str, hostfile: str) -> TaskResult:
    """The task `nodes`."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    root = chosen.root_folder
    refuse_unread_options(HostOptions(hostfile=hostfile), chosen)
    scheduler = scheduler_for(chosen)
    known = scheduler.nodes(chosen)
    if known is not None:
        return _nodes_of_scheduler(chosen, known)
    hosts = scheduler.hosts_to_ask(chosen, hostfile, devices=False).hosts
    out = read_quarantine(root)
    reports = survey_hosts(chosen, hosts, root)
    rows = [
        _row(host, report, out.get(host.name.lower()))
        for host, report in zip(hosts, reports, strict=True)
    ]
    unreachable = sum(not row.reachable for row in rows)
    count = [f"{unreachable} of {len(rows)} hosts cannot be used"] if unreachable else []
    return TaskResult(
        document("nodes/1", cluster=chosen.name, hosts=[asdict(row) for row in rows]),
        Exit.HEALTH if unreachable else Exit.DONE,
        [_table(rows), *count],
    )


def _nodes_of_scheduler(cluster: Cluster, known: list[ClusterNode]) -> TaskResult:
    """What the cluster's scheduler knows of its nodes, drained ones with the reason."""
    rows = [asdict(node) for node in known]
    table = Listing(
        "host",
        "state",
        "partition",
        "CPUs",
        "GRES",
        "reason",
        drop=("GRES", "CPUs", "partition"),
        rows=(map(escape, row.values()) for row in rows),
    )
    return TaskResult(document("nodes/1", cluster=cluster.name, hosts=rows), page=[table])


def nodes_top(task: TaskContext, cluster: str, hostfile: str) -> TaskResult:
    """The task `nodes` with --top: what each host's own tool shows, once."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    found = hosts_to_ask(chosen, hostfile, devices=False)
    argv, lines = TOPS[chosen.device_type]
    rows = [TopRow(host, why, "") for host, why in found.unavailable.items()]
    if found.hosts:
        for host, said in run_on_hosts(
            chosen,
            found.hosts,
            chosen.root_folder,
            argv,
            TOP_SECONDS,
            launcher=found.launcher,
        ).items():
            error = said.last if said.error or said.code else None
            rows.append(TopRow(host, error, "\n".join(said.out.splitlines()[:lines])))
    if found.hosts and chosen.device_type == "neuron":
        rows = _with_monitor(rows, chosen, found)
    failed = any(row.error is not None for row in rows)
    return TaskResult(
        document("top/1", cluster=chosen.name, command=argv, hosts=[asdict(row) for row in rows]),
        Exit.HEALTH if failed else Exit.DONE,
        _top_page(rows, chosen.device_type),
    )


def _top_page(rows: Sequence[TopRow], device_type: str) -> Page:
    for row in rows:
        yield f"== {row.host}: {row.error}" if row.error else f"== {row.host}"
        if row.text:
            yield row.text
    if device_type == "neuron":
        yield "to follow it: ssh -t HOST neuron-top"


def _with_monitor(rows: list[TopRow], chosen: Cluster, found: HostsToAsk) -> list[TopRow]:
    """The rows with what neuron-monitor says of each host that could be asked."""
    said = run_on_hosts(
        chosen,
        found.hosts,
        chosen.root_folder,
        MONITOR,
        TOP_SECONDS,
        launcher=found.launcher,
    )
    whole = []
    for row in rows:
        result = said.get(row.host)
        if result is None or row.error is not None:
            whole.append(row)
        elif result.error or result.code not in (0, TIMED_OUT):
            whole.append(replace(row, error=result.last))
        else:
            whole.append(replace(row, text="\n".join([row.text, *monitor_lines(result.out)])))
    return whole


def usual_cluster(task: TaskContext, jobs: Jobs) -> str:
    """The cluster of the job in [defaults]."""
    job = jobs.default_job
    if job is None:
        raise ConfigError("which cluster?", hint="give --cluster NAME, or name a job in [defaults]")
    name = jobs.resolve(job).job.cluster.name
    task.say(f"cluster {name}, of job {job}, named in [defaults]")
    return name


def _row(host: Host, report: HostReport, quarantine: QuarantineEntry | None) -> HostRow:
    facts = report.facts or HostFacts(node=0)
    return HostRow(
        host=host.name,
        reachable=report.error is None,
        error=report.error,
        name=facts.host or None,
        address=facts.address,
        cpus=facts.cpus,
        gpus=list(facts.gpus),
        disk_free=facts.disk_free,
        versions=dict(facts.versions),
        busy=[{"slot": slot, **holder} for slot, holder in sorted(facts.slots.items())],
        quarantine=quarantine,
    )


def _table(rows: Sequence[HostRow]) -> Listing:
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
        runs = dict.fromkeys(
            str(holder.get("run") or holder.get("user", "?")) for holder in row.busy
        )
        gpus = str(len(row.gpus) or "none") if row.reachable else ""
        table.add_row(
            escape(row.host),
            row.address or "",
            str(row.cpus or ""),
            gpus,
            gib(row.disk_free, 0, ""),
            ", ".join(runs),
            _state_cell(row),
        )
    return table


def _state_cell(row: HostRow) -> str:
    state = "[green]reachable[/]" if row.reachable else f"[red]{escape(str(row.error))}[/]"
    if row.quarantine is None:
        return state
    entry = row.quarantine
    return f"{state}, [yellow]in quarantine until {entry.until}: {escape(entry.why)}[/]"
