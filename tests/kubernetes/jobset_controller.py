"""The JobSet controller: the Service and the Jobs of JobSets, and what becomes of the JobSets."""

from __future__ import annotations

import copy
import hashlib
import re
import time
from collections.abc import Callable

from tests.kubernetes.api_client import Loop
from tests.kubernetes.checks import coordinator_endpoint
from tests.kubernetes.defaults import fill_jobset
from tests.kubernetes.job_controller import is_finished
from tests.kubernetes.kinds import (
    Object,
    condition,
    is_true,
    owned_by,
    owner_of,
    seconds_of,
    set_condition,
)
from tests.kubernetes.problems import Refused

JOBSET = "jobset.sigs.k8s.io/"
NAME = f"{JOBSET}jobset-name"
ATTEMPT = f"{JOBSET}restart-attempt"
Change = Callable[[Object], None]


def is_over(jobset: Object) -> bool:
    return is_true(jobset, "Completed") or is_true(jobset, "Failed")


def job_labels(jobset: Object, replicated: Object, number: int) -> dict[str, str]:
    """Labels and annotations of a Job and its pods."""
    meta, spec = jobset["metadata"], jobset["spec"]
    jobs, group = spec["replicatedJobs"], replicated["groupName"]
    of_group = [each for each in jobs if each["groupName"] == group]

    def before(several: list[Object]) -> int:
        there = several[: [each["name"] for each in several].index(replicated["name"])]
        return sum(int(each["replicas"]) for each in there)

    job = f"{meta['name']}-{replicated['name']}-{number}"
    labels = {
        "jobset-name": meta["name"],
        "jobset-uid": meta["uid"],
        "replicatedjob-name": replicated["name"],
        "replicatedjob-replicas": replicated["replicas"],
        "restart-attempt": jobset.get("status", {}).get("restarts", 0),
        "global-replicas": sum(each["replicas"] for each in jobs),
        "job-index": number,
        "job-key": hashlib.sha1(f"{meta['namespace']}/{job}".encode()).hexdigest(),
        "job-global-index": before(jobs) + number,
        "group-name": group,
        "group-replicas": sum(each["replicas"] for each in of_group),
        "job-group-index": before(of_group) + number,
    }
    if "coordinator" in spec:
        labels["coordinator"] = coordinator_endpoint(spec, meta["name"])
    return {JOBSET + key: str(value) for key, value in labels.items()}


class JobSetController(Loop):
    kinds = ("jobsets", "jobs", "services")

    def sync(self) -> float | None:
        waits = [self._sync_one(_filled(each)) for each in self.client.all("jobsets")]
        return min((wait for wait in waits if wait is not None), default=None)

    def _sync_one(self, jobset: Object) -> float | None:
        meta = jobset["metadata"]
        if "deletionTimestamp" in meta:
            return None
        owned = [
            job
            for job in self.client.all("jobs", meta["namespace"])
            if owner_of(job).get("uid") == meta["uid"]
        ]
        restarts = jobset.get("status", {}).get("restarts", 0)
        now_owned = [job for job in owned if int(job["metadata"]["labels"][ATTEMPT]) >= restarts]
        changes: list[Change] = [self._counts(jobset, now_owned)]
        if is_over(jobset):
            for job in now_owned:
                if not is_finished(job):
                    self.client.delete(job, policy="Foreground")
            self._write(jobset, changes)
            return self._ttl(jobset)
        previous = [job for job in owned if job not in now_owned]
        for job in previous:
            if "deletionTimestamp" not in job["metadata"]:
                self.client.delete(job, policy="Foreground")
        failed = [job for job in now_owned if is_finished(job) == "Failed"]
        if failed:
            changes.append(self._failed(jobset, failed))
        elif self._has_succeeded(jobset, now_owned):
            changes.append(_ended("Completed", "AllJobsCompleted", "jobset completed successfully"))
        else:
            self._make(jobset, owned, now_owned, bool(previous))
            changes.append(self._suspend_or_resume(jobset, now_owned))
        self._write(jobset, changes)
        return None

    def _write(self, jobset: Object, changes: list[Change]) -> None:
        before = jobset.get("status", {}).get("conditions") or []

        def change(status: Object) -> None:
            for each in changes:
                each(status)

        new = self.client.update_status(jobset, change)
        for each in (new or {}).get("status", {}).get("conditions") or []:
            if not any(all(old.get(k) == each[k] for k in ("type", "status")) for old in before):
                kind = "Warning" if each["type"] == "Failed" else "Normal"
                said = (each["reason"], each["message"])
                self.client.event(jobset, kind, *said, "jobset")

    def _ttl(self, jobset: Object) -> float | None:
        seconds = jobset["spec"].get("ttlSecondsAfterFinished")
        if seconds is None:
            return None
        name = "Completed" if is_true(jobset, "Completed") else "Failed"
        when = seconds_of(condition(jobset, name)["lastTransitionTime"])
        if (left := when + float(seconds) - time.time()) <= 0:
            self.client.delete(jobset, policy="Foreground")
        return max(left, 0.05)

    def _counts(self, jobset: Object, jobs: list[Object]) -> Change:
        found = []
        for replicated in jobset["spec"]["replicatedJobs"]:
            one: Object = {"name": replicated["name"], "ready": 0, "succeeded": 0, "failed": 0}
            one |= {"active": 0, "suspended": 0}
            for job in jobs:
                if job["metadata"]["labels"][f"{JOBSET}replicatedjob-name"] != one["name"]:
                    continue
                if end := is_finished(job):
                    one["succeeded" if end == "Complete" else "failed"] += 1
                    continue
                status, spec = job.get("status") or {}, job["spec"]
                most = spec["parallelism"]
                pods = min(most, spec["completions"]) if spec.get("completions") else most
                one["ready"] += status.get("succeeded", 0) + status.get("ready", 0) >= pods
                one["active"] += status.get("active", 0) > 0
                one["suspended"] += bool(spec["suspend"])
            found.append(one)

        def change(status: Object) -> None:
            status["replicatedJobsStatus"] = found
            status.setdefault("restarts", 0)
            ready = sum(each["ready"] + each["succeeded"] for each in found)
            wanted = sum(each["replicas"] for each in jobset["spec"]["replicatedJobs"])
            if ready == wanted and is_true({"status": status}, "RestartingJobSet"):
                said = ("JobsReady", "all jobs are ready")
                set_condition(status, "RestartingJobSet", "False", *said)

        return change

    def _has_succeeded(self, jobset: Object, jobs: list[Object]) -> bool:
        policy = jobset["spec"]["successPolicy"]
        targets = policy.get("targetReplicatedJobs") or []
        replicated = jobset["spec"]["replicatedJobs"]
        wanted = [each for each in replicated if not targets or each["name"] in targets]
        names = [each["name"] for each in wanted]
        done = [
            job
            for job in jobs
            if is_finished(job) == "Complete"
            and job["metadata"]["labels"][f"{JOBSET}replicatedjob-name"] in names
        ]
        needed = 1 if policy["operator"] == "Any" else sum(each["replicas"] for each in wanted)
        return len(done) >= needed

    def _failed(self, jobset: Object, failed: list[Object]) -> Change:
        """What the failurePolicy wants."""
        failed.sort(key=lambda job: str(condition(job, "Failed")["lastTransitionTime"]))
        policy = jobset["spec"].get("failurePolicy")

        def because(text: str, job: Object) -> str:
            return f"{text} (first failed job: {job['metadata']['name']})"

        if policy is None:
            text = because("jobset failed due to one or more job failures", failed[0])
            return _ended("Failed", "FailedJobs", text)
        rule, job = _matching(policy, failed)
        action = rule.get("action", "RestartJobSet")
        if action == "FailJobSet":
            text = because("applying FailJobSet failure policy action", job)
            return _ended("Failed", "FailJobSetFailurePolicyAction", text)
        counts = action == "RestartJobSet"
        if counts and jobset["status"].get("restartsCountTowardsMax", 0) >= policy.get(
            "maxRestarts", 0
        ):
            text = because("jobset failed due to reaching max number of restarts", job)
            return _ended("Failed", "ReachedMaxRestarts", text)
        text = because(f"applying {action} failure policy action", job)
        reason = f"FailurePolicy_{rule['name']}" if rule else "DefaultFailurePolicy"
        seen = jobset["status"].get("restarts", 0)

        def restart(status: Object) -> None:
            if status.get("restarts", 0) == seen:
                status["restarts"] = seen + 1
                counted = status.get("restartsCountTowardsMax", 0) + counts
                status["restartsCountTowardsMax"] = counted
                set_condition(status, "RestartingJobSet", "True", reason, text)

        return restart

    def _make(self, jobset: Object, owned: list[Object], jobs: list[Object], waits: bool) -> None:
        """The Service, and Jobs that are missing."""
        meta, spec = jobset["metadata"], jobset["spec"]
        subdomain = spec["network"].get("subdomain") or meta["name"]
        if spec["network"]["enableDNSHostnames"]:
            self._service(jobset, subdomain)
        if waits and (spec.get("failurePolicy") or {}).get("restartStrategy") == "BlockingRecreate":
            return
        names = {job["metadata"]["name"] for job in owned}
        for replicated in spec["replicatedJobs"]:
            if not self._may_start(jobset, replicated, jobs):
                continue
            for number in range(replicated["replicas"]):
                name = f"{meta['name']}-{replicated['name']}-{number}"
                if name in names:
                    continue
                job = copy.deepcopy({"kind": "Job", **replicated["template"]})
                labels = job_labels(jobset, replicated, number)
                template = job["spec"]["template"]
                for each in (job, template):
                    there = each.setdefault("metadata", {})
                    for key in ("labels", "annotations"):
                        there[key] = {**(there.get(key) or {}), **labels}
                job["metadata"] |= {"name": name, "namespace": meta["namespace"]}
                job["metadata"] |= owned_by(jobset)
                if spec["network"]["enableDNSHostnames"]:
                    template["spec"]["subdomain"] = subdomain
                job["spec"]["suspend"] = bool(spec.get("suspend"))
                try:
                    self.client.create(job)
                except Refused as refused:
                    text = f'job "{name}" creation failed with error: {refused}'
                    self.client.event(jobset, "Warning", "JobCreationFailed", text, "jobset")

    def _service(self, jobset: Object, subdomain: str) -> None:
        namespace = jobset["metadata"]["namespace"]
        if self.client.find("services", namespace, subdomain) is not None:
            return
        selector = {NAME: jobset["metadata"]["name"]}
        publish = jobset["spec"]["network"]["publishNotReadyAddresses"]
        spec = {"clusterIP": "None", "selector": selector, "publishNotReadyAddresses": publish}
        meta = {"name": subdomain, "namespace": namespace, **owned_by(jobset)}
        try:
            self.client.create({"kind": "Service", "metadata": meta, "spec": spec})
        except Refused as refused:
            reason = "HeadlessServiceCreationFailed"
            self.client.event(jobset, "Warning", reason, str(refused), "jobset")

    def _may_start(self, jobset: Object, replicated: Object, jobs: list[Object]) -> bool:
        """Whether what it depends on is as far as it has to be."""
        status: Object = {}
        self._counts(jobset, jobs)(status)
        there = {each["name"]: each for each in status["replicatedJobsStatus"]}
        wanted = {each["name"]: each["replicas"] for each in jobset["spec"]["replicatedJobs"]}
        for each in replicated.get("dependsOn") or []:
            found = there[each["name"]]
            done = found["succeeded"]
            if each["status"] == "Ready":
                done += found["ready"] + found["failed"]
            if done != wanted[each["name"]]:
                return False
        return True

    def _suspend_or_resume(self, jobset: Object, jobs: list[Object]) -> Change:
        active = [job for job in jobs if not is_finished(job)]
        if jobset["spec"].get("suspend"):
            for job in active:
                self.client.update(job, lambda new: new["spec"].update(suspend=True))
            said = ("SuspendedJobs", "jobset is suspended")

            def suspended(status: Object) -> None:
                set_condition(status, "Suspended", "True", *said)
                if condition({"status": status}, "RestartingJobSet"):
                    why = ("JobSetSuspended", said[1])
                    set_condition(status, "RestartingJobSet", "False", *why)

            return suspended
        for job in active:
            if job["spec"]["suspend"]:
                self._resume(jobset, job)

        def resumed(status: Object) -> None:
            if is_true({"status": status}, "Suspended"):
                set_condition(status, "Suspended", "False", "ResumeJobs", "jobset is resumed")

        return resumed

    def _resume(self, jobset: Object, job: Object) -> None:
        """Unsuspend a Job, with what Kueue has changed in the JobSet's template."""
        self.client.update_status(job, lambda status: status.pop("startTime", None))
        of = job["metadata"]["labels"][f"{JOBSET}replicatedjob-name"]
        templates = {each["name"]: each for each in jobset["spec"]["replicatedJobs"]}
        template = templates[of]["template"]["spec"]["template"]

        def change(new: Object) -> None:
            mine = new["spec"]["template"]
            for part, key in (
                ("metadata", "labels"),
                ("metadata", "annotations"),
                ("spec", "nodeSelector"),
            ):
                if more := (template.get(part) or {}).get(key):
                    mine[part][key] = {**(mine[part].get(key) or {}), **more}
            for key in ("tolerations", "schedulingGates"):
                there = mine["spec"].get(key) or []
                more = [each for each in template["spec"].get(key) or [] if each not in there]
                if more:
                    mine["spec"][key] = [*there, *more]
            new["spec"]["suspend"] = False

        self.client.update(job, change)


def _filled(jobset: Object) -> Object:
    """With the webhook's defaults, which a real API server does not know."""
    spec = copy.deepcopy(jobset["spec"])
    fill_jobset(spec)
    return {**jobset, "spec": spec}


def _matching(policy: Object, failed: list[Object]) -> tuple[Object, Object]:
    """The first rule that a failed Job matches, and that Job; {} and the first that failed."""
    for rule in policy.get("rules") or []:
        for job in failed:
            why = condition(job, "Failed")
            reasons = rule.get("onJobFailureReasons") or []
            patterns = rule.get("onJobFailureMessagePatterns") or []
            targets = rule.get("targetReplicatedJobs") or []
            of = job["metadata"]["labels"][f"{JOBSET}replicatedjob-name"]
            if (
                (not reasons or why["reason"] in reasons)
                and (not patterns or any(re.search(each, why["message"]) for each in patterns))
                and (not targets or of in targets)
            ):
                return rule, job
    return {}, failed[0]


def _ended(name: str, reason: str, message: str) -> Change:
    def change(status: Object) -> None:
        set_condition(status, name, "True", reason, message)
        status["terminalState"] = name
        if condition({"status": status}, "RestartingJobSet"):
            set_condition(status, "RestartingJobSet", "False", f"JobSet{name}", message)

    return change
