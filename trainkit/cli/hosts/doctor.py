"""The task `doctor`: one table of all hosts, what differs marked, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.host_options import hosts_to_ask
from trainkit.cli.hosts.nodes import usual_cluster
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.cluster_care.health_checks import (
    COLUMNS,
    ClusterExamination,
    Finding,
    examine_hosts,
)
from trainkit.launch.hosts.quarantine import read_quarantine
from trainkit.launch.supervise.agent_pool import JoinedAgent, MissingAgent

GIB = 2**30
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
    root = Path(chosen.root or ".")
    hosts, others, launcher = hosts_to_ask(chosen, hostfile, devices=all_reduce)
    if hosts:
        seen = examine_hosts(chosen, hosts, root, all_reduce=all_reduce, launcher=launcher)
    else:
        seen = ClusterExamination([], [])
    busy = {name: why for name, why in others.items() if "allocated" in why}
    advice = (
        "`scontrol show node HOST` says since when; `scontrol update nodename=HOST state=resume`"
        " lets it in again"
    )
    down = [Finding(name, "reach", why, advice) for name, why in others.items() if name not in busy]
    waits = [
        Finding(
            name,
            "reach",
            why,
            "it is working; look again later, or from inside its job (salloc)",
            wrong=False,
        )
        for name, why in busy.items()
    ]
    out = [
        Finding(
            host,
            "reach",
            f"left out of runs until {entry.until}: {entry.why}",
            f"{task.command} nodes --release {host} lets it in again",
            wrong=False,
        )
        for host, entry in read_quarantine(root).items()
    ]
    findings = [*seen.findings, *down, *waits, *out]
    if not task.json:
        _print(task, seen, findings, others)
    wrong = sum(finding.wrong for finding in findings)
    if all_reduce and len(hosts) < 2:
        task.say("an all-reduce needs two hosts: none was measured")
    rows = [
        {
            "host": answer.host,
            "clock_offset": round(answer.clock_offset, 3),
            **answer.facts.to_json(),
        }
        for answer in seen.answers
        if isinstance(answer, JoinedAgent)
    ]
    pairs = [
        {"hosts": [one, other], "gb_per_second": pair.gb_per_second, "error": pair.error or None}
        for one, other, pair in seen.pairs
    ]
    told = document(
        "doctor/1",
        cluster=chosen.name,
        hosts=rows,
        findings=[vars(finding) for finding in findings],
        pairs=pairs,
        wrong=wrong,
    )
    return TaskResult(told, Exit.HEALTH if wrong else Exit.DONE)


def _print(
    task: TaskContext, seen: ClusterExamination, findings: Sequence[Finding], others: dict[str, str]
) -> None:
    marks = {(finding.host, finding.what): finding.wrong for finding in findings}
    headings = {name: HEADINGS.get(name, name) for name in COLUMNS}
    # those of findings are left out last
    quiet = [name for name in reversed(COLUMNS) if all(what != name for _, what in marks)]
    table = Listing(
        "host",
        *headings.values(),
        drop=[
            headings[name]
            for name in [*quiet, *(name for name in reversed(COLUMNS) if name not in quiet)]
        ],
    )
    for answer in seen.answers:
        if isinstance(answer, MissingAgent):
            cells = dict.fromkeys(COLUMNS, "")
        else:
            cells = _cells(answer)
        shown = [_marked(cells[name], marks.get((answer.host, name))) for name in COLUMNS]
        table.add_row(_marked(answer.host, marks.get((answer.host, "reach"))), *shown)
    for name in others:
        table.add_row(_marked(name, marks.get((name, "reach"))), *[""] * len(COLUMNS))
    task.console.print(table)
    for one, other, pair in seen.pairs:
        task.say(
            f"all-reduce {one} - {other}: "
            + (
                f"{pair.gb_per_second:.3g} GB/s"
                if pair.gb_per_second is not None
                else f"failed: {pair.error}"
            )
        )
    for finding in findings:
        if finding.wrong:
            colour = "red"
            word = "wrong"
        else:
            colour = "yellow"
            word = "note"
        task.console.print(
            f"[{colour}]{word}[/] {escape(finding.host)} ({finding.what}):"
            f" {escape(finding.message)}"
        )
        task.say(f"  {finding.advice}")
    wrong = sum(finding.wrong for finding in findings)
    task.say(
        f"{wrong} finding{'s' if wrong != 1 else ''} that would spoil a run"
        if wrong
        else "nothing is wrong"
    )


def _marked(text: str, wrong: bool | None) -> str:
    """A cell; `wrong` is None where nothing is to be said of it. Without colours a mark is all
    there is."""
    if wrong is None:
        return escape(text)
    return f"[{'red' if wrong else 'yellow'}]{escape(text)} {'!!' if wrong else '!'}[/]"


def _cells(hello: JoinedAgent) -> dict[str, str]:
    facts = hello.facts
    versions = facts.versions
    gpus = facts.gpus
    if facts.interface:
        interface = f" ({facts.interface})"
    else:
        interface = ""
    files = facts.open_files
    return {
        **{
            name: str(versions.get(name) or "-") for name in ("python", "torch", "driver", "kernel")
        },
        "clock": f"{hello.clock_offset:+.2f} s",
        "root": "seen" if facts.nonce else "-",
        "disk": _gib(facts.disk_free),
        "gpus": str(len(gpus)) if gpus else "-",
        "address": f"{facts.address}{interface}",
        "files": "-" if files is None else "unlimited" if files < 0 else f"{files:,}",
        "shm": _gib(facts.shared_memory),
        "proof": str(facts.proof or "-"),
    }


def _gib(size: int | None) -> str:
    if size is None:
        return "-"
    return f"{size / GIB:,.1f} GiB"
