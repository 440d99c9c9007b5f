"""The units of a stage as Indexed Jobs of Kubernetes: one Job a level of what waits for what, made
when the one before it has gone well. An index is a pod that does its share of the units.

Units that wait for the network are done on this machine first: it has the credentials and the way
out. Whoever makes the Jobs waits for them; if it is killed, the next to come waits for the Job that
it has left, and makes the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import ClassVar

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, field, replace
from trainkit.jobs.clusters import StagePlace
from trainkit.jobs.kubernetes import NATIVE, quantity
from trainkit.jobs.sbatch import limit_seconds
from trainkit.jobs.schema import Job
from trainkit.launch.array_units import (
    POLL_SECONDS,
    ArrayLevel,
    ArrayUnit,
    array_levels,
    judge_units,
    level_file,
    local_lines,
    name_some,
    split_units,
    take_progress,
    write_level,
)
from trainkit.launch.kubernetes.documents import (
    Document,
    Documents,
    condition,
    is_true,
    name_of,
    rows_at,
    text_at,
    uid_of,
    value_at,
)
from trainkit.launch.kubernetes.kubectl import Kubectl, KubectlError
from trainkit.launch.kubernetes.manifest import (
    LONGEST_NAME,
    RUN_LABEL,
    array_manifest,
    dns_label,
    options_of,
    pod_resources,
)
from trainkit.launch.kubernetes.why_waiting import ask_why_waiting
from trainkit.launch.preparation import Notice, UnitRunner, direct_units
from trainkit.launch.remote_units import ALWAYS_LOCAL, remote_argv
from trainkit.launch.supervise.code_snapshot import take_snapshot
from trainkit.launch.supervise.orphan_sweep import PACKAGE
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.in_flight import ArraysInFlight, clear_in_flight, write_in_flight
from trainkit.stages.stamps import unit_folder
from trainkit.stages.unit_process import execute_locally

LAUNCHER = "kubernetes"
LOOK_SECONDS = 5.0  # between two questions why nothing runs, and which pods are stuck
STUCK_SECONDS = 15.0  # beyond its grace, after which a pod that is deleted is one of a dead node
END_SECONDS = 60.0  # beyond the grace of pods, until a Job that was deleted is over

ON_DEVICES = ("precompile",)  # stages whose units need what ranks have
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


def pod_units(job: Job, stage: str, notice: Notice) -> UnitRunner:
    """What runs the units of a stage of a job whose cluster is Kubernetes': pods where
    clusters.X.stages.STAGE asks for them, else this machine. See `direct_units`."""
    asked = job.cluster.stages.get(stage)
    if asked is None or stage in ALWAYS_LOCAL:
        return direct_units(job, stage, notice)
    return PodUnits(job, stage, asked, notice)


@dataclass(frozen=True)
class PodUnits:
    """The pods that run the units of a stage, but for those that wait for the network.

    Args:
        job: whose stage it is.
        stage: its name.
        asked: clusters.X.stages.STAGE.
        notice: called with a line for people.
    """

    job: Job
    stage: str
    asked: StagePlace
    notice: Notice

    on_this_machine: ClassVar[bool] = False

    @property
    def root(self) -> Path:
        return self.job.cluster.root_folder.absolute()

    @property
    def python(self) -> str:
        return self.job.cluster.python or "python3"

    def run(self, work: StageWork) -> None:
        """Run units: those for the network here, then the others as Jobs. Ctrl-C deletes the Job.

        A unit that fails does not stop the others of its level; what comes after is not begun.
        Finished ones are stamped: the next call does the rest.

        Raises TrainkitError: a unit's own, naming it; 8 if Kubernetes refuses the Job. Raises
        ConfigError where pods could not read an input.
        """
        here, there = split_units(work.units, in_image=True)
        if there:
            self._refuse_unseen(work.need)
        if here:
            execute_locally(replace(work, units=here))
        if not there:
            return
        code = take_snapshot(PACKAGE, self.root / "code").folder
        for level in array_levels(work.need, there, self.asked):
            self._run_level(work, level, code)

    def describe(self, need: Need, units: Sequence[Unit], folder: Path) -> list[str]:
        here, there = split_units(units, in_image=True)
        lines = local_lines(here)
        for number, level in enumerate(array_levels(need, there, self.asked)):
            after = " when the one before has gone well" if number else ""
            lines.append(f"would create, for {_words(level)}{after}:")
            name = f"{_stem(level)}-XXXXXXXX"
            manifest = self._manifest(level, name, folder, self.root / "code" / "SHA256")
            lines += [f"  {line}" for line in json.dumps(manifest, indent=2).splitlines()]
        return lines

    def _manifest(self, level: ArrayLevel, name: str, folder: Path, code: Path) -> Document:
        words = ["-I", "-m", "trainkit.stages.array_task", str(level_file(folder, level))]
        argv = remote_argv([sys.executable, *words], self.python, code)
        if prolog := self.job.cluster.prolog:
            lines = ["set -e", *prolog, 'exec "$@"']
            argv = ["/bin/bash", "-lc", "\n".join(lines), "prolog", *argv]
        count = len(level.shares)
        return array_manifest(
            self.job,
            name,
            argv,
            count,
            count,
            run=name,
            resources=self._resources(),
            seconds=limit_seconds({"time": self.asked.time}),
        )

    def _resources(self) -> dict[str, object]:
        """What a unit's pod gets: its part of a node's cores and memory."""
        if self.stage in ON_DEVICES:
            return pod_resources(self.job)
        given = options_of(self.job).resources
        parts = self.asked.tasks_per_node
        found: dict[str, object] = {}
        for name in NATIVE:
            if name in given:
                part = (quantity(given[name]) or 0) / parts
                found[name] = f"{int(part * 1000)}m" if name == "cpu" else int(part)
        return found

    def _refuse_unseen(self, need: Need) -> None:
        mounts = [volume.mount for volume in options_of(self.job).volumes]
        for path in need.inputs:
            if not any(path.absolute().is_relative_to(mount) for mount in mounts):
                where = f"clusters.{self.job.cluster.name}"
                raise ConfigError(
                    f"{need.stage} reads {path}, which no pod sees: none of"
                    f" {where}.kubernetes.volumes holds it",
                    hint=f"mount it at the same path, or remove {where}.stages.{self.stage}",
                )

    def _run_level(self, work: StageWork, level: ArrayLevel, code: Path) -> None:
        need = work.need
        kubectl = Kubectl.of(self.job.cluster)
        folder = unit_folder(work.stamps, need.name)
        path = level_file(folder, level)
        batches = write_level(
            need,
            level,
            work.stamps,
            path,
            lambda unit: remote_argv(unit.argv, self.python, code),
            self.job.cluster.env,
        )
        name = f"{_stem(level)}-{secrets.token_hex(4)}"
        making = ArraysInFlight(
            need.lock,
            need.name,
            "",
            (name,),
            (str(path),),
            (),
            f"pid {os.getpid()} on {os.uname().nodename}",
            LAUNCHER,
            kubectl.namespace,
            kubectl.context,
        )
        # before it is made: who is killed between the two leaves a name that can be asked for
        write_in_flight(work.stamps, making)
        try:
            made = kubectl.create(self._manifest(level, name, folder, code))
            self.notice(f"Job {name}: {_words(level)}")
            seen = self._follow(kubectl, made, batches, work)
            if left := judge_units(need, batches, work.stamps):
                raise self._unfinished(kubectl, seen, level, left)
        finally:
            with contextlib.suppress(KubectlError):  # the record stays, and the next to come waits
                if self._remove(kubectl, name):
                    clear_in_flight(work.stamps, need.name)

    def _follow(
        self, kubectl: Kubectl, made: Document, batches: Sequence[ArrayUnit], work: StageWork
    ) -> Document:
        """The Job, once it is over. That Kubernetes cannot be asked is said, and waited out: the
        pods go on without it. Raises TrainkitError (exit 6) where somebody deletes it."""
        look = _Look(kubectl, name_of(made), self.notice)
        with contextlib.closing(_sightings(kubectl, made, look)) as sightings:
            for seen in sightings:
                take_progress(batches, work.reporter)
                if seen is not None and job_is_over(seen):
                    return seen
        raise TrainkitError(
            f"Job {name_of(made)} was deleted before its units had ended",
            exit=Exit.STAGE_FAILED,
            hint="what is finished is kept: run it again",
        )

    def _remove(self, kubectl: Kubectl, name: str) -> bool:
        """Delete a Job; whether its pods are over then, which write until they are. Of a node that
        is gone they are not to be had."""
        look = _Look(kubectl, name, self.notice)
        deadline = time.monotonic() + options_of(self.job).grace + END_SECONDS
        said = False
        while remove_job(kubectl, name):
            if not said:
                self.notice(f"Job {name} is deleted; waiting for the end of its pods")
            said = True
            if time.monotonic() > deadline:
                return False
            look.end_stuck(pods_of(kubectl, name))
            time.sleep(POLL_SECONDS)
        return True

    def _unfinished(
        self, kubectl: Kubectl, seen: Document, level: ArrayLevel, left: Sequence[ArrayUnit]
    ) -> TrainkitError:
        """Which units a Job has not done, and what its pods said last."""
        indexes = parse_indexes(text_at(seen, "status", "failedIndexes"))
        failed = {unit.name for index in indexes for unit in level.shares[index]}
        names = [batch.units[0].name for batch in left]
        blamed = [name for name in names if name in failed] or names
        why = ""
        with contextlib.suppress(KubectlError):
            why = pod_words(kubectl, name_of(seen), indexes)
        if not why and is_true(seen, "Complete"):
            why = f"its pods ended well, and nothing that they made is seen in {self.root} here"
        why = why or text_at(condition(seen, "Failed"), "message")
        return TrainkitError(
            f"{name_some(blamed)} did not end: {why}",
            exit=Exit.STAGE_FAILED,
            hint=f"{left[0].folder}: *.log of units",
        )


@dataclass
class _Look:
    """What a person who waits for a Job should know.

    Args:
        kubectl: its namespace.
        name: of the Job.
        notice: called with a line, each once.
    """

    kubectl: Kubectl
    name: str
    notice: Notice
    said: str = ""
    # pods that are being deleted: since when, of time.monotonic()
    stuck: dict[str, float] = field(default_factory=dict)

    def say(self, words: str) -> None:
        if words != self.said:
            self.notice(words)
        self.said = words

    def at(self, seen: Document) -> None:
        """Say why nothing runs, and give up pods of nodes that are gone."""
        pods = pods_of(self.kubectl, self.name)
        self.end_stuck(pods)
        if any(text_at(pod, "status", "phase") == "Running" for pod in pods):
            return
        pending = [pod for pod in pods if text_at(pod, "status", "phase") == "Pending"]
        if words := ask_why_waiting(self.kubectl, seen, pending, [seen]):
            self.say(f"Job {self.name} waits: {words}")

    def end_stuck(self, pods: Documents) -> None:
        """Delete, without its node, what has outlived its deletion: no other pod takes its place
        before. Should it still run somewhere, it writes the same bytes, under names of its own
        until they are whole."""
        for pod in pods:
            if not text_at(pod, "metadata", "deletionTimestamp"):
                continue
            since = self.stuck.setdefault(uid_of(pod), time.monotonic())
            grace = float(text_at(pod, "metadata", "deletionGracePeriodSeconds") or 0)
            if time.monotonic() - since > grace + STUCK_SECONDS:
                node = text_at(pod, "spec", "nodeName")
                self.kubectl.delete("pods", name_of(pod), uid=uid_of(pod), force=True)
                self.notice(f"pod {name_of(pod)} is given up: its node {node} does not answer")


def _sightings(
    kubectl: Kubectl, made: Document, look: _Look
) -> Generator[Document | None, None, None]:
    """The Job at each change, None now and then without one, until it is gone."""
    name = name_of(made)
    uid = uid_of(made)
    due = time.monotonic() + LOOK_SECONDS
    while True:
        watch = kubectl.watch("jobs", f"{RUN_LABEL}={name}", POLL_SECONDS)
        try:
            for event in watch:
                if event is not None and uid_of(event.object) == uid:
                    if event.type == "DELETED":
                        return
                    yield event.object
                elif time.monotonic() < due:
                    yield None
                else:
                    seen = kubectl.get("jobs", name)
                    if seen is None or uid_of(seen) != uid:
                        return
                    look.at(seen)
                    due = time.monotonic() + LOOK_SECONDS
        except KubectlError as error:
            look.say(f"cannot ask Kubernetes about Job {name} ({error.message}); asking again")
            yield None
            time.sleep(LOOK_SECONDS)
        finally:
            watch.close()


def pods_of(kubectl: Kubectl, name: str) -> Documents:
    """The pods of a Job of ours that are not over."""
    found = kubectl.list("pods", f"{RUN_LABEL}={name}")
    return [pod for pod in found if text_at(pod, "status", "phase") not in ("Succeeded", "Failed")]


def job_is_over(seen: Document) -> bool:
    """Whether no pod of a Job runs any more: Kubernetes says so only then."""
    return is_true(seen, "Complete") or is_true(seen, "Failed")


def remove_job(kubectl: Kubectl, name: str) -> bool:
    """Delete a Job of ours, if it is there; whether its pods may still write."""
    seen = kubectl.get("jobs", name)
    if seen is not None and not text_at(seen, "metadata", "deletionTimestamp"):
        kubectl.delete("jobs", name, uid=uid_of(seen))
    return not (seen is not None and job_is_over(seen)) and bool(pods_of(kubectl, name))


def parse_indexes(text: str) -> list[int]:
    """The numbers of "0-2,5", as a Job's status has them."""
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found


def pod_words(kubectl: Kubectl, name: str, indexes: Sequence[int]) -> str:
    """How the newest failed pod of the first of some indexes of a Job ended, and what it printed
    last; "" where there is none. Raises KubectlError."""
    pods = kubectl.list("pods", f"{RUN_LABEL}={name}", "status.phase=Failed")
    wanted = [
        pod for pod in pods if text_at(pod, "metadata", "labels", INDEX_LABEL) in map(str, indexes)
    ]
    for pod in sorted(wanted, key=lambda pod: text_at(pod, "metadata", "creationTimestamp"))[-1:]:
        where = f"pod {name_of(pod)} on {text_at(pod, 'spec', 'nodeName')}"
        said = [text_at(pod, "status", "reason"), text_at(pod, "status", "message")]
        for container in rows_at(pod, "status", "containerStatuses"):
            if value_at(container, "state", "terminated"):
                said += [text_at(container, "state", "terminated", "reason")]
                said += [f"exit code {text_at(container, 'state', 'terminated', 'exitCode')}"]
        with contextlib.suppress(KubectlError):  # its node may be gone
            said += kubectl.log(name_of(pod), lines=20).strip().splitlines()[-1:]
        return f"{where}: {', '.join(filter(None, said))}"
    return ""


def _stem(level: ArrayLevel) -> str:
    """The name of a level's Jobs, without what tells one from another."""
    name, _, number = level.name.rpartition("-")
    return f"{dns_label(name, LONGEST_NAME - 10 - len(number))}-{number}"


def _words(level: ArrayLevel) -> str:
    count = sum(map(len, level.shares))
    pods = len(level.shares)
    return f"{count} unit{'s' * (count > 1)} in {pods} pod{'s' * (pods > 1)}"


class PodUnitsInFlight:
    """Asks about Jobs that others have made. That Kubernetes cannot be asked is said once, and
    waited out: nobody knows that they are over. A Job that is over is deleted.

    It is the `StillRunning` of `update_stage`.
    """

    def __init__(self, notice: Notice) -> None:
        self._notice = notice
        self._looks: dict[str, _Look] = {}

    def __call__(self, making: ArraysInFlight) -> bool:
        kubectl = Kubectl(making.namespace or "", making.context or "")
        (name,) = making.jobs
        look = self._looks.setdefault(name, _Look(kubectl, name, self._notice))
        try:
            seen = kubectl.get("jobs", name)
            if seen is not None and not job_is_over(seen):
                look.at(seen)
                return True
            look.end_stuck(pods_of(kubectl, name))
            return remove_job(kubectl, name)
        except KubectlError as error:
            if shutil.which("kubectl") is None:
                raise
            look.say(f"cannot ask about {making.words()} ({error.message}); asking again")
            return True
