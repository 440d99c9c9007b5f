"""The task `doctor`: a table of all hosts with what differs marked, and advice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.host_options import hosts_to_ask
from trainkit.cli.hosts.nodes import usual_cluster
from trainkit.cli.tables import GIB, Listing, gib
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.load import Jobs
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.cluster_care.container_checks import pages_note
from trainkit.launch.cluster_care.health_checks import ClusterExamination, examine_hosts
from trainkit.launch.cluster_care.host_checks import COLUMNS
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.scheduler_registry import scheduler_for
from trainkit.launch.supervise.agent_pool import JoinedAgent, MissingAgent
from trainkit.launch.supervise.host_consistency import COMPARED, Finding

HEADINGS = {
    "disk": "disk free",
    "gpus": "GPUs",
    "files": "open files",
    "shm": "/dev/shm",
    "proof": "proof of ends",
}


def doctor(task: TaskContext, cluster: str, hostfile: str, *, all_reduce: bool) -> TaskResult:
    """The task `doctor`."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    root = chosen.root_folder
    found = hosts_to_ask(chosen, hostfile, devices=all_reduce)
    if found.hosts:
        seen = examine_hosts(
            chosen,
            found.hosts,
            root,
            all_reduce=all_reduce,
            launcher=found.launcher,
            boxed=boxed_jobs(jobs, chosen),
        )
    else:
        seen = ClusterExamination([], [])
    down = [
        Finding(name, "reach", why, found.advice)
        for name, why in found.unavailable.items()
        if name not in found.busy
    ]
    waits = [
        Finding(
            name,
            "reach",
            why,
            "it is working; look again later, or from inside its job (salloc)",
            wrong=False,
        )
        for name, why in found.unavailable.items()
        if name in found.busy
    ]
    out = [
        Finding(
            host,
            "reach",
            f"in quarantine until {entry.until}: {entry.why}",
            f"{task.command} nodes --release {host} lets it in again",
            wrong=False,
        )
        for host, entry in read_quarantine(root).items()
    ]
    findings = [*_known(jobs, chosen), *seen.findings, *down, *waits, *out]
    if not task.json:
        _print(task, seen, findings, found.unavailable)
    wrong = sum(finding.wrong for finding in findings)
    if all_reduce and len(found.hosts) < 2:
        task.say("an all-reduce needs two hosts: nothing was measured")
    result = document(
        "doctor/1",
        cluster=chosen.name,
        hosts=_host_rows(seen),
        findings=[vars(finding) for finding in findings],
        pairs=_pair_rows(seen),
        containers=[report.to_json() for report in seen.containers],
        wrong=wrong,
    )
    return TaskResult(result, Exit.HEALTH if wrong else Exit.DONE)


def _known(jobs: Jobs, cluster: Cluster) -> list[Finding]:
    """What the cluster's scheduler tells of its first job."""
    first = next(_jobs_of(jobs, cluster), None)
    return [] if first is None else scheduler_for(cluster).examine(first)


def _jobs_of(jobs: Jobs, cluster: Cluster) -> Iterator[Job]:
    """The jobs of a cluster, the default one before others. What is wrong with a job's own tables,
    `check` says."""
    for name in sorted(jobs.names(), key=lambda name: name != jobs.default_job):
        with contextlib.suppress(ConfigError):
            job = jobs.resolve(name).job
            if job.cluster.name == cluster.name:
                yield job


def boxed_jobs(jobs: Jobs, cluster: Cluster) -> list[Job]:
    """For each container that jobs of a cluster name, the first such job."""
    found = dict[str, Job]()
    for job in _jobs_of(jobs, cluster):
        if job.container is not None:
            found.setdefault(job.container.name, job)
    return list(found.values())


def _host_rows(seen: ClusterExamination) -> list[dict[str, object]]:
    """What each host that answered says of itself."""
    return [
        {
            "host": answer.host,
            "clock_offset": round(answer.clock_offset, 3),
            **answer.facts.to_json(),
        }
        for answer in seen.answers
        if isinstance(answer, JoinedAgent)
    ]


def _pair_rows(seen: ClusterExamination) -> list[dict[str, object]]:
    """The bandwidth of each pair of hosts that was measured."""
    return [
        {"hosts": [one, other], "gb_per_second": pair.gb_per_second, "error": pair.error or None}
        for one, other, pair in seen.pairs
    ]


def _print(
    task: TaskContext,
    seen: ClusterExamination,
    findings: Sequence[Finding],
    others: Mapping[str, str],
) -> None:
    if seen.answers or others:
        task.console.print(_table(seen, findings, others))
    if seen.containers:
        task.console.print(_container_table(seen, findings))
        task.say(pages_note(seen.containers))
    for one, other, pair in seen.pairs:
        result = f"failed: {pair.error}"
        if pair.gb_per_second is not None:
            result = f"{pair.gb_per_second:.3g} GB/s"
        task.say(f"all-reduce {one} - {other}: {result}")
    for finding in findings:
        label = "[red]wrong[/]" if finding.wrong else "[yellow]note[/]"
        task.console.print(
            f"{label} {escape(finding.host)} ({finding.what}): {escape(finding.message)}"
        )
        task.say(f"  {finding.advice}")
    wrong = sum(finding.wrong for finding in findings)
    if wrong:
        task.say(f"{wrong} finding{'s' if wrong != 1 else ''} that would break or slow down a run")
    else:
        task.say("nothing is wrong")


def _table(seen: ClusterExamination, findings: Sequence[Finding], others: Iterable[str]) -> Listing:
    """A row per host.

    Args:
        seen: hosts that were asked.
        findings: what is marked.
        others: names of hosts that could not be asked.
    """
    marks = {(finding.host, finding.what): finding.wrong for finding in findings}
    found = {finding.what for finding in findings}
    headings = {name: HEADINGS.get(name, name) for name in COLUMNS}
    # on a narrow terminal, columns with findings are left out last
    last_first = list(reversed(COLUMNS))
    drop = [name for name in last_first if name not in found]
    drop += [name for name in last_first if name in found]
    table = Listing("host", *headings.values(), drop=[headings[name] for name in drop])
    for answer in seen.answers:
        cells: dict[str, str] = dict.fromkeys(COLUMNS, "")
        if not isinstance(answer, MissingAgent):
            cells = _cells(answer)
        table.add_row(
            _marked(answer.host, marks.get((answer.host, "reach"))),
            *(_marked(cells[name], marks.get((answer.host, name))) for name in COLUMNS),
        )
    for name in others:
        table.add_row(_marked(name, marks.get((name, "reach"))), *[""] * len(COLUMNS))
    return table


def _container_table(seen: ClusterExamination, findings: Sequence[Finding]) -> Listing:
    """A row per host and container: whether its runtime and image are there, and what a start
    takes."""
    marks: dict[str, bool] = {}
    for finding in findings:
        if finding.what == "container":
            marks[finding.host] = finding.wrong or marks.get(finding.host, False)
    headings = ("container", "runtime", "image", "folders", "cold start", "warm start")
    table = Listing("host", *headings, drop=["folders", "image"])
    for report in seen.containers:
        shared = sum(folder.shared for folder in report.folders.values())
        folders = f"{len(report.folders) - shared} own, {shared} shared"
        table.add_row(
            _marked(report.host, marks.get(report.host)),
            escape(report.container),
            escape(f"{report.runtime} {report.version or '-'}"),
            "-" if report.image_error else _image_size(report.size),
            folders if report.folders else "-",
            *(f"{seconds:.2f} s" for seconds in report.seconds),
            *["-"] * (2 - len(report.seconds)),
        )
    return table


def _marked(text: str, wrong: bool | None) -> str:
    """A cell with its mark, which is also seen without colours.

    Args:
        text: the cell.
        wrong: whether the finding about it is wrong, or only a note; None without a finding.
    """
    if wrong is None:
        return escape(text)
    if wrong:
        return f"[red]{escape(text)} !![/]"
    return f"[yellow]{escape(text)} ![/]"


def _cells(agent: JoinedAgent) -> dict[str, str]:
    """The cells of a host, by column."""
    facts = agent.facts
    address = str(facts.address)
    if facts.interface:
        address += f" ({facts.interface})"
    cells: dict[str, str] = {name: facts.versions.get(name) or "-" for name in COMPARED}
    return cells | {
        "clock": f"{agent.clock_offset:+.2f} s",
        "root": "seen" if facts.nonce else "-",
        "disk": gib(facts.disk_free, 1),
        "gpus": str(len(facts.gpus) or "-"),
        "address": address,
        "files": _limit(facts.open_files),
        "shm": gib(facts.shared_memory, 1),
        "proof": facts.proof or "-",
    }


def _limit(number: int | None) -> str:
    if number is None:
        return "-"
    if number < 0:
        return "unlimited"
    return f"{number:,}"


def _image_size(size: int | None) -> str:
    return gib(size, 1) if size is None or size >= GIB else f"{size / 2**20:,.1f} MiB"
