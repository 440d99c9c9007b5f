"""The Job controller: pods of Jobs, and what becomes of the Jobs."""

from __future__ import annotations

import copy
import time
from collections import defaultdict
from dataclasses import dataclass, field

from tests.kubernetes.api_client import Client, Loop
from tests.kubernetes.kinds import (
    Object,
    condition,
    ended,
    is_true,
    now,
    owned_by,
    owner_of,
    seconds_of,
    set_condition,
)
from tests.kubernetes.problems import Refused

TRACKING = "batch.kubernetes.io/job-tracking"
INDEX = "batch.kubernetes.io/job-completion-index"
FAILURES = "batch.kubernetes.io/job-index-failure-count"
AT_ONCE = 500  # pods made in one go


def read_indexes(text: str) -> set[int]:
    """From "0-3,5"."""
    found: set[int] = set()
    for each in filter(None, text.split(",")):
        first, _, last = each.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def write_indexes(indexes: set[int]) -> str:
    """As the Job controller does: "0,1" for two, "0-2" for more in a row."""
    parts: list[str] = []
    rest = sorted(indexes)
    while rest:
        length = 1
        while length < len(rest) and rest[length] == rest[0] + length:
            length += 1
        if length > 2:
            parts.append(f"{rest[0]}-{rest[length - 1]}")
        else:
            parts += map(str, rest[:length])
        rest = rest[length:]
    return ",".join(parts)


def index_of(pod: Object) -> int:
    """-1 where it has none."""
    return int((pod["metadata"].get("annotations") or {}).get(INDEX, -1))


def is_finished(job: Object) -> str:
    """Complete, Failed or nothing."""
    return next((each for each in ("Complete", "Failed") if is_true(job, each)), "")


def is_active(pod: Object) -> bool:
    return not ended(pod) and "deletionTimestamp" not in pod["metadata"]


def is_terminating(pod: Object) -> bool:
    return not ended(pod) and "deletionTimestamp" in pod["metadata"]


def is_tracked(pod: Object) -> bool:
    """Whether the Job has not yet counted it."""
    return TRACKING in (pod["metadata"].get("finalizers") or [])


def has_failed(job: Object, pod: Object) -> bool:
    """Whether a pod counts as failed: one that is being deleted does at once, unless only failed
    ones are replaced."""
    if pod["status"].get("phase") == "Failed":
        return True
    return job["spec"]["podReplacementPolicy"] != "Failed" and is_terminating(pod)


def policy_of(job: Object, pod: Object) -> tuple[str, str]:
    """The action of the first rule of the podFailurePolicy that a failed pod matches, and the
    message for FailJob; Count where none does."""
    meta = pod["metadata"]
    named = f"{meta['namespace']}/{meta['name']}"
    for number, rule in enumerate((job["spec"].get("podFailurePolicy") or {}).get("rules") or []):
        said = f"matching {rule['action']} rule at index {number}"
        if codes := rule.get("onExitCodes"):
            for each in pod["status"].get("containerStatuses") or []:
                code = each.get("state", {}).get("terminated", {}).get("exitCode", 0)
                if code == 0 or codes.get("containerName") not in (None, each["name"]):
                    continue
                if (code in codes["values"]) == (codes["operator"] == "In"):
                    text = f"Container {each['name']} for pod {named} failed with exit code {code}"
                    return rule["action"], f"{text} {said}"
        for wanted in rule.get("onPodConditions") or []:
            if condition(pod, wanted["type"]).get("status") == wanted.get("status", "True"):
                return rule["action"], f"Pod {named} has condition {wanted['type']} {said}"
    return "Count", ""


@dataclass
class Sync:
    """One look at one Job."""

    job: Object
    pods: list[Object]
    succeeded: set[int] = field(default_factory=set)  # indexes
    failed: set[int] = field(default_factory=set)
    count_succeeded: int = 0
    count_failed: int = 0
    finishing: tuple[str, str, str] | None = None  # type, reason and message of a condition

    @property
    def spec(self) -> Object:
        return dict(self.job["spec"])

    @property
    def indexed(self) -> bool:
        return bool(self.job["spec"]["completionMode"] == "Indexed")

    @property
    def per_index(self) -> bool:
        return self.job["spec"].get("backoffLimitPerIndex") is not None


class JobController(Loop):
    kinds = ("jobs", "pods", "resourcequotas")

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        # seconds that a replacement waits after the first failure, and twice that after the next;
        # 10 on a real cluster
        self.pod_backoff = 0.0
        self._last_failure: dict[str, tuple[int, float]] = {}  # by uid: how many, when

    def sync(self) -> float | None:
        pods: dict[str, list[Object]] = defaultdict(list)
        for pod in self.client.all("pods"):
            pods[owner_of(pod).get("uid", "")].append(pod)
        waits = []
        for job in self.client.all("jobs"):
            wait = self._sync_job(job, pods[job["metadata"]["uid"]])
            if wait is not None:
                waits.append(wait)
        return min(waits, default=None)

    def _sync_job(self, job: Object, pods: list[Object]) -> float | None:
        if is_finished(job) or "deletionTimestamp" in job["metadata"]:
            for pod in filter(is_tracked, pods):
                self.client.drop_finalizer(pod, TRACKING)
            return self._ttl(job)
        sync = Sync(job, pods)
        self._count(sync)
        self._judge(sync)
        wait = None
        if sync.finishing is not None:
            for pod in filter(is_active, pods):
                self.client.delete(pod)
            self._refresh(sync)
        else:
            wait = self._manage(sync)
            self._refresh(sync)
            done = len(sync.succeeded) if sync.indexed else sync.count_succeeded
            completions = job["spec"].get("completions")
            alive = any(is_active(pod) for pod in sync.pods)
            if not alive and done >= (1 if completions is None else completions):
                text = "Reached expected number of succeeded pods"
                sync.finishing = ("SuccessCriteriaMet", "CompletionsReached", text)
        self._track(sync)
        return wait

    def _refresh(self, sync: Sync) -> None:
        """Look at the pods again: only those that are counted may be let go."""
        sync.pods = self._fresh(sync.job)
        self._count(sync)

    def _fresh(self, job: Object) -> list[Object]:
        uid, namespace = job["metadata"]["uid"], job["metadata"]["namespace"]
        pods = self.client.all("pods", namespace)
        return [pod for pod in pods if owner_of(pod).get("uid") == uid]

    def _ttl(self, job: Object) -> float | None:
        seconds = job["spec"].get("ttlSecondsAfterFinished")
        if seconds is None or not is_finished(job) or "deletionTimestamp" in job["metadata"]:
            return None
        finished = condition(job, is_finished(job))["lastTransitionTime"]
        left = float(seconds) - (time.time() - seconds_of(finished))
        if left <= 0:
            self.client.delete(job, policy="Foreground")
        return max(left, 0.05)

    def _count(self, sync: Sync) -> None:
        """What the Job's status has, and what it has not yet counted."""
        status, job = sync.job["status"], sync.job
        sync.succeeded = read_indexes(status.get("completedIndexes", ""))
        sync.failed = read_indexes(status.get("failedIndexes", ""))
        sync.count_succeeded = status.get("succeeded", 0)
        sync.count_failed = status.get("failed", 0)
        waiting = status.get("uncountedTerminatedPods") or {}
        counted = {*waiting.get("succeeded", []), *waiting.get("failed", [])}
        for pod in filter(is_tracked, sync.pods):
            new = pod["metadata"]["uid"] not in counted
            if pod["status"].get("phase") == "Succeeded":
                sync.succeeded.add(index_of(pod))
                sync.count_succeeded += new
            elif has_failed(job, pod):
                action, _ = policy_of(job, pod)
                sync.count_failed += new and action != "Ignore"
                if sync.per_index and (action == "FailIndex" or self._exceeds(sync, pod)):
                    sync.failed.add(index_of(pod))
        sync.succeeded.discard(-1)
        sync.failed -= sync.succeeded

    def _failures(self, job: Object, pod: Object) -> int:
        """How often its index has failed, itself included."""
        before = int((pod["metadata"].get("annotations") or {}).get(FAILURES, 0))
        return before + (policy_of(job, pod)[0] != "Ignore")

    def _exceeds(self, sync: Sync, pod: Object) -> bool:
        return self._failures(sync.job, pod) > int(sync.spec["backoffLimitPerIndex"])

    def _judge(self, sync: Sync) -> None:
        """Whether the Job is to end, and how."""
        job, spec = sync.job, sync.spec
        for name in ("SuccessCriteriaMet", "FailureTarget"):
            if is_true(job, name):
                there = condition(job, name)
                sync.finishing = (name, there.get("reason", ""), there.get("message", ""))
                return
        for pod in sync.pods:
            if has_failed(job, pod) and (found := policy_of(job, pod))[0] == "FailJob":
                sync.finishing = ("FailureTarget", "PodFailurePolicy", found[1])
                return
        past = None
        if spec.get("activeDeadlineSeconds") and job["status"].get("startTime"):
            past = time.time() - seconds_of(job["status"]["startTime"])
        said = ""
        if sync.count_failed > spec["backoffLimit"]:
            said = "BackoffLimitExceeded|Job has reached the specified backoff limit"
        elif past is not None and not spec["suspend"] and past >= spec["activeDeadlineSeconds"]:
            said = "DeadlineExceeded|Job was active longer than specified deadline"
        elif sync.per_index and sync.failed:
            if len(sync.failed) > spec.get("maxFailedIndexes", len(sync.failed)):
                said = "MaxFailedIndexesExceeded|Job has exceeded the specified maximal number of"
                said += " failed indexes"
            elif len(sync.failed) + len(sync.succeeded) >= spec["completions"]:
                said = "FailedIndexes|Job has failed indexes"
        if said:
            reason, _, message = said.partition("|")
            sync.finishing = ("FailureTarget", reason, message)

    def _manage(self, sync: Sync) -> float | None:
        """Make or delete pods; seconds after which to look again."""
        job, spec = sync.job, sync.spec
        active = [pod for pod in sync.pods if is_active(pod)]
        if spec["suspend"]:
            for pod in active:  # these do not count as failed
                self.client.drop_finalizer(pod, TRACKING)
                self.client.delete(pod)
            return None
        terminating = [pod for pod in sync.pods if is_terminating(pod)]
        done = len(sync.succeeded) if sync.indexed else sync.count_succeeded
        completions = spec.get("completions")
        wanted = spec["parallelism"]
        if completions is not None:
            wanted = min(wanted, completions - done)
        elif done:
            wanted = len(active)
        blocking = terminating if spec["podReplacementPolicy"] == "Failed" else []
        missing = min(wanted - len(active) - len(blocking), AT_ONCE)
        if missing <= 0:
            return 0.5 if spec.get("activeDeadlineSeconds") else None
        if (wait := self._backoff(sync)) > 0:
            return wait
        taken = {index_of(pod) for pod in (*active, *blocking)} | sync.succeeded | sync.failed
        indexes = [-1] * missing
        if sync.indexed:
            free = (index for index in range(completions or 0) if index not in taken)
            indexes = [index for index, _ in zip(free, range(missing), strict=False)]
        for index in indexes:
            try:
                self._create(sync, index)
            except Refused as refused:
                text = f"Error creating: {refused}"
                self.client.event(job, "Warning", "FailedCreate", text, "job-controller")
                return 0.3
        return None

    def _backoff(self, sync: Sync) -> float:
        """Seconds until pods may be made after the last failure."""
        uid, failed = sync.job["metadata"]["uid"], sync.count_failed
        before, when = self._last_failure.get(uid, (0, 0.0))
        if failed > before:
            when = time.monotonic()
            self._last_failure[uid] = (failed, when)
        if not failed or not self.pod_backoff:
            return 0.0
        return when + self.pod_backoff * 2.0 ** (failed - 1) - time.monotonic()

    def _create(self, sync: Sync, index: int) -> None:
        job = sync.job
        pod = copy.deepcopy({key: job["spec"]["template"][key] for key in ("metadata", "spec")})
        pod["kind"] = "Pod"
        name, meta = job["metadata"]["name"], pod["metadata"]
        meta |= {**owned_by(job), "namespace": job["metadata"]["namespace"]}
        meta |= {"generateName": f"{name}-", "finalizers": [TRACKING]}
        if index >= 0:
            meta["generateName"] = f"{name}-{index}-"
            meta.setdefault("annotations", {})[INDEX] = str(index)
            meta.setdefault("labels", {})[INDEX] = str(index)
            pod["spec"]["hostname"] = f"{name}-{index}"
            if sync.per_index:
                of_index = [each for each in sync.pods if index_of(each) == index]
                failures = [self._failures(job, each) for each in of_index if ended(each)]
                meta["annotations"][FAILURES] = str(max(failures, default=0))
            from_label = {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX}']"}}
            for each in pod["spec"]["containers"]:
                variable = {"name": "JOB_COMPLETION_INDEX", "valueFrom": from_label}
                each.setdefault("env", []).append(variable)
        made = self.client.create(pod)
        text = f"Created pod: {made['metadata']['name']}"
        self.client.event(job, "Normal", "SuccessfulCreate", text, "job-controller")

    def _track(self, sync: Sync) -> None:
        """Write what is known to the status, then let go of the pods that it counts; say that the
        Job has ended when none is left that terminates."""
        self._write(sync, final=False)
        for pod in filter(is_tracked, sync.pods):
            failed = has_failed(sync.job, pod)
            over = sync.finishing is not None or pod["status"].get("phase") == "Succeeded"
            if over or (failed and not self._delayed(sync, pod)):
                self.client.drop_finalizer(pod, TRACKING)
        if sync.finishing and not any(is_terminating(pod) for pod in self._fresh(sync.job)):
            self._write(sync, final=True)

    def _delayed(self, sync: Sync, pod: Object) -> bool:
        """Whether a failed pod is still needed, to hand its count of failures on."""
        index = index_of(pod)
        if not sync.per_index or index in sync.failed:
            return False
        return not any(is_active(each) and index_of(each) == index for each in sync.pods)

    def _write(self, sync: Sync, *, final: bool) -> None:
        job, spec = sync.job, sync.spec
        pods = self._fresh(job) if final else sync.pods
        counted = [pod for pod in pods if is_tracked(pod)]

        def change(status: Object) -> None:
            active = [pod for pod in pods if is_active(pod)]
            status["active"] = len(active)
            status["ready"] = sum(is_true(pod, "Ready") for pod in active)
            status["terminating"] = sum(map(is_terminating, pods))
            self._write_counts(sync, status, counted if not final else [])
            suspended = bool(spec["suspend"])
            if not suspended and "startTime" not in status:
                status["startTime"] = now()
            if sync.finishing is None:
                self._write_suspended(job, status, suspended)
                return
            name, reason, message = sync.finishing
            set_condition(status, name, "True", reason, message)
            if final:
                last = "Failed" if name == "FailureTarget" else "Complete"
                set_condition(status, last, "True", reason, message)
                if last == "Complete":
                    status["completionTime"] = now()

        before = is_finished(self.client.find("jobs", *self._key(job)) or job)
        new = self.client.update_status(job, change)
        if new is not None and is_finished(new) and not before and sync.finishing:
            bad = is_finished(new) == "Failed"
            said = sync.finishing[1:] if bad else ("Completed", "Job completed")
            kind = "Warning" if bad else "Normal"
            self.client.event(job, kind, *said, "job-controller")

    def _key(self, job: Object) -> tuple[str, str]:
        return job["metadata"]["namespace"], job["metadata"]["name"]

    def _write_counts(self, sync: Sync, status: Object, counted: list[Object]) -> None:
        """Pods that still carry the finalizer are counted once, by their uids."""
        seen = status.get("uncountedTerminatedPods") or {}
        old = {*seen.get("succeeded", []), *seen.get("failed", [])}
        waiting: dict[str, list[str]] = {"succeeded": [], "failed": []}
        for pod in counted:
            uid = pod["metadata"]["uid"]
            key = "succeeded" if pod["status"].get("phase") == "Succeeded" else "failed"
            if key == "failed" and not self._counts(sync, pod):
                continue
            if uid not in old:
                status[key] = status.get(key, 0) + 1
            waiting[key].append(uid)
        status["uncountedTerminatedPods"] = {key: uids for key, uids in waiting.items() if uids}
        if sync.indexed:
            status["completedIndexes"] = write_indexes(sync.succeeded)
            status["succeeded"] = len(sync.succeeded)
            if sync.per_index:
                status["failedIndexes"] = write_indexes(sync.failed)

    def _counts(self, sync: Sync, pod: Object) -> bool:
        """Whether a pod that did not succeed counts as failed now."""
        if has_failed(sync.job, pod):
            return policy_of(sync.job, pod)[0] != "Ignore"
        return sync.finishing is not None and sync.finishing[0] == "FailureTarget"

    def _write_suspended(self, job: Object, status: Object, suspended: bool) -> None:
        there = {"status": status}
        if suspended and not is_true(there, "Suspended"):
            set_condition(status, "Suspended", "True", "JobSuspended", "Job suspended")
            self.client.event(job, "Normal", "Suspended", "Job suspended", "job-controller")
        elif not suspended and is_true(there, "Suspended"):
            set_condition(status, "Suspended", "False", "JobResumed", "Job resumed")
            status["startTime"] = now()
            self.client.event(job, "Normal", "Resumed", "Job resumed", "job-controller")
