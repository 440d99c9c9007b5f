"""[clusters.X.kubernetes]: what the pods of a run are made of. Values are held to the rules that
the API server has for them, so that a manifest made of them is taken."""

from __future__ import annotations

import posixpath
import re
from pathlib import PurePosixPath
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from trainkit.jobs.image_reference import objection_to
from trainkit.jobs.table import VARIABLE, Table, needs, wrong

# apimachinery, pkg/util/validation: labels of DNS (RFC 1123), names of them, keys and values of
# labels
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_WORD = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_QUANTITY = re.compile(r"(\d+\.?\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
_SCALES = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3}
_SCALES |= {letter: 1000.0 ** (at + 2) for at, letter in enumerate("MGTPE")}
_SCALES |= {f"{letter}i": 1024.0 ** (at + 1) for at, letter in enumerate("KMGTPE")}
NATIVE = ("cpu", "memory", "ephemeral-storage")
RESERVED = "TRAINKIT_"  # variables that trainkit sets in each pod
MIB = 2**20


def quantity(text: object) -> float | None:
    """A quantity of Kubernetes ("500m", "64Gi", 8) as a number; None where it is none."""
    found = _QUANTITY.fullmatch(str(text))
    if found is None:
        return None
    number, unit = found[1], found[2] or ""
    return (
        float(number + unit)
        if unit[:1] in "eE" and unit[1:]
        else float(number) * _SCALES.get(unit, 1.0)
    )


def _as(pattern: str, longest: int, words: str) -> AfterValidator:
    """A text of this form; where it is not, an error that says the form in words."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value) or len(value) > longest:
            raise wrong("", f"'{value}' is not {words}, of at most {longest} characters")
        return value

    return AfterValidator(check)


def _quantity(value: str | float) -> str | float:
    if quantity(value) is None:
        raise wrong("", f"'{value}' is not a quantity of Kubernetes: 8, '500m', '64Gi'")
    return value


def _image(value: str) -> str:
    if said := objection_to(value):
        raise wrong("", said)
    return value


_NAME_WORDS = "a name of Kubernetes: lower-case letters, digits, '-' and '.'"
Label = Annotated[
    str, _as(_LABEL, 63, "a name of Kubernetes here: lower-case letters, digits and '-'")
]
ObjectName = Annotated[str, _as(_SUBDOMAIN, 253, _NAME_WORDS)]
QueueName = Annotated[str, _as(_SUBDOMAIN, 63, _NAME_WORDS)]  # a label's value too
LabelKey = Annotated[
    str,
    _as(
        rf"({_SUBDOMAIN}/)?(?=[^/]{{1,63}}$){_WORD}",
        317,
        "the key of a label: [DOMAIN/]NAME, NAME of at most 63 characters,",
    ),
]
LabelValue = Annotated[
    str, _as(f"({_WORD})?", 63, "the value of a label: letters, digits, '-', '_' and '.'")
]
SecretKey = Annotated[
    str, _as(rf"{_SUBDOMAIN}/[-._A-Za-z0-9]+", 507, "SECRET/KEY, the name of a secret and its key")
]
Quantity = Annotated[str | int | float, AfterValidator(_quantity)]
MountPath = Annotated[
    str, _as(r"/(?!.*\.\.)[^:]+", 4096, "the absolute path of a folder, without ':' and '..',")
]
Capability = Annotated[
    str, _as(r"(?!CAP_)[A-Z][A-Z_]*", 63, "a capability as Kubernetes writes it: IPC_LOCK,")
]


class KubernetesVolume(Table):
    """A volume that each pod mounts."""

    claim: ObjectName | None = Field(None, description="name of a PersistentVolumeClaim")
    host_path: MountPath | None = Field(None, description="a folder that every node has")
    mount: MountPath = Field(description="where pods see it")
    read_only: bool = Field(False, description="pods may not write there")

    @model_validator(mode="after")
    def _is_one_thing(self) -> KubernetesVolume:
        if (self.claim is None) == (self.host_path is None):
            raise wrong(
                "mount", f"the volume at {self.mount} needs claim or host_path, one of them"
            )
        return self


class KubernetesToleration(Table):
    """A taint that does not keep pods away from a node."""

    key: LabelKey | None = Field(None, description="of the taint; by default all of them")
    value: LabelValue | None = Field(None, description="of the taint; by default any")
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = Field(
        None, description="of the taint; by default all of them"
    )
    seconds: int | None = Field(
        None, ge=0, description="how long a taint NoExecute is tolerated; without end by default"
    )

    @model_validator(mode="after")
    def _makes_sense(self) -> KubernetesToleration:
        if self.value is not None and self.key is None:
            raise wrong("value", f"value = '{self.value}' needs the key that has it")
        if self.seconds is not None and self.effect != "NoExecute":
            raise wrong("seconds", "seconds are of effect = 'NoExecute'")
        return self


class KubernetesTopology(Table):
    """How near to each other Kueue places the pods of a run: in one domain of a level, which is a
    label of nodes."""

    required: LabelKey | None = Field(None, description="a level; without room there, pods wait")
    preferred: LabelKey | None = Field(None, description="a level; without room there, the next")

    @model_validator(mode="after")
    def _has_one_level(self) -> KubernetesTopology:
        if (self.required is None) == (self.preferred is None):
            raise wrong("required", "topology needs required or preferred, one of them")
        return self


class KubernetesOptions(Table):
    """The pods of launcher 'kubernetes'."""

    namespace: Label = Field("default", description="where everything is made")
    context: str | None = Field(
        None, min_length=1, description="of kubectl's configuration; by default the current one"
    )
    queue: QueueName | None = Field(
        None, description="Kueue's LocalQueue; by default pods are not queued"
    )
    priority_class: QueueName | None = Field(
        None, description="with queue Kueue's WorkloadPriorityClass, otherwise a PriorityClass"
    )
    image: Annotated[str, AfterValidator(_image)] = Field(
        description="of all pods: it holds a Python and what ranks need installed"
    )
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(strict=False)] = Field(
        (), description="names of secrets that the image's registry asks for"
    )
    service_account: ObjectName | None = Field(
        None,
        description=(
            "what the pod of the supervisor may do: with it, it replaces pods of nodes that are"
            " gone, and leaves bad nodes out"
        ),
    )
    resources: dict[LabelKey, Quantity] = Field(
        default_factory=dict,
        description=(
            "what a pod gets of its node: cpu, memory, 'nvidia.com/gpu', 'rdma/NAME', ...; by"
            " default, on GPUs, those of its ranks"
        ),
    )
    tolerations: Annotated[tuple[KubernetesToleration, ...], Field(strict=False)] = Field(
        (), description="taints of nodes that pods may run on all the same"
    )
    node_selector: dict[LabelKey, LabelValue] = Field(
        default_factory=dict, description="labels that a node must have"
    )
    volumes: Annotated[tuple[KubernetesVolume, ...], Field(strict=False)] = Field(
        (), description="what pods mount; one of them holds the cluster's root"
    )
    secrets: dict[Annotated[str, Field(pattern=VARIABLE + "$")], SecretKey] = Field(
        default_factory=dict,
        description="environment variables of pods: the secret and its key that hold the value",
    )
    topology: KubernetesTopology | None = Field(
        None, description="how near to each other Kueue places the pods; by default anywhere"
    )
    grace: int = Field(
        300, ge=1, description="seconds from TERM to KILL of a pod: time for a checkpoint, and 30"
    )
    shm: Quantity = Field(
        "16Gi", description="size of /dev/shm; what is in it counts as the pod's memory"
    )
    annotations: dict[LabelKey, str] = Field(
        default_factory=dict, description="of each pod: networks, say"
    )
    host_network: bool = Field(False, description="pods use their node's own network")
    capabilities: Annotated[tuple[Capability, ...], Field(strict=False)] = Field(
        (), description="of Linux, such as IPC_LOCK, which RDMA may need"
    )
    run_as: Annotated[str, _as(r"\d{1,9}:\d{1,9}", 19, "UID:GID, two numbers")] | None = Field(
        None, description="UID:GID that pods write files as; by default the image's user"
    )
    supervisor: Literal["first", "pod"] = Field(
        "first", description="where a run's supervisor is: in its first pod, or in one of its own"
    )

    @model_validator(mode="after")
    def _resources_are_known(self) -> KubernetesOptions:
        for name, value in self.resources.items():
            key = f"resources.{name}"
            if "/" not in name and name not in NATIVE and not name.startswith("hugepages-"):
                raise wrong(
                    "resources",
                    f"{key}: Kubernetes knows no '{name}'; others than {', '.join(NATIVE)} have a"
                    " domain, as 'nvidia.com/gpu' has",
                )
            number = quantity(value) or 0.0
            if "/" in name and number != int(number):
                raise wrong("resources", f"{key} = {value}: of devices there are whole numbers")
            if name == "memory" and number < MIB:
                raise wrong("resources", f"{key} = {value} is below 1Mi: '64Gi' are 64 GiB")
        memory = self.resources.get("memory")
        shared = quantity(self.shm) or 0.0
        if memory is not None and shared >= (quantity(memory) or 0.0):
            raise wrong(
                "shm", f"shm = '{self.shm}' counts as memory, and resources.memory = {memory}"
            )
        if shared < MIB:
            raise wrong("shm", f"shm = '{self.shm}' is below 1Mi")
        return self

    @model_validator(mode="after")
    def _names_are_free(self) -> KubernetesOptions:
        mounts = [posixpath.normpath(volume.mount) for volume in self.volumes]
        for mount in mounts:
            if mounts.count(mount) > 1 or mount == "/dev/shm":
                taken = "mounted twice" if mount != "/dev/shm" else "made of shm"
                raise wrong("volumes", f"volumes: {mount} is {taken}")
        for name in self.secrets:
            if name.startswith(RESERVED):
                raise wrong(f"secrets.{name}", f"secrets.{name}: trainkit sets {RESERVED}* itself")
        if self.topology is not None and self.queue is None:
            raise needs("topology", "topology needs queue: it is Kueue that places pods so")
        return self

    def holds(self, folder: str) -> bool:
        """Whether a volume that can be written to holds the folder."""
        path = PurePosixPath(folder)
        inside = [each for each in self.volumes if path.is_relative_to(each.mount)]
        nearest = max(inside, key=lambda each: len(posixpath.normpath(each.mount)), default=None)
        return nearest is not None and not nearest.read_only
