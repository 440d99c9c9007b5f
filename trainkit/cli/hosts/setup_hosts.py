"""The task `setup-hosts`: prints what bare machines need to become a cluster, or does it; and
`fleet`: starts, stops or shows the compute nodes of an AWS ParallelCluster."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import asdict, dataclass, replace
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.hosts.nodes import usual_cluster
from trainkit.cli.options import SetupOptions
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.clusters import Cluster
from trainkit.launch.cluster_care.parallelcluster import (
    REQUESTS,
    FleetStatus,
    change,
    fleet_of,
    pcluster_command,
    status,
)
from trainkit.launch.cluster_care.provision import (
    CHANGED,
    HERE,
    PREAMBLE,
    SetupPlan,
    SetupStep,
    StepResult,
    own_public_key,
    run_step,
)
from trainkit.launch.hosts.hostfile import (
    DEFAULT,
    OVER_SSH,
    Host,
    find_hostfile,
    parse_hostfile,
    read_hostfile,
)
from trainkit.launch.launchers import supervisor_address

VERBS = (*REQUESTS, "status")


def fleet(task: TaskContext, verb: str, cluster: str, wait: float) -> TaskResult:
    """The task `fleet`."""
    if verb not in VERBS:
        raise ConfigError(f"fleet '{verb}' is none of {', '.join(VERBS)}")
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    asked = fleet_of(chosen)
    line = pcluster_command(asked, verb)
    if task.dry_run:
        task.say(f"would run: {shlex.join(line)}")
        if verb in REQUESTS:
            task.say(
                f"would wait at most {wait:g} s, asking:"
                f" {shlex.join(pcluster_command(asked, 'status'))}"
            )
        return TaskResult(
            document(
                "fleet/1",
                cluster=chosen.name,
                fleet=asked.name,
                status=None,
                since=None,
                command=line,
            )
        )

    def say(seen: FleetStatus) -> None:
        task.say(
            f"fleet {asked.name} is {seen.status}" + (f" since {seen.since}" if seen.since else "")
        )

    if verb == "status":
        seen = status(asked)
        say(seen)
    else:
        seen = change(asked, verb, wait, say)
    return TaskResult(
        document(
            "fleet/1",
            cluster=chosen.name,
            fleet=asked.name,
            status=seen.status,
            since=seen.since,
            command=line,
        )
    )


UNKNOWN_KEY = "ssh-ed25519 PUBLIC-KEY-OF-THIS-MACHINE"
PARALLEL_HOSTS = 32  # if nobody has to type passwords


@dataclass(frozen=True)
class StepRow:
    """One step in the document setup-hosts/1."""

    where: str
    title: str
    script: str
    state: str
    said: str


def setup_hosts(task: TaskContext, options: SetupOptions) -> TaskResult:
    """The task `setup-hosts`. Raises ConfigError for a cluster that is not reached over ssh."""
    jobs = load_jobs(task)
    cluster = jobs.cluster(options.cluster or usual_cluster(task, jobs))
    if cluster.launcher not in OVER_SSH:
        raise ConfigError(
            f"cluster '{cluster.name}' has launcher = '{cluster.launcher}'; hosts are set up for"
            " ssh and pdsh",
            hint="name another with --cluster",
        )
    wanted = _wanted(cluster, options)
    home = Path.home()
    if not options.perform or task.dry_run:
        steps = _steps(wanted, own_public_key(home) or UNKNOWN_KEY)
        _print(task, wanted, steps)
        rows = [_row(StepResult(step, "not done", "")) for step in steps]
        return _result(cluster, rows, performed=False)
    done = _perform_all(task, wanted, home)
    failed = [each for each in done if each.state == "failed"]
    changed = sum(each.state == CHANGED for each in done)
    task.say(f"{changed} of {len(done)} steps changed something, {len(failed)} failed")
    if not failed:
        task.say(f"to check the hosts: {task.command} doctor --cluster {cluster.name}")
    result = _result(cluster, [_row(each) for each in done], performed=True)
    return replace(result, exit=Exit.HEALTH) if failed else result


def _result(cluster: Cluster, rows: Sequence[StepRow], *, performed: bool) -> TaskResult:
    return TaskResult(
        document(
            "setup-hosts/1",
            cluster=cluster.name,
            performed=performed,
            steps=[asdict(row) for row in rows],
        )
    )


def _steps(wanted: SetupPlan, public_key: str) -> list[SetupStep]:
    """All steps in their order: on this machine, on each host, on this machine."""
    on_hosts = [step for host in wanted.away for step in wanted.of_host(host, public_key)]
    return [*wanted.before(), *on_hosts, *wanted.after()]


def _wanted(cluster: Cluster, options: SetupOptions) -> SetupPlan:
    path: Path | None = None
    if options.host:
        hosts = parse_hostfile("\n".join(options.host), "--host")
        path = Path(options.hostfile or cluster.hostfile or DEFAULT).expanduser().absolute()
    else:
        hosts = read_hostfile(find_hostfile(cluster, options.hostfile))
    share: Path | None = Path(options.share).expanduser() if options.share else None
    slots = options.slots or cluster.ranks_per_node or cluster.gpus_per_node or 1
    address = options.address or _own_address(cluster, hosts)
    return SetupPlan(cluster, hosts, path, slots, share, address)


def _own_address(cluster: Cluster, hosts: Sequence[Host]) -> str:
    """This machine's address on the way to the hosts; its name if no host has an address."""
    with contextlib.suppress(TrainkitError):
        return supervisor_address(cluster, hosts)
    return os.uname().nodename


def _perform_all(task: TaskContext, wanted: SetupPlan, home: Path) -> list[StepResult]:
    person = sys.stdin.isatty()

    def run(step: SetupStep) -> StepResult:
        done = run_step(step, wanted.cluster, wanted.hosts, person=person)
        colour = {"failed": "red", CHANGED: "green"}.get(done.state, "white")
        task.console.print(
            f"{escape(step.where)}: {escape(step.title)}: [{colour}]{done.state}[/]"
            + (f": {escape(done.said)}" if done.said else "")
        )
        return done

    def on_host(host: Host, key: str) -> list[StepResult]:
        done: list[StepResult] = []
        for step in wanted.of_host(host, key):
            if done and done[-1].state == "failed":
                break
            done.append(run(step))
        if done[0].state == "failed":
            task.say(
                f"  from a machine that both let in: ssh {wanted.head} 'cat ~/.ssh/*.pub' | ssh"
                f" {host.name} 'cat >> ~/.ssh/authorized_keys'"
            )
        return done

    here = [run(step) for step in wanted.before()]
    key = own_public_key(home)
    if key is None or any(done.state == "failed" for done in here):
        return here
    with ThreadPoolExecutor(1 if person else PARALLEL_HOSTS) as pool:
        there = [
            done for each in pool.map(lambda host: on_host(host, key), wanted.away) for done in each
        ]
    return [*here, *there, *map(run, wanted.after())]


def _print(task: TaskContext, wanted: SetupPlan, steps: Sequence[SetupStep]) -> None:
    """Shell to read and to paste, machine by machine; machines with the same text together."""
    texts: dict[str, list[str]] = {}
    for where in dict.fromkeys(step.where for step in steps):
        of_one = "".join(
            f"# {step.title}\n(\n{step.script})\n" for step in steps if step.where == where
        )
        texts.setdefault(of_one, []).append(where)
    for text, machines in texts.items():
        task.say(
            f"### {'on this machine' if machines == [HERE] else 'on ' + ', '.join(machines)}, in"
            " bash:"
        )
        task.say(PREAMBLE + text)
    if not wanted.share:
        task.say(
            "### no folder is shared: --share FOLDER adds the export here and the mounts on the"
            " hosts"
        )
    task.say(
        f"### nothing was changed; --perform runs these steps (by ssh to {len(wanted.away)} hosts)"
    )


def _row(done: StepResult) -> StepRow:
    return StepRow(done.step.where, done.step.title, done.step.text, done.state, done.said)
