"""The task `setup-hosts`: prints what bare machines need to become a cluster, or does it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.hosts.nodes import usual_cluster
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.clusters import Cluster
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

UNKNOWN_KEY = "ssh-ed25519 PUBLIC-KEY-OF-THIS-MACHINE"
AT_ONCE = 32  # hosts, where nobody types passwords


@dataclass(frozen=True)
class SetupOptions:
    """--hostfile, --host, --slots, --share, --address; empty or 0 where not given."""

    hostfile: str = ""
    hosts: tuple[str, ...] = ()
    slots: int = 0
    share: str = ""
    address: str = ""


def setup_hosts(
    task: TaskContext, cluster: str, words: SetupOptions, *, performing: bool
) -> TaskResult:
    """The task `setup-hosts`."""
    jobs = load_jobs(task)
    chosen = jobs.cluster(cluster or usual_cluster(task, jobs))
    if chosen.launcher not in OVER_SSH:
        message = (
            f"cluster '{chosen.name}' has launcher = '{chosen.launcher}'; hosts are set up for ssh"
            " and pdsh"
        )
        raise ConfigError(message, hint="name another with --cluster")
    wanted = _wanted(chosen, words)
    home = Path.home()
    if not performing or task.dry_run:
        steps = [
            *wanted.before(),
            *(
                step
                for host in wanted.away
                for step in wanted.of_host(host, own_public_key(home) or UNKNOWN_KEY)
            ),
            *wanted.after(),
        ]
        _print(task, wanted, steps)
        return TaskResult(
            document(
                "setup-hosts/1",
                cluster=chosen.name,
                performed=False,
                steps=[_row(StepResult(step, "not done", "")) for step in steps],
            )
        )
    done = _perform_all(task, wanted, home)
    failed = [each for each in done if each.state == "failed"]
    changed = sum(each.state == CHANGED for each in done)
    task.say(f"{changed} of {len(done)} steps changed something, {len(failed)} failed")
    if not failed:
        task.say(f"{task.command} doctor --cluster {chosen.name} looks whether all is well now")
    told = document(
        "setup-hosts/1", cluster=chosen.name, performed=True, steps=[_row(each) for each in done]
    )
    return TaskResult(told, Exit.HEALTH if failed else Exit.DONE)


def _wanted(cluster: Cluster, words: SetupOptions) -> SetupPlan:
    if words.hosts:
        hosts = parse_hostfile("\n".join(words.hosts), "--host")
        path: Path | None = (
            Path(words.hostfile or cluster.hostfile or DEFAULT).expanduser().absolute()
        )
    else:
        hosts = read_hostfile(find_hostfile(cluster, words.hostfile))
        path = None
    if words.share:
        share = Path(words.share).expanduser()
    else:
        share = None
    return SetupPlan(
        cluster,
        hosts,
        path,
        words.slots or cluster.ranks_per_node or cluster.gpus_per_node or 1,
        share,
        words.address or _own(cluster, hosts),
    )


def _own(cluster: Cluster, hosts: Sequence[Host]) -> str:
    """This machine's address on the way to the hosts; its name where no host can be found from
    here."""
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
    with ThreadPoolExecutor(1 if person else AT_ONCE) as pool:
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
            "### no folder is shared: --share FOLDER adds the export here and the mount on the"
            " hosts"
        )
    task.say(f"### nothing was done; --perform does it (by ssh to {len(wanted.away)} hosts)")


def _row(done: StepResult) -> dict[str, str]:
    return {
        "where": done.step.where,
        "title": done.step.title,
        "script": done.step.text,
        "state": done.state,
        "said": done.said,
    }
