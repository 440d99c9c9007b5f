"""The task `fleet`: start, stop or look at the compute nodes of an AWS ParallelCluster."""

from __future__ import annotations

import shlex

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.hosts.nodes import usual_cluster
from trainkit.cli.wrapper import Answer, Talk
from trainkit.launch.cluster_care.parallelcluster import (
    REQUESTS,
    FleetStatus,
    change,
    fleet_of,
    status,
    words_of,
)

VERBS = (*REQUESTS, "status")


def fleet(talk: Talk, verb: str, cluster: str, wait: float) -> Answer:
    """The task `fleet`."""
    if verb not in VERBS:
        raise ConfigError(f"fleet '{verb}' is none of {', '.join(VERBS)}")
    jobs = load_jobs(talk)
    chosen = jobs.cluster(cluster or usual_cluster(talk, jobs))
    asked = fleet_of(chosen)
    line = words_of(asked, verb)
    if talk.dry_run:
        talk.say(f"would run: {shlex.join(line)}")
        if verb in REQUESTS:
            talk.say(
                f"would wait at most {wait:g} s, asking: {shlex.join(words_of(asked, 'status'))}"
            )
        return Answer(
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
        talk.say(
            f"fleet {asked.name} is {seen.status}" + (f" since {seen.since}" if seen.since else "")
        )

    if verb == "status":
        seen = status(asked)
        say(seen)
    else:
        seen = change(asked, verb, wait, say)
    return Answer(
        document(
            "fleet/1",
            cluster=chosen.name,
            fleet=asked.name,
            status=seen.status,
            since=seen.since,
            command=line,
        )
    )
