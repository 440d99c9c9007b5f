"""JobSets of one run: made, looked at, and deleted until nothing of them is left. Where a person
types, and in the supervisor's pod where that has the rights."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.jobs.resolved import read_job
from trainkit.jobs.schema import Job
from trainkit.launch.kubernetes.documents import (
    Document,
    is_true,
    name_of,
    text_at,
    uid_of,
)
from trainkit.launch.kubernetes.kubectl import PASSING, Kubectl, KubectlError
from trainkit.launch.kubernetes.manifest import (
    JOBSET_LABEL,
    jobset_manifest,
    jobset_name,
    options_of,
)
from trainkit.launch.kubernetes.why_waiting import JOB_UID_LABEL
from trainkit.launch.protocol.pod_call import CANCELLED, WORKERS, jobset_folder
from trainkit.launch.supervise.agent_pool import stop_seconds
from trainkit.runs.folder import RunFolder
from trainkit.runs.kubernetes import (
    SubmittedJobSet,
    add_jobset,
    change_jobset,
    drop_jobset,
    read_jobsets,
)

POLL_SECONDS = 0.5
PODS_PER_SECOND = 200  # that Kubernetes ends, about: asking costs as much as there are
ROOM_SECONDS = 60.0  # beyond the pods' grace, for an end
NAMED = 5  # of what is left
LOOKED_AT = 20  # nodes at once, each by a call of kubectl, beside those known to be gone

Notice = Callable[[str], None]


@dataclass
class OwnJobSets:
    """The JobSets of a run.

    Args:
        job: the run's.
        run: its folder.
        kubectl: its namespace.
    """

    job: Job
    run: RunFolder
    kubectl: Kubectl
    # when a pod's node was first seen to be gone, by the pod's uid and time.monotonic()
    _gone_since: dict[str, float] = field(default_factory=dict)
    _said: str = ""

    @classmethod
    def of(cls, run: RunFolder) -> OwnJobSets:
        """Where a person types."""
        job = read_job(run.job)
        return cls(job, run, Kubectl.of(job.cluster))

    @classmethod
    def in_pod(cls, job: Job, run: RunFolder) -> OwnJobSets | None:
        """In a pod of the run; None where pods have no rights."""
        options = options_of(job)
        if options.service_account is None:
            return None
        return cls(job, run, Kubectl(options.namespace, in_pod=True))

    def submit(self, *, first_attempt: int, left_out: Sequence[str] = ()) -> SubmittedJobSet:
        """Make the run's next JobSet. It is noted before it is made: who dies between the two
        leaves a name that can be asked for. Raises TrainkitError (exit 8) where it is refused;
        then nothing is noted."""
        number = len(read_jobsets(self.run)) + 1
        name = jobset_name(self.job, self.run, number)
        add_jobset(self.run, name, first_attempt=first_attempt, left_out=left_out)
        try:
            made = self.kubectl.create(jobset_manifest(self.job, self.run, name, left_out=left_out))
        except KubectlError as error:
            if error.reason not in PASSING:
                drop_jobset(self.run, name)
                raise
            raise TrainkitError(
                f"{error.message}; whether JobSet {name} was made is not known",
                exit=Exit.START,
                hint=f"invoke status {self.run.id} knows once Kubernetes answers",
            ) from None
        change_jobset(self.run, name, uid=uid_of(made), ended=None)
        return read_jobsets(self.run)[-1]

    def remove(self, entry: SubmittedJobSet, *, force: bool = False) -> None:
        """Delete a JobSet and wait until nothing of it is left. Raises TrainkitError (exit 13),
        naming it, where something is.

        Args:
            entry: the JobSet.
            force: do not wait for pods whose node is gone.
        """
        kubectl = self.kubectl
        seen = kubectl.get("jobsets", entry.name)
        # of that name another may have been made by somebody else
        if seen is not None and uid_of(seen) == (entry.uid or uid_of(seen)):
            kubectl.delete("jobsets", entry.name, uid=uid_of(seen))
        deadline = time.monotonic() + options_of(self.job).grace + ROOM_SECONDS
        while left := self.left_of(entry):
            if force:
                self.replace_lost(entry.name, lambda _: None)
            if time.monotonic() > deadline:
                words = ", ".join(f"{kind} {name}" for kind, name in left[:NAMED])
                words += f" and {len(left) - NAMED:,} more" if len(left) > NAMED else ""
                raise TrainkitError(
                    f"JobSet {entry.name} was deleted, and Kubernetes still has {words}",
                    exit=Exit.CONTACT_LOST,
                    hint=(
                        "a pod of a node that is gone ends when the node is back, or by"
                        " `kubectl delete pod --force --grace-period=0` once it surely is"
                    ),
                )
            time.sleep(POLL_SECONDS + len(left) / PODS_PER_SECOND)

    def left_of(self, entry: SubmittedJobSet) -> list[tuple[str, str]]:
        """(kind, name) of all that is left of a JobSet."""
        asked = dict.fromkeys(("jobs", "pods", "services"), f"{JOBSET_LABEL}={entry.name}")
        if options_of(self.job).queue is not None and entry.uid:
            asked["workloads"] = f"{JOB_UID_LABEL}={entry.uid}"
        found = [
            (kind[:-1], name_of(each))
            for kind, selector in asked.items()
            for each in self.kubectl.list(kind, selector)
        ]
        jobset = self.kubectl.get("jobsets", entry.name)
        return [*found, *([("jobset", entry.name)] if jobset is not None else [])]

    def cancel(self, entry: SubmittedJobSet) -> None:
        """Remove it, and let its supervisor know that the run is not to go on. Raises as
        `remove`."""
        folder = jobset_folder(self.run.path, entry.name)
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / CANCELLED, "")
        try:
            self.remove(entry, force=True)
        except KubectlError:  # it may not have been deleted, and goes on
            (folder / CANCELLED).unlink()
            raise

    def remove_others(self, kept: str, notice: Notice) -> None:
        """Remove earlier JobSets of the run."""
        for entry in read_jobsets(self.run):
            if entry.name == kept:
                return
            try:
                self.remove(entry, force=True)
            except TrainkitError as error:
                notice(error.message)

    def replace_lost(self, name: str, notice: Notice, heard: Collection[int] = frozenset()) -> None:
        """Delete pods of nodes that have been gone for so long that what ran there has surely
        stopped, so that Kubernetes starts others. To be called again and again.

        Args:
            name: of the JobSet.
            notice: is called with what was done, or not allowed.
            heard: indexes of pods that live, whatever Kubernetes knows of their nodes.
        """
        try:
            pods = [
                pod
                for pod in self.kubectl.list("pods", f"{JOBSET_LABEL}={name}")
                if _index(name, pod) not in heard
            ]
            on_nodes = [(pod, node) for pod in pods if (node := text_at(pod, "spec", "nodeName"))]
            gone = {node for pod, node in on_nodes if uid_of(pod) in self._gone_since}
            asked = gone.union(sorted({node for _, node in on_nodes} - gone)[:LOOKED_AT])
            ready = {node for node in asked if is_true(self.kubectl.get("nodes", node), "Ready")}
            for pod, node in on_nodes:
                if node in ready:
                    self._gone_since.pop(uid_of(pod), None)
                if node in ready or node not in asked:
                    continue
                since = self._gone_since.setdefault(uid_of(pod), time.monotonic())
                if time.monotonic() - since >= stop_seconds(self.job):
                    self.kubectl.delete("pods", name_of(pod), uid=uid_of(pod), force=True)
                    notice(f"pod {name_of(pod)} is given up: its node {node} is gone")
        except TrainkitError as error:
            if error.message != self._said:  # a right that is missing is so each time
                notice(error.message)
            self._said = error.message


def _index(jobset: str, pod: Document) -> int | None:
    """The index of a pod that has ranks."""
    number = name_of(pod).removeprefix(f"{jobset}-{WORKERS}-0-").partition("-")[0]
    return int(number) if number.isdigit() else None
