"""The compute fleet of an AWS ParallelCluster: nodes that cost money while they run. `pcluster`
(version 3) is what starts and stops them."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.clusters import Cluster, Fleet

ANSWER_SECONDS = 60.0  # of one call
POLL_SECONDS = 10.0
# The words of updateComputeFleet and describeComputeFleet for clusters with Slurm (AWS
# ParallelCluster User Guide, API reference)
REQUESTS = {"start": "START_REQUESTED", "stop": "STOP_REQUESTED"}
REACHED = {"start": "RUNNING", "stop": "STOPPED"}
ON_THE_WAY = {"start": ("START_REQUESTED", "STARTING"), "stop": ("STOP_REQUESTED", "STOPPING")}


@dataclass(frozen=True)
class FleetStatus:
    """What describe-compute-fleet says."""

    status: str
    since: str


def fleet_of(cluster: Cluster) -> Fleet:
    """The fleet that a cluster of jobs.toml names. Raises ConfigError where it names none."""
    if cluster.fleet is None:
        hint = (
            f'[clusters.{cluster.name}.fleet] with name = "..." and region = "...", as `pcluster'
            " list-clusters` has them"
        )
        raise ConfigError(f"clusters.{cluster.name} has no fleet", hint=hint)
    return cluster.fleet


def pcluster_command(fleet: Fleet, verb: str) -> list[str]:
    """The line of pcluster for start, stop or status."""
    where = ["--cluster-name", fleet.name, *(["--region", fleet.region] if fleet.region else [])]
    if verb == "status":
        return ["pcluster", "describe-compute-fleet", *where]
    return ["pcluster", "update-compute-fleet", *where, "--status", REQUESTS[verb]]


def status(fleet: Fleet) -> FleetStatus:
    """Ask. Raises TrainkitError (exit 8) with pcluster's own words."""
    return _ask(pcluster_command(fleet, "status"))


def change(
    fleet: Fleet,
    verb: str,
    seconds: float,
    notice: Callable[[FleetStatus], None] = lambda status: None,
    *,
    poll: float = POLL_SECONDS,
) -> FleetStatus:
    """Start or stop the fleet and wait until it is so; at once where it is already.

    Args:
        seconds: how long to wait.
        notice: called with every change on the way.

    Raises TrainkitError (exit 8) where it is not reached in time, or pcluster says that it goes
    another way (PROTECTED: nodes failed to boot).
    """
    seen = status(fleet)
    notice(seen)
    if seen.status == REACHED[verb]:
        return seen
    if seen.status not in ON_THE_WAY[verb]:
        seen = _ask(pcluster_command(fleet, verb))
        notice(seen)
    deadline = time.monotonic() + seconds
    asked = time.monotonic()
    while seen.status != REACHED[verb]:
        # it may show its former state for a moment
        if seen.status not in ON_THE_WAY[verb] and time.monotonic() - asked > 3 * poll:
            if seen.status == "PROTECTED":
                hint = (
                    "PROTECTED: its nodes failed to boot; `pcluster get-cluster-log-events`"
                    " says why"
                )
            else:
                hint = ""
            raise TrainkitError(
                f"fleet {fleet.name} was asked to {verb} and is {seen.status}",
                exit=Exit.START,
                hint=hint,
            )
        if time.monotonic() > deadline:
            message = (
                f"fleet {fleet.name} is {seen.status} {seconds:g} s after it was asked to {verb}"
            )
            raise TrainkitError(
                message,
                exit=Exit.START,
                hint="it goes on by itself; look again:"
                f" {' '.join(pcluster_command(fleet, 'status'))}",
            )
        time.sleep(poll)
        newer = status(fleet)
        if newer.status != seen.status:
            notice(newer)
        seen = newer
    return seen


def _ask(words: Sequence[str]) -> FleetStatus:
    if shutil.which(words[0]) is None:
        hint = (
            "`pip install aws-parallelcluster` into a virtual environment of its own; it is typed"
            " where your AWS credentials are, not on the head node"
        )
        raise TrainkitError(f"there is no {words[0]} on this machine", exit=Exit.START, hint=hint)
    line = " ".join(words[:2])
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise TrainkitError(
            f"{line} did not answer within {ANSWER_SECONDS:g} s", exit=Exit.START
        ) from None
    said = " ".join((done.stderr.strip() or done.stdout.strip()).split())
    if done.returncode != 0:
        raise TrainkitError(f"{line} exited with {done.returncode}: {said}", exit=Exit.START)
    try:
        answer = json.loads(done.stdout)
        return FleetStatus(str(answer["status"]), str(answer.get("lastStatusUpdatedTime", "")))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TrainkitError(
            f"{line} gave an answer of another form: {said[:200]}",
            exit=Exit.START,
            hint="pcluster 3 is needed",
        ) from None
