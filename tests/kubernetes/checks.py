"""What the API server and the webhooks refuse: the rules of Job, JobSet, Kueue and quotas."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from tests.kubernetes.defaults import QUEUE
from tests.kubernetes.kinds import Kind, Object, ended, quantity
from tests.kubernetes.problems import forbidden, invalid

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035
SUBDOMAIN = r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?"  # RFC 1123
Error = tuple[str, str]  # path of a field, what is wrong


def check_new(kind: Kind, obj: Object) -> None:
    """Raise Refused (422) for a new object that breaks a rule."""
    name = obj["metadata"]["name"]
    errors = list(_name_errors(kind, name))
    errors += _label_errors(obj["metadata"], "metadata")
    if kind.plural == "jobs":
        errors += _job_errors(obj["spec"], name)
    elif kind.plural == "jobsets":
        errors += _jobset_errors(obj["spec"], name)
    elif kind.plural == "pods":
        errors += _pod_errors(obj["spec"], "spec")
    if errors:
        raise invalid(kind, name, errors)


def check_changed(kind: Kind, old: Object, new: Object) -> None:
    """Raise Refused (422) where an update changes what is fixed."""
    errors: list[Error] = []
    if kind.plural == "jobs":
        errors += _job_changes(old, new)
    elif kind.plural == "jobsets":
        errors += _jobset_changes(old["spec"], new["spec"])
    elif kind.plural == "pods":
        errors += _pod_changes(old["spec"], new["spec"])
    if kind.plural in ("jobs", "jobsets") and not new["spec"].get("suspend"):
        queues = [(each["metadata"].get("labels") or {}).get(QUEUE) for each in (old, new)]
        if queues[0] != queues[1] and not old["spec"].get("suspend"):
            errors.append((f"metadata.labels[{QUEUE}]", "field is immutable"))
    if errors:
        raise invalid(kind, new["metadata"]["name"], errors)


def _name_errors(kind: Kind, name: str) -> Iterator[Error]:
    if kind.plural in ("services", "jobsets"):
        form, words, most = LABEL, "a DNS-1035 label must consist of lower case alphanumeric", 63
    else:
        form, words, most = SUBDOMAIN, "a lowercase RFC 1123 subdomain must consist of", 253
    if not re.fullmatch(form, name):
        text = f"{words} characters or '-'" if form == LABEL else f"{words} lower case characters"
        yield "metadata.name", f'Invalid value: "{name}": {text}'
    if len(name) > most:
        yield "metadata.name", f'Invalid value: "{name}": must be no more than {most} characters'


def _label_errors(meta: Object, path: str) -> Iterator[Error]:
    for key, value in (meta.get("labels") or {}).items():
        if not isinstance(value, str) or not re.fullmatch(r"([\w]([-\w.]{0,61}[\w])?)?", value):
            text = "a valid label must be an empty string or consist of at most 63 alphanumeric"
            yield f"{path}.labels", f'Invalid value: "{value}": {text} characters ({key})'
    for key, value in (meta.get("annotations") or {}).items():
        if not isinstance(value, str):
            yield f"{path}.annotations", f'Invalid value: "{value}" of {key}: must be a string'


def _pod_errors(spec: Object, path: str) -> Iterator[Error]:
    containers = spec.get("containers") or []
    if not containers:
        yield f"{path}.containers", "Required value"
    volumes = {each["name"] for each in spec.get("volumes") or []}
    for number, each in enumerate(containers):
        here = f"{path}.containers[{number}]"
        if not each.get("image"):
            yield f"{here}.image", "Required value"
        for mount in each.get("volumeMounts") or []:
            if mount["name"] not in volumes:
                yield f"{here}.volumeMounts.name", f'Not found: "{mount["name"]}"'
        for variable in each.get("env") or []:
            if not isinstance(variable.get("value", ""), str):
                yield f"{here}.env", f"Invalid value: {variable}: must be a string"
        resources = each.get("resources") or {}
        for name, most in (resources.get("limits") or {}).items():
            asked = (resources.get("requests") or {}).get(name, most)
            if "/" in name and quantity(asked) != quantity(most):
                text = f'Invalid value: "{asked}": must be equal to {name} limit of {most}'
                yield f"{here}.resources.requests", text
    if spec.get("hostname") and len(spec["hostname"]) > 63:
        yield f"{path}.hostname", f'Invalid value: "{spec["hostname"]}": at most 63 characters'


def _pod_changes(old: Object, new: Object) -> Iterator[Error]:
    free = ("containers", "tolerations", "schedulingGates", "nodeSelector")
    fixed = [{key: each[key] for key in each if key not in free} for each in (old, new)]
    if fixed[0] != fixed[1]:
        yield (
            "spec",
            "Forbidden: pod updates may not change fields other than"
            " `spec.containers[*].image`,`spec.initContainers[*].image`,"
            "`spec.activeDeadlineSeconds`,`spec.tolerations` (only additions to existing"
            " tolerations)",
        )


def _job_errors(spec: Object, name: str) -> Iterator[Error]:
    pod = spec["template"]["spec"]
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        yield (
            "spec.template.spec.restartPolicy",
            f'Required value: valid values: "OnFailure", "Never" (not "{pod["restartPolicy"]}")',
        )
    yield from _pod_errors(pod, "spec.template.spec")
    yield from _label_errors(spec["template"]["metadata"], "spec.template.metadata")
    indexed = spec["completionMode"] == "Indexed"
    completions, parallelism = spec.get("completions"), spec["parallelism"]
    if indexed and completions is None:
        yield "spec.completions", "Required value: when completion mode is Indexed"
    if indexed and parallelism > 100_000:
        yield "spec.parallelism", "Invalid value: must be less than or equal to 100000"
    if indexed and completions and len(f"{name}-{completions - 1}") > 63:
        long = f"{name}-{completions - 1}"
        text = "must be no more than 63 characters: will not able to create pod with invalid DNS"
        yield "metadata.name", f'Invalid value: "{long}": {text} label'
    if not indexed and len(name) > 63:
        yield "metadata.name", f'Invalid value: "{name}": must be no more than 63 characters'
    for key in ("backoffLimit", "parallelism", "completions", "ttlSecondsAfterFinished"):
        if spec.get(key) is not None and spec[key] < 0:
            yield f"spec.{key}", f"Invalid value: {spec[key]}: must be greater than or equal to 0"
    never = pod.get("restartPolicy") == "Never"
    yield from _per_index_errors(spec, indexed, never)
    if spec.get("podFailurePolicy") is not None:
        yield from _failure_policy_errors(spec, never)


def _per_index_errors(spec: Object, indexed: bool, never: bool) -> Iterator[Error]:
    if spec.get("backoffLimitPerIndex") is not None:
        if not indexed:
            yield "spec.backoffLimitPerIndex", "Invalid value: requires indexed completion mode"
        if not never:
            text = 'Invalid value: "OnFailure": only "Never" is supported when'
            yield "spec.template.spec.restartPolicy", f"{text} backoffLimitPerIndex is specified"
    elif spec.get("maxFailedIndexes") is not None:
        yield "spec.backoffLimitPerIndex", "Required value: when maxFailedIndexes is specified"


def _failure_policy_errors(spec: Object, never: bool) -> Iterator[Error]:
    if not never:
        text = 'Invalid value: "OnFailure": only "Never" is supported when podFailurePolicy is set'
        yield "spec.template.spec.restartPolicy", text
    if spec["podReplacementPolicy"] != "Failed":
        text = f'Unsupported value: "{spec["podReplacementPolicy"]}": supported values: "Failed"'
        yield "spec.podReplacementPolicy", text
    rules = spec["podFailurePolicy"].get("rules") or []
    if len(rules) > 20:
        yield "spec.podFailurePolicy.rules", f"Too many: {len(rules)}: must have at most 20 items"
    for number, rule in enumerate(rules):
        path = f"spec.podFailurePolicy.rules[{number}]"
        if rule.get("action") not in ("FailJob", "FailIndex", "Ignore", "Count"):
            yield f"{path}.action", f'Unsupported value: "{rule.get("action")}"'
        if rule.get("action") == "FailIndex" and spec.get("backoffLimitPerIndex") is None:
            yield f"{path}.action", 'Invalid value: "FailIndex": requires the backoffLimitPerIndex'
        codes, conditions = rule.get("onExitCodes"), rule.get("onPodConditions") or []
        if (codes is None) == (not conditions):
            yield path, "Invalid value: specifying one of OnExitCodes and OnPodConditions is needed"
        if codes is not None:
            yield from _exit_code_errors(codes, f"{path}.onExitCodes", spec)


def _exit_code_errors(codes: Object, path: str, spec: Object) -> Iterator[Error]:
    values = codes.get("values") or []
    if codes.get("operator") not in ("In", "NotIn"):
        yield f"{path}.operator", f'Unsupported value: "{codes.get("operator")}"'
    if not 0 < len(values) <= 255:
        yield f"{path}.values", f"Invalid value: {values}: must have 1 to 255 items"
    if values != sorted(set(values)):
        yield f"{path}.values", f"Invalid value: {values}: must be ordered and unique"
    if codes.get("operator") == "In" and 0 in values:
        yield f"{path}.values", "Invalid value: 0: must not be 0 for the In operator"
    names = [each.get("name") for each in spec["template"]["spec"]["containers"]]
    if codes.get("containerName") not in (None, *names):
        yield f"{path}.containerName", f'Invalid value: "{codes["containerName"]}": no such one'


def _without(spec: Object, paths: Iterable[str]) -> Object:
    """A copy of a spec without some fields, such as `template.spec.tolerations`."""
    for path in paths:
        first, _, rest = path.partition(".")
        if first in spec:
            spec = (
                {**spec, first: _without(spec[first], [rest])}
                if rest
                else {key: spec[key] for key in spec if key != first}
            )
    return spec


OF_TEMPLATE = [
    "metadata.labels",
    "metadata.annotations",
    "spec.nodeSelector",
    "spec.tolerations",
    "spec.schedulingGates",
]
FREE_OF_JOBS = [
    "parallelism",
    "suspend",
    "ttlSecondsAfterFinished",
    "activeDeadlineSeconds",
    "backoffLimit",
    "maxFailedIndexes",
]


def _job_changes(old: Object, new: Object) -> Iterator[Error]:
    before, after = old["spec"], new["spec"]
    free = list(FREE_OF_JOBS)
    if before.get("suspend") and not (old.get("status") or {}).get("startTime"):
        free += [f"template.{each}" for each in OF_TEMPLATE]
    if after.get("completionMode") == "Indexed" and after["completions"] == after["parallelism"]:
        free.append("completions")  # elastic Indexed Jobs
    before, after = _without(before, free), _without(after, free)
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield f"spec.{key}", "Invalid value: field is immutable"


def _jobset_changes(old: Object, new: Object) -> Iterator[Error]:
    suspended = old.get("suspend") or new.get("suspend")
    free = [f"template.spec.template.{each}" for each in OF_TEMPLATE] if suspended else []
    for key in sorted({*old, *new} - {"suspend", "ttlSecondsAfterFinished"}):
        before, after = old.get(key), new.get(key)
        if key == "replicatedJobs":
            before, after = (
                [_without(each, free) for each in jobs or []] for jobs in (before, after)
            )
        if before != after:
            yield f"spec.{key}", "Invalid value: field is immutable"


def _dns_label(path: str, name: str, long: str) -> Iterator[Error]:
    if len(name) > 63:
        yield path, f'Invalid value: "{name}": {long}'
    elif not re.fullmatch(LABEL, name):
        text = "a DNS-1035 label must consist of lower case alphanumeric characters or '-', start"
        yield path, f'Invalid value: "{name}": {text} with an alphabetic character'


def _jobset_errors(spec: Object, name: str) -> Iterator[Error]:
    jobs = spec.get("replicatedJobs") or []
    names: list[str] = []
    if jobs and "dependsOn" in jobs[0]:
        yield "<nil>", "Internal error: DependsOn can't be set for the first ReplicatedJob"
    if subdomain := spec["network"].get("subdomain"):
        text = ".spec.network.subdomain is too long, must be less than 63 characters"
        yield from _dns_label("spec.network.subdomain", subdomain, text)
    for number, each in enumerate(jobs):
        path = f"spec.replicatedJobs[{number}]"
        names.append(each["name"])
        yield from _dns_label(f"{path}.groupName", each["groupName"], "is too long")
        said = "JobSet name is too long, {} names generated for this JobSet will exceed 63"
        longest = f"{name}-{each['name']}-{each['replicas'] - 1}"
        text = said.format("job") + " characters"
        yield from _dns_label(f"{path}.name", longest, text)
        job = each["template"]["spec"]
        if job.get("completionMode") == "Indexed" and job.get("completions"):
            pod = f"{longest}-{job['completions'] - 1}-abcde"
            text = said.format("pod") + " characters"
            yield from ((path, why) for path, why in _dns_label(f"{path}.name", pod, text))
        for other in each.get("dependsOn") or []:
            if other["name"] not in names:
                text = f"replicatedJob: {each['name']} cannot depend on replicatedJob:"
                yield "<nil>", f"Internal error: {text} {other['name']}"
    yield from _jobset_policy_errors(spec, names)
    if coordinator := spec.get("coordinator"):
        yield from _coordinator_errors(coordinator, spec, name)


REASONS = [
    "BackoffLimitExceeded",
    "DeadlineExceeded",
    "FailedIndexes",
    "MaxFailedIndexesExceeded",
    "PodFailurePolicy",
]


def _jobset_policy_errors(spec: Object, names: list[str]) -> Iterator[Error]:
    for each in spec["successPolicy"].get("targetReplicatedJobs") or []:
        if each not in names:
            text = f"invalid replicatedJob name '{each}' does not appear in .spec.ReplicatedJobs"
            yield "<nil>", f"Internal error: {text}"
    policy = spec.get("failurePolicy") or {}
    if policy.get("restartStrategy") == "InPlaceRestart":
        text = "InPlaceRestart restart strategy cannot be set when InPlaceRestart feature gate is"
        yield "<nil>", f"Internal error: {text} disabled"
    for rule in policy.get("rules") or []:
        if rule.get("action", "").startswith("RestartJob") and "Set" not in rule["action"]:
            text = "RestartJob and RestartJobAndIgnoreMaxRestarts failure policy actions are not"
            yield (
                "<nil>",
                f"Internal error: {text} allowed when RestartJob feature gate is disabled",
            )
        for reason in rule.get("onJobFailureReasons") or []:
            if reason not in REASONS:
                text = f"invalid job failure reason '{reason}' in failure policy is not a"
                yield "<nil>", f"Internal error: {text} recognized job failure reason"


def coordinator_endpoint(spec: Object, name: str) -> str:
    """The address of a JobSet's coordinator, which becomes a label."""
    of, subdomain = spec["coordinator"], spec["network"].get("subdomain") or name
    index = f"{of.get('jobIndex', 0)}-{of.get('podIndex', 0)}"
    return f"{name}-{of['replicatedJob']}-{index}.{subdomain}"


def _coordinator_errors(coordinator: Object, spec: Object, name: str) -> Iterator[Error]:
    names = [each["name"] for each in spec["replicatedJobs"]]
    if coordinator["replicatedJob"] not in names:
        text = f"coordinator replicatedJob {coordinator['replicatedJob']} does not exist"
        yield "<nil>", f"Internal error: {text}"
    if len(label := coordinator_endpoint(spec, name)) > 63:
        text = f'spec will lead to invalid label value "{label}" for coordinator label'
        yield "<nil>", f"Internal error: {text}: must be no more than 63 characters"


def requests_of(spec: Object) -> dict[str, float]:
    """What a pod asks for, by resource."""
    total: dict[str, float] = {}
    for each in spec["containers"]:
        resources = each.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, text in asked.items():
            total[name] = total.get(name, 0.0) + quantity(text)
    return total


def check_quota(kind: Kind, new: Object, pods: Iterable[Object], quotas: Iterable[Object]) -> None:
    """Raise Refused (403) where a new pod exceeds a quota of its namespace."""

    def asked(pod: Object, resource: str) -> float:
        if resource == "pods":
            return 1.0
        return requests_of(pod["spec"]).get(resource.removeprefix("requests."), 0.0)

    there = [pod for pod in pods if not ended(pod)]
    for quota in quotas:
        over = []
        for resource, text in quota["spec"].get("hard", {}).items():
            used, more = sum(asked(pod, resource) for pod in there), asked(new, resource)
            if more and used + more > quantity(text):
                over.append((resource, f"{more:g}", f"{used:g}", text))
        if over:
            words = [", ".join(f"{each[0]}={each[n]}" for each in over) for n in (1, 2, 3)]
            name = quota["metadata"]["name"]
            said = "exceeded quota: {}, requested: {}, used: {}, limited: {}"
            raise forbidden(kind, new["metadata"]["name"], said.format(name, *words))
