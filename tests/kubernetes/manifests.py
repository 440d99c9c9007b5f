"""What tests of the stand-in write and ask for."""

from __future__ import annotations

import json
from collections.abc import Sequence

from tests.kubernetes.cluster import KubernetesCluster
from tests.kubernetes.kinds import Object, is_true

IGNORE = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
FAIL = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": [42]}}
SLEEP = ("sleep", "1000")
SAVES = "trap 'echo saved; exit 3' TERM; echo up; while :; do sleep 0.05; done"


def pod_spec(command: Sequence[str] = SLEEP, **more: object) -> Object:
    container: Object = {"name": "main", "image": "image", "command": list(command)}
    container |= {key: more.pop(key) for key in ("env", "volumeMounts") if key in more}
    container["resources"] = {"limits": {"nvidia.com/gpu": more.pop("gpus", 8)}}
    spec = {"restartPolicy": "Never", "containers": [container], **more}
    return {"terminationGracePeriodSeconds": 1, **spec}


def jobset(
    name: str = "run", command: Sequence[str] = SLEEP, hosts: int = 3, **more: object
) -> Object:
    """A JobSet as trainkit writes them. more: parts of the pod's spec, `labels` and `backoff`."""
    meta: Object = {"name": name, "labels": more.pop("labels", {})}
    job: Object = {"completions": hosts, "parallelism": hosts, "completionMode": "Indexed"}
    job |= {"backoffLimit": more.pop("backoff", 2), "podReplacementPolicy": "Failed"}
    job |= {"podFailurePolicy": {"rules": [IGNORE, FAIL]}}
    job |= {"template": {"spec": pod_spec(command, **more)}}
    replicated = {"name": "w", "replicas": 1, "template": {"spec": job}}
    spec = {"replicatedJobs": [replicated], "failurePolicy": {"maxRestarts": 0}}
    version = "jobset.x-k8s.io/v1alpha2"
    return {"apiVersion": version, "kind": "JobSet", "metadata": meta, "spec": spec}


def create(cluster: KubernetesCluster, obj: Object) -> None:
    cluster.kubectl("create", "-f", "-", input=json.dumps(obj))


def refusal(cluster: KubernetesCluster, obj: Object, verb: str = "create") -> str:
    done = cluster.try_kubectl(verb, "-f", "-", input=json.dumps(obj))
    assert done.returncode != 0
    return done.stderr


def running(cluster: KubernetesCluster) -> list[Object]:
    return [
        pod
        for pod in cluster.pods()
        if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
    ]


def wait_running(cluster: KubernetesCluster, count: int = 3) -> list[Object]:
    cluster.wait(lambda: len(running(cluster)) == count, f"{count} running pods")
    return running(cluster)


def wait_end(cluster: KubernetesCluster, how: str, name: str = "run") -> Object:
    cluster.wait(lambda: is_true(cluster.get("jobsets", name), how), f"{name} {how}")
    return cluster.get("jobsets", name)


def name_of(obj: Object) -> str:
    return str(obj["metadata"]["name"])


def events(cluster: KubernetesCluster, name: str) -> list[tuple[str, str]]:
    """Reasons and messages about an object."""
    said = cluster.kubectl(
        "get", "events", "-o", "json", f"--field-selector=involvedObject.name={name}"
    )
    return [(each["reason"], each["message"]) for each in json.loads(said)["items"]]
