"""The documents that Kubernetes gets: a JobSet for a placement of a run, an Indexed Job for the
units of a stage. All that jobs.toml gives was checked when it was read (jobs/kubernetes.py)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trainkit.base.errors import Exit
from trainkit.jobs.kubernetes import KubernetesOptions, KubernetesToleration
from trainkit.jobs.schema import Job
from trainkit.launch.programs import program_path
from trainkit.launch.protocol.pod_call import SUPERVISOR, WORKERS
from trainkit.runs.folder import RunFolder

RUN_LABEL = "trainkit/run"
JOB_LABEL = "trainkit/job"
FOLDER = "trainkit/folder"  # annotation: of the run
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOBSET_LABEL = "jobset.sigs.k8s.io/jobset-name"
ROLE_LABEL = "jobset.sigs.k8s.io/replicatedjob-name"
HOST_LABEL = "kubernetes.io/hostname"
GPUS = "nvidia.com/gpu"
# a pod is JOBSET-w-0-INDEX-xxxxx, and that a label of DNS: 63 characters, 5 of them the index's
LONGEST_NAME = 63 - len("-w-0-") - 5 - len("-xxxxx")
KEPT_SECONDS = 7 * 86_400  # what has ended can be looked at for so long
UNIT_RETRIES = 2  # of a unit whose pod was killed
# of the pod of a supervisor that needs no more
SUPERVISOR_RESOURCES = {"cpu": "1", "memory": "2Gi"}
# a pod ends with its run's exit code: these end the run too. Others are of pods that were killed
# (137, 143), or could not begin (1 and 2 are Python's own)
FINAL_CODES = sorted(int(code) for code in Exit if Exit.BUG < code < Exit.INTERRUPTED)
# what each pod knows of itself
FIELDS = {
    "TRAINKIT_POD_NAME": "metadata.name",
    "TRAINKIT_POD_UID": "metadata.uid",
    "TRAINKIT_POD_IP": "status.podIP",
    "TRAINKIT_NODE_NAME": "spec.nodeName",
}


def options_of(job: Job) -> KubernetesOptions:
    """The table of the job's cluster, which launcher 'kubernetes' has."""
    assert job.cluster.kubernetes is not None
    return job.cluster.kubernetes


def jobset_name(job: Job, run: RunFolder, number: int) -> str:
    """The name of the JobSet of a run's placement, `small-20261120-104500-3fa9-1`: a label of DNS
    that begins with a letter (RFC 1035), as short as its pods' names need it."""
    ending = f"-{run.id}-{number}"
    return f"{dns_label(job.name, LONGEST_NAME - len(ending))}{ending}"


def dns_label(text: str, longest: int) -> str:
    """The beginning of a name as a label of DNS (RFC 1035)."""
    words = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    if not words[:1].isalpha():
        words = f"j-{words}"
    return words[:longest].rstrip("-")


def jobset_manifest(
    job: Job, run: RunFolder, name: str, *, left_out: Sequence[str] = ()
) -> dict[str, object]:
    """The JobSet of a placement of a run: a pod a host, and where jobs.toml asks for it one for
    the supervisor.

    Args:
        job: as it will run.
        run: its folder, which may be still to be made.
        name: of the JobSet, see `jobset_name`.
        left_out: nodes that it is not to have.
    """
    options = options_of(job)
    with_own = options.supervisor == "pod"
    python = job.cluster.python or "python3"
    argv = [python, "-I", "-S", str(program_path(run.code, "pod")), str(run.path), name]
    supervises = [*argv, "--supervise"]
    labels = {RUN_LABEL: run.id, JOB_LABEL: _label_value(job.name)}
    workers = {
        **_pod(
            job,
            [*(argv if with_own else supervises), "--agent"],
            pod_resources(job),
            asks_api=not with_own,
        ),
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        "affinity": _affinity(name, left_out),
    }
    template = _template(labels, {**options.annotations, **_topology(options)}, workers)
    backoff = job.retries.infra * job.nodes
    jobs = [_replicated(WORKERS, job.nodes, backoff, labels, template)]
    if with_own:
        small = {
            key: SUPERVISOR_RESOURCES[key]
            for key in SUPERVISOR_RESOURCES
            if key in options.resources
        }
        pod = _pod(job, supervises, small, asks_api=True)
        template = _template(labels, dict(options.annotations), pod)
        jobs.append(_replicated(SUPERVISOR, 1, job.retries.infra, labels, template))
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            "name": name,
            "namespace": options.namespace,
            "labels": {**labels, **_queue_labels(options)},
            "annotations": {FOLDER: str(run.path)},
        },
        "spec": {
            "suspend": options.queue is not None,
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "replicatedJobs": jobs,
        },
    }


def array_manifest(
    job: Job,
    name: str,
    argv: Sequence[str],
    count: int,
    parallelism: int,
    *,
    run: str,
    resources: Mapping[str, object] | None = None,
    seconds: int | None = None,
) -> dict[str, object]:
    """The Indexed Job of a stage's units, each a pod that ends by itself. A unit whose pod was
    killed is tried again, one that fails with an exit code of ours is not.

    Args:
        job: on whose behalf.
        name: of the Job, a label of DNS of at most `LONGEST_NAME` characters.
        argv: what each pod runs; JOB_COMPLETION_INDEX says which unit it has.
        count: units.
        parallelism: how many of them at once.
        run: on whose behalf, a value of `RUN_LABEL`.
        resources: of each pod; by default the cluster's, without devices.
        seconds: that one unit may take.
    """
    options = options_of(job)
    native = {key: value for key, value in options.resources.items() if "/" not in key}
    labels = {RUN_LABEL: run, JOB_LABEL: _label_value(job.name)}
    pod = {
        **_pod(job, argv, native if resources is None else resources, asks_api=False),
        **({"nodeSelector": dict(options.node_selector)} if options.node_selector else {}),
        **({"activeDeadlineSeconds": seconds} if seconds else {}),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": options.namespace,
            "labels": {**labels, **_queue_labels(options)},
        },
        "spec": {
            **_indexed(count, parallelism, "FailIndex"),
            "backoffLimitPerIndex": UNIT_RETRIES,
            "suspend": options.queue is not None,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": _template(labels, dict(options.annotations), pod),
        },
    }


def pod_resources(job: Job) -> dict[str, object]:
    """What the pod of a host gets: as jobs.toml says, and the GPUs of its ranks where it does
    not say those."""
    given = dict[str, object](options_of(job).resources)
    if job.cluster.device_type == "cuda" and GPUS not in given:
        ranks = job.ranks_per_node
        given[GPUS] = min(ranks, job.cluster.gpus_per_node or ranks)
    return given


def _indexed(count: int, parallelism: int, action: str) -> dict[str, object]:
    """What the Jobs of runs and of stages share. A disrupted pod, evicted or preempted, counts as
    no failure."""
    codes = {"containerName": "trainkit", "operator": "In", "values": FINAL_CODES}
    disrupted = [{"type": "DisruptionTarget", "status": "True"}]
    return {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": parallelism,
        "podReplacementPolicy": "Failed",  # not before the old pod has let go of GPUs and files
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": disrupted},
                {"action": action, "onExitCodes": codes},
            ]
        },
    }


def _replicated(
    role: str, pods: int, backoff: int, labels: Mapping[str, str], template: Mapping[str, object]
) -> dict[str, object]:
    spec = {**_indexed(pods, pods, "FailJob"), "backoffLimit": backoff, "template": template}
    return {
        "name": role,
        "replicas": 1,
        "template": {"metadata": {"labels": dict(labels)}, "spec": spec},
    }


def _template(
    labels: Mapping[str, str], annotations: Mapping[str, str], pod: Mapping[str, object]
) -> dict[str, object]:
    return {"metadata": {"labels": dict(labels), "annotations": dict(annotations)}, "spec": pod}


def _pod(
    job: Job, argv: Sequence[str], resources: Mapping[str, object], *, asks_api: bool
) -> dict[str, object]:
    options = options_of(job)
    asked = {name: str(value) for name, value in resources.items()}
    security: dict[str, object] = {"allowPrivilegeEscalation": False}
    if options.capabilities:
        security = {"capabilities": {"add": list(options.capabilities)}}
    volumes, mounts = _volumes(options)
    container = {
        "name": "trainkit",
        "image": options.image,
        # "$(NAME)" would be replaced there
        "command": [word.replace("$", "$$") for word in argv],
        "env": _environment(job),
        "resources": {"requests": asked, "limits": asked},
        "securityContext": security,
        "volumeMounts": mounts,
    }
    optional: dict[str, object] = {
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
        "tolerations": [_toleration(each) for each in options.tolerations],
        "serviceAccountName": options.service_account,
        "priorityClassName": None if options.queue else options.priority_class,
        "hostNetwork": options.host_network,
        "dnsPolicy": "ClusterFirstWithHostNet" if options.host_network else None,
    }
    if options.run_as is not None:
        user, _, group = options.run_as.partition(":")
        optional["securityContext"] = {"runAsUser": int(user), "runAsGroup": int(group)}
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": options.grace,
        "enableServiceLinks": False,  # thousands of variables, in a namespace of many runs
        "automountServiceAccountToken": asks_api and options.service_account is not None,
        **{key: value for key, value in optional.items() if value},
        "containers": [container],
        "volumes": volumes,
    }


def _environment(job: Job) -> list[dict[str, object]]:
    may_lack = {name.rstrip("?") for name in job.cluster.secrets if name.endswith("?")}
    found: list[dict[str, object]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in FIELDS.items()
    ]
    for name, place in options_of(job).secrets.items():
        secret, _, key = place.partition("/")
        reference = {"name": secret, "key": key, "optional": name in may_lack}
        found.append({"name": name, "valueFrom": {"secretKeyRef": reference}})
    return found


def _volumes(
    options: KubernetesOptions,
) -> tuple[list[dict[str, object]], list[dict[str, object]]]:
    """(the pod's volumes, where its container sees them)."""
    shared = {"medium": "Memory", "sizeLimit": str(options.shm)}
    volumes: list[dict[str, object]] = [{"name": "shm", "emptyDir": shared}]
    mounts: list[dict[str, object]] = [{"name": "shm", "mountPath": "/dev/shm"}]
    for number, each in enumerate(options.volumes):
        name = f"volume-{number}"
        source: dict[str, object] = {"hostPath": {"path": each.host_path}}
        if each.claim is not None:
            source = {"persistentVolumeClaim": {"claimName": each.claim}}
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": each.mount, "readOnly": each.read_only})
    return volumes, mounts


def _toleration(given: KubernetesToleration) -> dict[str, object]:
    found: dict[str, object] = {
        "key": given.key,
        "operator": "Exists" if given.value is None else "Equal",
        "value": given.value,
        "effect": given.effect,
        "tolerationSeconds": given.seconds,
    }
    return {key: value for key, value in found.items() if value is not None}


def _affinity(name: str, left_out: Sequence[str]) -> dict[str, object]:
    """One pod a node, and none on those that are left out."""
    own = {"matchLabels": {JOBSET_LABEL: name, ROLE_LABEL: WORKERS}}
    found: dict[str, object] = {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": own, "topologyKey": HOST_LABEL}
            ]
        }
    }
    if left_out:
        others = {"key": HOST_LABEL, "operator": "NotIn", "values": sorted(left_out)}
        found["nodeAffinity"] = {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [others]}]
            }
        }
    return found


def _topology(options: KubernetesOptions) -> dict[str, str]:
    asked = options.topology
    if asked is None:
        return {}
    how = "required" if asked.required else "preferred"
    return {f"kueue.x-k8s.io/podset-{how}-topology": asked.required or asked.preferred or ""}


def _queue_labels(options: KubernetesOptions) -> dict[str, str]:
    if options.queue is None:
        return {}
    found = {QUEUE_LABEL: options.queue}
    if options.priority_class is not None:
        found["kueue.x-k8s.io/priority-class"] = options.priority_class
    return found


def _label_value(text: str) -> str:
    """A name of jobs.toml as the value of a label: at most 63 characters, a letter or a digit
    at each end."""
    return text[:63].rstrip("-_")
