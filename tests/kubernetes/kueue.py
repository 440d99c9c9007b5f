"""Kueue: when JobSets and Jobs with a queue may run, and which have to give way."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Iterator

from tests.kubernetes.api_client import Client, Loop
from tests.kubernetes.checks import requests_of
from tests.kubernetes.defaults import QUEUE
from tests.kubernetes.job_controller import is_finished
from tests.kubernetes.kinds import (
    OF_KIND,
    Object,
    condition,
    is_true,
    owned_by,
    owner_of,
    quantity,
    seconds_of,
    set_condition,
)

PRIORITY = "kueue.x-k8s.io/priority-class"
JOB_UID = "kueue.x-k8s.io/job-uid"


def workload_name(job: Object) -> str:
    """jobset-NAME-xxxxx."""
    kind, meta = OF_KIND[job["kind"]], job["metadata"]
    text = "\n".join([kind.kind, kind.group, meta["name"], meta["uid"]])
    start = f"{kind.kind.lower()}-{meta['name']}"[:247]
    return f"{start}-{hashlib.sha1(text.encode()).hexdigest()[:5]}"


def pod_sets(job: Object) -> Iterator[tuple[str, int, Object]]:
    """Name, number and template of the pods that a JobSet or Job makes."""
    if job["kind"] == "Job":
        yield "main", job["spec"]["parallelism"], job["spec"]["template"]
        return
    for each in job["spec"]["replicatedJobs"]:
        spec = each["template"]["spec"]
        count = min(spec.get("parallelism", 1), spec.get("completions") or 2**31)
        yield each["name"], each["replicas"] * count, spec["template"]


def _over(job: Object) -> str:
    """Succeeded, Failed or nothing."""
    if job["kind"] == "Job":
        return {"Complete": "Succeeded", "Failed": "Failed", "": ""}[is_finished(job)]
    if is_true(job, "Completed"):
        return "Succeeded"
    return "Failed" if is_true(job, "Failed") else ""


def _is_active(job: Object) -> bool:
    """By its status, as Kueue sees it."""
    status = job.get("status") or {}
    counts = [status, *(status.get("replicatedJobsStatus") or [])]
    return any(each.get("active", 0) > 0 for each in counts)


class Quota:
    """A ClusterQueue's: one flavor for all that it covers."""

    def __init__(self, queue: Object) -> None:
        self.name = queue["metadata"]["name"]
        self.preempts = (queue["spec"].get("preemption") or {}).get("withinClusterQueue", "Never")
        self.stopped = queue["spec"].get("stopPolicy", "None") != "None"
        self.nominal: dict[str, float] = {}
        self.flavor: dict[str, str] = {}
        for group in queue["spec"].get("resourceGroups") or []:
            flavor = group["flavors"][0]
            for each in flavor["resources"]:
                self.nominal[each["name"]] = quantity(each["nominalQuota"])
                self.flavor[each["name"]] = flavor["name"]

    def why_not(self, workload: Object, used: Counter[str]) -> tuple[str, str]:
        """Reason and message of what keeps a workload waiting; two empty ones where it fits."""
        total: Counter[str] = Counter()
        for each in workload["spec"]["podSets"]:
            start = f"couldn't assign flavors to pod set {each['name']}: "
            for name, amount in requests_of(each["template"]["spec"]).items():
                total[name] += int(amount * each["count"] * 1000)
                wanted, most = total[name] / 1000, self.nominal.get(name)
                if most is None:
                    return "NoMatchingFlavor", f"{start}resource {name} unavailable in ClusterQueue"
                here = f"{name} in flavor {self.flavor[name]}"
                if wanted > most:
                    text = "previously considered podsets requests (0) + current podset request"
                    said = f"insufficient quota for {here}, {text} ({wanted:g}) > maximum"
                    return "ExceedsMaxQuota", f"{start}{said} capacity ({most:g})"
                if (more := wanted + used[name] / 1000 - most) > 0:
                    said = f"insufficient unused quota for {here}, {more:g} more needed"
                    return "WaitingForQuota", start + said
        return "", ""


def usage_of(workload: Object) -> Counter[str]:
    """Thousandths of what a workload's pods ask for."""
    total: Counter[str] = Counter()
    for each in workload["spec"]["podSets"]:
        for name, amount in requests_of(each["template"]["spec"]).items():
            total[name] += int(amount * each["count"] * 1000)
    return total


class Kueue(Loop):
    kinds = ("jobsets", "jobs", "pods", "workloads", "localqueues", "clusterqueues")

    def __init__(self, client: Client) -> None:
        super().__init__(client)
        self._held: dict[str, float] = {}  # uid of a workload: not again until then
        self._wanted: dict[str, tuple[str, float]] = {}  # uid of a job: why, and for how long

    def evict(self, uid: str, reason: str, seconds: float) -> None:
        """Evict the workload of a job, and admit it again no earlier than so many seconds after
        what it held is free."""
        self._wanted[uid] = (reason, seconds)

    def admit_again(self) -> None:
        """What was evicted need not wait any longer."""
        self._held.clear()

    def sync(self) -> float | None:
        jobs = {
            job["metadata"]["uid"]: job
            for plural in ("jobsets", "jobs")
            for job in self.client.all(plural)
            if QUEUE in (job["metadata"].get("labels") or {}) and not owner_of(job)
        }
        workloads = {owner_of(each).get("uid", ""): each for each in self.client.all("workloads")}
        for uid, job in jobs.items():
            if "deletionTimestamp" in job["metadata"]:
                continue
            if uid not in workloads:
                workloads[uid] = self._make(job)
            else:
                self._follow(job, workloads[uid])
        return self._admit(jobs)

    def _make(self, job: Object) -> Object:
        meta = job["metadata"]
        labels = meta["labels"]
        of_class = self.client.find("workloadpriorityclasses", "", labels.get(PRIORITY, ""))
        spec: Object = {"active": True, "queueName": labels[QUEUE], "priority": 0}
        if of_class is not None:
            ref = {"group": "kueue.x-k8s.io", "kind": "WorkloadPriorityClass"}
            spec["priorityClassRef"] = {**ref, "name": of_class["metadata"]["name"]}
            spec["priority"] = of_class["value"]
        spec["podSets"] = [
            {"name": name, "count": count, "template": template}
            for name, count, template in pod_sets(job)
        ]
        own: Object = {"name": workload_name(job), "namespace": meta["namespace"]}
        own["labels"] = {JOB_UID: meta["uid"]}
        workload = {"kind": "Workload", "metadata": {**own, **owned_by(job)}, "spec": spec}
        made = self.client.create(workload)
        text = f"Created Workload: {meta['namespace']}/{own['name']}"
        self.client.event(job, "Normal", "CreatedWorkload", text, f"{job['kind'].lower()}-kueue")
        return made

    def _follow(self, job: Object, workload: Object) -> None:
        """Bring a job and its workload together."""
        uid = job["metadata"]["uid"]
        if end := _over(job):
            if not is_true(workload, "Finished"):
                text = "Job finished successfully" if end == "Succeeded" else "Job failed"
                self._tell(workload, ("Finished", "True", end, text))
            return
        if uid in self._wanted and is_true(workload, "Admitted"):
            reason, self._held[workload["metadata"]["uid"]] = self._wanted.pop(uid)
            text = f"Evicted by the test: {reason}"
            if reason == "Preempted":
                text = "Preempted to accommodate a workload (UID: test, JobUID: test) due to"
                text += " prioritization in the ClusterQueue"
            self._evict(workload, reason, text)
        elif not workload["spec"].get("active", True) and is_true(workload, "Admitted"):
            self._evict(workload, "Deactivated", "The workload is deactivated")
        workload = self.client.find("workloads", *_key(workload)) or workload
        if is_true(workload, "Evicted") and is_true(workload, "QuotaReserved"):
            self._halt(job, workload)
        elif is_true(workload, "Admitted"):
            if job["spec"].get("suspend"):
                self._suspend(job, False)
                queue = workload["status"]["admission"]["clusterQueue"]
                text = f"Admitted by clusterQueue {queue}"
                self.client.event(job, "Normal", "Started", text, "kueue")
            self._ready(job, workload)
        elif not job["spec"].get("suspend"):  # only Kueue decides
            self._suspend(job, True)

    def _suspend(self, job: Object, value: bool) -> None:
        self.client.update(job, lambda new: new["spec"].update(suspend=value))

    def _tell(self, workload: Object, *conditions: tuple[str, str, str, str]) -> None:
        def change(status: Object) -> None:
            for each in conditions:
                set_condition(status, *each)

        self.client.update_status(workload, change)

    def _evict(self, workload: Object, reason: str, message: str) -> None:
        conditions = [("Evicted", "True", reason, message)]
        if reason == "Preempted":
            conditions.append(("Preempted", "True", "InClusterQueue", message))
        self._tell(workload, *conditions)
        self.client.event(workload, "Normal", f"EvictedDueTo{reason}", message, "kueue")

    def _pods(self, job: Object) -> list[Object]:
        uid, meta = job["metadata"]["uid"], job["metadata"]
        mine = {uid}
        if job["kind"] == "JobSet":
            owned = self.client.all("jobs", meta["namespace"])
            mine |= {each["metadata"]["uid"] for each in owned if owner_of(each).get("uid") == uid}
        pods = self.client.all("pods", meta["namespace"])
        return [pod for pod in pods if owner_of(pod).get("uid") in mine]

    def _halt(self, job: Object, workload: Object) -> None:
        """Suspend an evicted job; what it held is free when none of its pods is active, which one
        that terminates is not."""
        if not job["spec"].get("suspend"):
            self._suspend(job, True)
            text = condition(workload, "Evicted")["message"]
            self.client.event(job, "Normal", "Stopped", text, "kueue")
            return
        if _is_active(job):
            return
        why = condition(workload, "Evicted")

        def change(status: Object) -> None:
            status.pop("admission", None)
            set_condition(status, "QuotaReserved", "False", "PendingEvaluation", why["message"])
            said = ("NoReservation", "The workload has no reservation")
            set_condition(status, "Admitted", "False", *said)
            set_condition(status, "Requeued", "True", why["reason"], why["message"])
            if condition({"status": status}, "PodsReady"):
                said = ("WaitForStart", "Not all pods are ready or succeeded")
                set_condition(status, "PodsReady", "False", *said)

        self.client.update_status(workload, change)
        uid = workload["metadata"]["uid"]
        if uid in self._held:
            self._held[uid] += time.monotonic()

    def _ready(self, job: Object, workload: Object) -> None:
        wanted = sum(each["count"] for each in workload["spec"]["podSets"])
        pods = self._pods(job)
        ready = sum(
            is_true(pod, "Ready") or pod["status"].get("phase") == "Succeeded" for pod in pods
        )
        if ready >= wanted and not is_true(workload, "PodsReady"):
            text = "All pods reached readiness and the workload is running"
            self._tell(workload, ("PodsReady", "True", "Started", text))

    def _admit(self, jobs: dict[str, Object]) -> float | None:
        """Give quota to those who wait, the most important and then the oldest first."""
        wait: float | None = None
        here = [
            each
            for each in self.client.all("workloads")
            if owner_of(each).get("uid") in jobs and not is_true(each, "Finished")
        ]
        waiting = [
            each
            for each in here
            if not is_true(each, "QuotaReserved") and each["spec"].get("active", True)
        ]
        waiting.sort(key=lambda each: (-each["spec"]["priority"], _age(each)))
        holders = [each for each in here if is_true(each, "QuotaReserved")]
        for each in waiting:
            left = self._held.get(each["metadata"]["uid"], 0.0) - time.monotonic()
            if left > 0:
                wait = min(left, wait or left)
                continue
            queue, reason, message = self._queue_of(each)
            if queue is not None:
                mine = [other for other in holders if _admitted_by(other) == queue.name]
                reason, message = self._try(each, queue, mine)
                if not reason:
                    admitted = self.client.find("workloads", *_key(each))
                    holders.append(admitted or each)
                    continue
            self._tell(each, ("QuotaReserved", "False", reason, message))
        return wait

    def _queue_of(self, workload: Object) -> tuple[Quota | None, str, str]:
        namespace, name = workload["metadata"]["namespace"], workload["spec"]["queueName"]
        local = self.client.find("localqueues", namespace, name)
        if local is None:
            return None, "Misconfigured", f"LocalQueue {name} doesn't exist"
        queue = self.client.find("clusterqueues", "", local["spec"]["clusterQueue"])
        if queue is None:
            text = f"ClusterQueue {local['spec']['clusterQueue']} doesn't exist"
            return None, "Misconfigured", text
        quota = Quota(queue)
        if quota.stopped:
            return None, "Suspended", f"ClusterQueue {quota.name} is inactive"
        return quota, "", ""

    def _try(self, workload: Object, queue: Quota, holders: list[Object]) -> tuple[str, str]:
        """Admit a workload, or say why not; others of less priority may have to go for it."""
        used: Counter[str] = Counter()
        for each in holders:
            used.update(usage_of(each))
        reason, message = queue.why_not(workload, used)
        if not reason:
            self._give(workload, queue)
            return "", ""
        if reason != "WaitingForQuota" or queue.preempts == "Never":
            return reason, message
        victims = [
            each for each in holders if each["spec"]["priority"] < workload["spec"]["priority"]
        ]
        victims.sort(key=lambda each: (each["spec"]["priority"], -_age(each)))
        chosen = []
        for each in victims:
            chosen.append(each)
            used.subtract(usage_of(each))
            if not queue.why_not(workload, used)[0]:
                break
        else:
            return reason, message
        meta = workload["metadata"]
        for each in chosen:
            if not is_true(each, "Evicted"):
                job = meta["labels"][JOB_UID]
                text = f"Preempted to accommodate a workload (UID: {meta['uid']}, JobUID: {job})"
                text += " due to prioritization in the ClusterQueue"
                self._evict(each, "Preempted", text)
        text = f"{message}. Pending the preemption of {len(chosen)} workload(s)"
        return "WaitingForPreemptedWorkloads", text

    def _give(self, workload: Object, queue: Quota) -> None:
        sets = []
        for each in workload["spec"]["podSets"]:
            asked = requests_of(each["template"]["spec"])
            usage = {name: f"{amount * each['count']:g}" for name, amount in asked.items()}
            flavors = {name: queue.flavor[name] for name in asked}
            one = {"name": each["name"], "count": each["count"], "flavors": flavors}
            sets.append({**one, "resourceUsage": usage})
        text = f"Quota reserved in ClusterQueue {queue.name}"

        def change(status: Object) -> None:
            status["admission"] = {"clusterQueue": queue.name, "podSetAssignments": sets}
            set_condition(status, "QuotaReserved", "True", "QuotaReserved", text)
            set_condition(status, "Admitted", "True", "Admitted", "The workload is admitted")
            for name in ("Evicted", "Preempted"):
                if found := condition({"status": status}, name):
                    said = f"Previously: {found['message']}"
                    set_condition(status, name, "False", "QuotaReserved", said)

        self.client.update_status(workload, change)
        self.client.event(workload, "Normal", "QuotaReserved", text, "kueue-admission")


def _key(workload: Object) -> tuple[str, str]:
    return workload["metadata"]["namespace"], workload["metadata"]["name"]


def _age(workload: Object) -> float:
    return seconds_of(workload["metadata"]["creationTimestamp"])


def _admitted_by(workload: Object) -> str:
    return str(workload["status"]["admission"]["clusterQueue"])
