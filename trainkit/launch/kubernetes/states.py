"""A run's state where its folder alone cannot tell it: Kubernetes says whether its JobSet waits,
runs or is over."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from trainkit.base.errors import Exit, TrainkitError
from trainkit.launch.kubernetes.documents import (
    Document,
    condition,
    is_true,
    name_of,
    rows_at,
    text_at,
    uid_of,
    value_at,
)
from trainkit.launch.kubernetes.kubectl import Kubectl
from trainkit.launch.kubernetes.manifest import JOBSET_LABEL, RUN_LABEL
from trainkit.launch.kubernetes.own_jobsets import OwnJobSets
from trainkit.launch.kubernetes.why_waiting import ask_why_waiting
from trainkit.launch.scheduler_contract import QueueReport
from trainkit.runs.events import newest_end
from trainkit.runs.folder import RunFolder
from trainkit.runs.kubernetes import SubmittedJobSet, change_jobset, newest_jobset
from trainkit.runs.record import RunRecord, read_run_record

AGAIN_SECONDS = 5.0  # before a watch that was refused begins again

CREATE_SECONDS = 180.0  # for a JobSet to be made, by an API server that is asked again and again
BY_KUBERNETES = ("infra", "preempted")


def is_over(seen: Document | None) -> bool:
    """Whether a JobSet has ended, or is gone."""
    return seen is None or is_true(seen, "Completed") or is_true(seen, "Failed")


def waits(seen: Document) -> bool:
    """Whether a JobSet that is not over has fewer pods at work than it is to have."""
    if value_at(seen, "spec", "suspend") is True:
        return True
    wanted = {
        job["name"]: value_at(job, "template", "spec", "completions")
        for job in rows_at(seen, "spec", "replicatedJobs")
    }
    ready = {
        row["name"]: row.get("ready", 0) for row in rows_at(seen, "status", "replicatedJobsStatus")
    }
    return any(ready.get(name) != pods for name, pods in wanted.items())


def reconcile(record: RunRecord, own: OwnJobSets, seen: Document | None) -> RunRecord:
    """The record as it is in the light of what Kubernetes says. An end that no supervisor has
    written is noted in the run folder: Kubernetes forgets.

    Args:
        record: read from the folder.
        own: the run's JobSets.
        seen: the newest of them; None: there is none of that name and uid any more.
    """
    entry = newest_jobset(record.run)
    if entry is None:
        return record
    if not is_over(seen):
        assert seen is not None
        ended = newest_end(record.run)
        goes_on = record.failure_class in BY_KUBERNETES and bool(ended and ended.budget)
        if waits(seen) and (record.lost or record.state == "unknown" or goes_on):
            return replace(record, state="queued", exit=None, failure_class=None, root_cause=None)
        return record
    if record.state != "queued" and not record.lost:
        return record
    noted = record.run.kubernetes.stat().st_mtime
    if seen is None and not entry.uid and time.time() - noted < CREATE_SECONDS:
        return record  # it is being made
    record = read_run_record(record.run)  # the supervisor may have ended it meanwhile
    if record.state != "queued" and not record.lost:
        return record
    change_jobset(record.run, entry.name, ended=_end(own.kubectl, entry, seen))
    return read_run_record(record.run)


def _end(kubectl: Kubectl, entry: SubmittedJobSet, seen: Document | None) -> dict[str, object]:
    """How a JobSet ended of which no supervisor tells."""
    if seen is None:
        if not entry.uid:
            message = f"JobSet {entry.name} was never made"
            return {"state": "FAILED", "message": message, "exit": int(Exit.START)}
        message = f"JobSet {entry.name} was deleted (kubectl delete, or its namespace)"
        return {"state": "CANCELLED", "message": message, "exit": int(Exit.CANCELLED)}
    said = text_at(condition(seen, "Failed"), "message")
    message = f"JobSet {entry.name} was over before its supervisor could say why: {said}"
    with contextlib.suppress(TrainkitError):
        if words := last_words(kubectl, entry.name):
            message += f"; {words}"
    return {"state": "FAILED", "message": message, "exit": int(Exit.START)}


def last_words(kubectl: Kubectl, name: str) -> str:
    """How the first pod of a JobSet that failed ended, and what it printed last."""
    for pod in kubectl.list("pods", f"{JOBSET_LABEL}={name}", "status.phase=Failed"):
        for container in rows_at(pod, "status", "containerStatuses"):
            if ended := value_at(container, "state", "terminated"):
                code = f"{text_at(ended, 'reason')} {text_at(ended, 'exitCode')}".strip()
                lines = kubectl.log(name_of(pod)).strip().splitlines()[-1:]
                return f"pod {name_of(pod)} ended ({code}): {' '.join(lines)}"
    return ""


def seen_jobset(own: OwnJobSets, entry: SubmittedJobSet) -> Document | None:
    """The JobSet of an entry; None where it is gone. Raises TrainkitError where Kubernetes cannot
    be asked."""
    return _of_entry(own.kubectl.get("jobsets", entry.name), entry)


def _of_entry(seen: Document | None, entry: SubmittedJobSet) -> Document | None:
    return seen if seen is not None and entry.uid in ("", uid_of(seen)) else None


def reconciled(record: RunRecord) -> RunRecord:
    """The record after one question to Kubernetes, where one is needed; as it was where that
    cannot be asked."""
    return reconciled_all([record])[0]


def reconciled_all(records: Sequence[RunRecord]) -> list[RunRecord]:
    """As `reconciled`, with one question for all runs of a namespace."""
    lists: dict[Kubectl, dict[str, Document]] = {}
    found = []
    for record in records:
        entry = newest_jobset(record.run)
        asks = record.state in ("queued", "unknown", "failed", "preempted")
        if not asks or entry is None or entry.ended is not None:
            found.append(record)
            continue
        own = OwnJobSets.of(record.run)
        try:
            if own.kubectl not in lists:
                lists[own.kubectl] = {name_of(e): e for e in own.kubectl.list("jobsets", RUN_LABEL)}
            seen = _of_entry(lists[own.kubectl].get(entry.name), entry)
            found.append(reconcile(record, own, seen))
        except TrainkitError:
            found.append(record)
    return found


def report(record: RunRecord) -> QueueReport | None:
    """Why the run's JobSet waits, in words; None where it does not."""
    entry = newest_jobset(record.run) if record.state in ("queued", "running") else None
    if entry is None:
        return None
    with contextlib.suppress(TrainkitError):
        own = OwnJobSets.of(record.run)
        seen = seen_jobset(own, entry)
        if seen is not None and not is_over(seen):
            words = waiting_words(own.kubectl, seen)
            if words or record.state == "queued":
                state = "waits" if waits(seen) else "runs"
                text = f"JobSet {entry.name} {state}{f': {words}' if words else ''}"
                values = {"name": entry.name, "state": state, "reason": words}
                return QueueReport(text, {"kubernetes": values})
    return None


def waiting_words(kubectl: Kubectl, seen: Document) -> str:
    """Why a JobSet waits; "" where it does not. Raises TrainkitError."""
    if not waits(seen):
        return ""
    selector = f"{JOBSET_LABEL}={name_of(seen)}"
    pods = kubectl.list("pods", selector, "status.phase=Pending")
    return ask_why_waiting(kubectl, seen, pods, kubectl.list("jobs", selector))


class JobSetFollower:
    """Follows a run's JobSet by a watch of its own."""

    def __init__(self, run: RunFolder) -> None:
        self.run = run
        self.own = OwnJobSets.of(run)
        self._changed = threading.Event()
        self._changed.set()
        self._said = ""
        threading.Thread(target=self._watch, name="watch of the JobSet", daemon=True).start()

    def _watch(self) -> None:
        """Wake `look` at each change, and now and then without one: pods wait for what no JobSet
        tells of."""
        while True:
            with contextlib.suppress(TrainkitError):
                for _ in self.own.kubectl.watch("jobsets", f"{RUN_LABEL}={self.run.id}"):
                    self._changed.set()
            time.sleep(AGAIN_SECONDS)
            self._changed.set()

    def look(self, record: RunRecord) -> tuple[RunRecord, str]:
        """(the record as settled, what a person who waits should know now; "" for nothing new)."""
        waiting = record.state in ("queued", "unknown", "failed", "preempted")
        entry = newest_jobset(self.run)
        if not waiting or entry is None:
            return record, ""
        if not self._changed.is_set():
            unsure = record.state == "unknown" or record.lost
            return (replace(record, state="queued") if unsure else record), ""
        self._changed.clear()
        try:
            seen = seen_jobset(self.own, entry)
            settled = reconcile(record, self.own, seen)
            words = waiting_words(self.own.kubectl, seen) if seen and not is_over(seen) else ""
        except TrainkitError as error:
            return replace(record, state="queued"), self._new(
                f"cannot ask Kubernetes about JobSet {entry.name}: {error.message}"
            )
        return settled, self._new(words)

    def _new(self, words: str) -> str:
        if words == self._said:
            return ""
        self._said = words
        return words
