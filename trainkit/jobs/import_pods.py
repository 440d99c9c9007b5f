"""Tables of jobs.toml from a manifest of another project: a TrainJob (Kubeflow Trainer 2,
trainjob_types.go) or a JobSet. What was read is taken out of the document, so that what is left
can be named."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs.table import OF_RANKS

KINDS = ("TrainJob", "JobSet")
QUEUE = "kueue.x-k8s.io/queue-name"
PRIORITY = "kueue.x-k8s.io/priority-class"
TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
GPUS = "nvidia.com/gpu"
# trainkit writes these itself, or they are of no run
IMPLIED = (
    *("apiVersion", "kind", "status", "suspend", "replicas", "completions", "parallelism"),
    *("completionMode", "restartPolicy", "podReplacementPolicy", "network", "runtimeRef"),
    *("automountServiceAccountToken", "dnsPolicy", "imagePullPolicy", "manager", "operator"),
)
TRAINER_RANKS = ("PET_", "JOB_COMPLETION_INDEX")  # names of variables that a launcher sets


@dataclass(frozen=True)
class PodManifest:
    """A manifest as it was read.

    Args:
        name: of the object.
        nodes: how many pods train.
        script: what they run, as a shell would.
        cluster: keys of [clusters.X].
        pods: keys of [clusters.X.kubernetes].
        not_taken: what has no place there, a line each.
    """

    name: str
    nodes: int
    script: str
    cluster: Mapping[str, object]
    pods: Mapping[str, object]
    not_taken: tuple[str, ...]


def read_manifest(path: Path) -> PodManifest | None:
    """The TrainJob or JobSet in a YAML file; None where it has none. Raises ConfigError: it has
    several, or one without a container."""
    import yaml  # 20 ms, for one task

    try:
        documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, yaml.YAMLError, RecursionError):
        return None  # the next that reads it says why
    found = [each for each in documents if isinstance(each, dict) and each.get("kind") in KINDS]
    if not found:
        return None
    if len(found) > 1:
        raise ConfigError(f"{path} has {len(found)} of {' and '.join(KINDS)}", hint="one a file")
    others = [f"{each.get('kind')}: another object" for each in documents if each not in found]
    try:
        return _Reader(copy.deepcopy(found[0])).manifest(others)
    except (AttributeError, TypeError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"{path} is no {found[0]['kind']} as Kubernetes has it: {error}"
        ) from None


class _Reader:
    """Takes values out of a document.

    `Any`: it is YAML, and read_manifest refuses what has another form.
    """

    def __init__(self, document: Any) -> None:
        self.left = document
        self.cluster: dict[str, object] = {"launcher": "kubernetes"}
        self.pods: dict[str, object] = {}

    def manifest(self, others: list[str]) -> PodManifest:
        spec = self.left["spec"]
        meta = self.left["metadata"]
        name = str(meta.pop("name", None) or meta.pop("generateName", "imported")).rstrip("-")
        labels = meta.get("labels", {})
        self.take("namespace", meta, "namespace")
        self.take("queue", labels, QUEUE)
        self.take("priority_class", labels, PRIORITY)
        if self.left["kind"] == "TrainJob":
            nodes, template, container = self._trainer(spec)
        else:
            nodes, template, container = self._largest(spec["replicatedJobs"])
        for how in ("required", "preferred"):
            notes = template.get("metadata", {}).get("annotations", {})
            if level := notes.pop(TOPOLOGY.format(how), None):
                self.pods["topology"] = {how: level}
        self._pod(template.get("spec", {}), container)
        environment = self._environment(container)
        words = [*container.pop("command", []), *container.pop("args", [])]
        container.pop("name", None)
        known = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
        for key, value in environment.items():
            words = [word.replace(f"$({key})", value) for word in words]
        if environment:
            self.cluster["env"] = environment
        script = "\n".join([*known, shlex.join(words)]) + "\n"
        left = (*others, *_left_over(self.left, ""))
        return PodManifest(name, nodes, script, self.cluster, self.pods, left)

    def take(self, key: str, table: Any, name: str) -> None:
        """A value of the document as one of [clusters.X.kubernetes]."""
        if (value := table.pop(name, None)) is not None:
            self.pods[key] = value

    def _trainer(self, spec: Any) -> tuple[int, Any, Any]:
        """(pods, what patches say of them, their container)."""
        trainer = spec["trainer"]
        nodes = int(trainer.pop("numNodes", 1))
        ranks = trainer.pop("numProcPerNode", None)
        if isinstance(ranks, int):
            self.cluster["ranks_per_node"] = ranks
        trainer["resources"] = trainer.pop("resourcesPerNode", {})
        template: Any = {}
        for patch in spec.get("runtimePatches", []):
            runtime = patch.get("trainingRuntimeSpec", {}).get("template", {}).get("spec", {})
            for job in runtime.get("replicatedJobs", []):
                if job["name"] == "node":
                    template = job["template"]["spec"]["template"]
        for other in template.get("spec", {}).get("containers", []):
            trainer.setdefault("volumeMounts", []).extend(other.pop("volumeMounts", []))
        return nodes, template, trainer

    def _largest(self, jobs: Any) -> tuple[int, Any, Any]:
        """The same of the replicated job with most pods."""

        def pods(job: Any) -> int:
            return int(job.get("replicas", 1)) * int(job["template"]["spec"].get("parallelism", 1))

        job = max(jobs, key=pods)
        template = job["template"]["spec"]["template"]
        job.pop("name")
        return pods(job), template, template["spec"]["containers"][0]

    def _pod(self, pod: Any, container: Any) -> None:
        for key, name in (
            ("service_account", "serviceAccountName"),
            ("node_selector", "nodeSelector"),
            ("host_network", "hostNetwork"),
            ("grace", "terminationGracePeriodSeconds"),
        ):
            self.take(key, pod, name)
        if "queue" not in self.pods:
            self.take("priority_class", pod, "priorityClassName")
        self.take("image", container, "image")
        if secrets := pod.pop("imagePullSecrets", []):
            self.pods["image_pull_secrets"] = [each["name"] for each in secrets]
        if tolerated := [
            _toleration(each)
            for each in pod.get("tolerations", [])
            if each.get("operator", "Equal") in ("Equal", "Exists")
        ]:
            self.pods["tolerations"] = tolerated
        resources = container.get("resources", {})
        asked = {**resources.pop("requests", {}), **resources.pop("limits", {})}
        if asked:
            self.pods["resources"] = asked
        if GPUS in asked:
            self.cluster |= {"device": "cuda", "gpus_per_node": int(asked[GPUS])}
        self.take(
            "capabilities", container.get("securityContext", {}).get("capabilities", {}), "add"
        )
        self._volumes(pod.get("volumes", []), container.get("volumeMounts", []))

    def _volumes(self, volumes: Any, mounts: Any) -> None:
        taken = []
        for mount in [each for each in mounts if "subPath" not in each]:
            volume = next(each for each in volumes if each.get("name") == mount["name"])
            place = mount["mountPath"]
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            path = volume.get("hostPath", {}).get("path")
            if claim or path:
                source = {"claim": claim} if claim else {"host_path": path}
                read_only = {"read_only": True} if mount.get("readOnly") else {}
                taken.append({**source, "mount": place, **read_only})
            elif place == "/dev/shm" and volume.get("emptyDir", {}).get("medium") == "Memory":
                self.take("shm", volume["emptyDir"], "sizeLimit")
            else:
                continue
            mount.clear()
            volume.clear()
        if taken:
            self.pods["volumes"] = taken

    def _environment(self, container: Any) -> dict[str, str]:
        """Variables with a value; those of secrets become the cluster's."""
        found: dict[str, str] = {}
        secrets: dict[str, str] = {}
        for each in container.get("env", []):
            secret = each.get("valueFrom", {}).get("secretKeyRef")
            name = each["name"]
            if secret:
                secrets[name] = f"{secret['name']}/{secret['key']}"
            elif "value" in each and name not in OF_RANKS:
                found[name] = str(each["value"])
            if secret or "value" in each or name.startswith(TRAINER_RANKS):
                each.clear()
        if secrets:
            self.pods["secrets"] = secrets
            self.cluster["secrets"] = list(secrets)
        return {name: each for name, each in found.items() if not name.startswith(TRAINER_RANKS)}


def _toleration(given: Any) -> dict[str, object]:
    names = (("key", "key"), ("value", "value"), ("effect", "effect"))
    found = {key: given[name] for key, name in names if given.get(name) is not None}
    if "tolerationSeconds" in given:
        found["seconds"] = given["tolerationSeconds"]
    given.clear()
    return found


def _left_over(value: object, path: str) -> Iterator[str]:
    """A line for each value that was not taken."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in IMPLIED:
                yield from _left_over(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for number, each in enumerate(value):
            yield from _left_over(each, f"{path}[{number}]")
    elif value is not None:
        yield f"{path} = {value}"
