"""The task `fleet`: start, stop or look at the compute nodes of an AWS ParallelCluster."""

from __future__ import annotations

import shlex

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.hosts.nodes import usual_cluster
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.cluster_care.parallelcluster import (
    REQUESTS,
    FleetStatus,
    change,
    fleet_of,
    pcluster_command,
    status,
)

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
