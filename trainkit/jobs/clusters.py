"""Where jobs run, and what is known of each launcher. Key names are Slurm's, where it has one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.jobs import sbatch
from trainkit.jobs.devices import Device, built_in_device
from trainkit.jobs.kubernetes import KubernetesOptions
from trainkit.jobs.table import NAME, Environment, SecretNames, Strings, Table, needs, wrong


@dataclass(frozen=True)
class LauncherTraits:
    """What is special about the hosts that a launcher starts ranks on.

    Args:
        one_machine: ranks run on this machine only.
        hostfile: hosts are named in a hostfile and reached over ssh.
        batch: nodes come from a batch scheduler's allocation. It shares out their slots, limits
            their time (options of sbatch), ends what a job leaves behind, and its TERM means
            "save".
        pyxis: ranks may start in containers of the scheduler's own plugin.
        pods: hosts are pods, which clusters.X.kubernetes describes with their image, and which
            Kubernetes gives the values of secrets.
        term: what TERM means to an agent, see SessionDocument.
        connect_seconds: by default, until the agents of all hosts must have answered.
    """

    one_machine: bool = False
    hostfile: bool = False
    batch: bool = False
    pyxis: bool = False
    pods: bool = False
    term: str = "stop"
    connect_seconds: float = 30.0


LAUNCHER_TRAITS = {
    "local": LauncherTraits(one_machine=True),
    "ssh": LauncherTraits(hostfile=True),
    "pdsh": LauncherTraits(hostfile=True),
    # Slurm runs its own prologs, and starts all nodes of a large job before the first can answer
    "slurm": LauncherTraits(batch=True, pyxis=True, term="save", connect_seconds=300.0),
    # nodes that have not had the image fetch it first
    "kubernetes": LauncherTraits(batch=True, pods=True, term="pass", connect_seconds=900.0),
}


TIME = r"^(\d+-)?\d{1,2}(:\d{2}){0,2}$|^\d+(:\d{2}){0,2}$"  # Slurm's forms of --time
# an image of 23 GiB took 74 to 200 s on 64 nodes (Azure, docs/containers.md)
CONTAINER_CONNECT_SECONDS = 900.0
SlurmOptions = dict[Annotated[str, Field(pattern=r"^[a-z][a-z0-9-]*$")], str | int | bool]


def refuse_unknown_options(options: SlurmOptions) -> SlurmOptions:
    """The options themselves, once sbatch would know them all and each fits on a line; all
    objections are said at once."""
    found = {
        name: sbatch.objection(name) or sbatch.wrong_value(name, value)
        for name, value in options.items()
    }
    for name, value in options.items():
        if isinstance(value, str) and not value.isprintable() and not found[name]:
            found[name] = f"slurm.{name} = {value!r} does not fit on one line of a batch script"
    if bad := {name: said for name, said in found.items() if said}:
        raise wrong(f"slurm.{next(iter(bad))}", "; ".join(bad.values()))
    return options


class StagePlace(Table):
    """Where the units of one stage run on a cluster."""

    partition: str | None = Field(None, description="Slurm partition; by default the cluster's")
    nodes: int = Field(1, ge=1, description="nodes the units are spread over")
    tasks_per_node: int = Field(1, ge=1, description="units that run side by side on a node")
    time: str | None = Field(
        None, pattern=TIME, description="time limit of one unit, as Slurm writes it"
    )
    slurm: SlurmOptions = Field(
        default_factory=dict,
        description=(
            "long options of sbatch for its arrays, over those of the cluster; false takes one away"
        ),
    )

    @field_validator("slurm")
    @classmethod
    def _known_to_sbatch(cls, value: SlurmOptions) -> SlurmOptions:
        for name in ("partition", "time"):
            if name in value:
                raise wrong(f"slurm.{name}", f"slurm.{name} is a key of the stage itself: {name}")
        for name in (
            "job-name",
            "ntasks-per-node",
            "output",
            "open-mode",
            "export",
            "dependency",
            "kill-on-invalid-dep",
        ):
            if name in value:
                raise wrong(
                    f"slurm.{name}",
                    f"slurm.{name} cannot be set for a stage: trainkit does, for every array of it",
                )
        return refuse_unknown_options(value)


# whose units can run on a cluster's nodes
STAGES = ("prep-data", "index", "weights", "precompile", "engine-prebuild")
LOCAL_STAGES = {  # why the others run where you type
    "build": "it compiles for that interpreter",
    "build-container": "the builder and its network are there",
    "engine-source": "it fetches over the network",
    "engine-install": "it fetches over the network",
}


def refuse_unknown_stages(places: dict[str, StagePlace]) -> dict[str, StagePlace]:
    """The places themselves, once each is of a stage that there is."""
    for name in places:
        known = ", ".join(STAGES)
        if name in LOCAL_STAGES:
            raise wrong(
                f"stages.{name}",
                f"stages.{name}: the stage '{name}' always runs where you type, since"
                f" {LOCAL_STAGES[name]}; remove the table",
            )
        if name not in STAGES:
            raise wrong(
                f"stages.{name}", f"stages.{name}: there is no stage {name!r}; stages: {known}"
            )
    return places


class Filesystem(Table):
    """A file system that nodes share."""

    path: str | None = Field(
        None,
        pattern="^/",
        description=(
            "where it is mounted: the file system of a root below it, where a job names none"
        ),
    )
    capacity_bytes: int | None = Field(None, ge=1, description="its size, or this project's quota")
    write_gib_per_second: float | None = Field(
        None, gt=0, description="aggregate bandwidth of writing, 2**30 bytes a second"
    )
    read_gib_per_second: float | None = Field(
        None, gt=0, description="aggregate bandwidth of reading, 2**30 bytes a second"
    )


class FailureRule(Table):
    """What a failure is whose message or last lines match a regular expression; these rules come
    before the built-in ones."""

    match: str = Field(
        min_length=1,
        description=(
            "regular expression (Python's) that is searched in a failed rank's message and last"
            " lines"
        ),
    )
    failure_class: Literal["user", "infra", "hang", "preempted"] = Field(
        description="what such a failure is: it decides which retry budget it uses up"
    )
    suspect: bool = Field(False, description="leave the host out for a while (quarantine_seconds)")
    advice: str = Field("", description="what `why` tells the person who asks")

    @field_validator("match")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise wrong(
                "match", f"match = '{value}' is not a regular expression: {error}"
            ) from None
        return value


class WatchLimits(Table):
    """How long is waited for what, in seconds."""

    connect: float | None = Field(
        None,
        gt=0,
        description=(
            "until the agents of all hosts have answered; by default 30, on Slurm 300, and 900 on"
            " Kubernetes and where each starts a container first"
        ),
    )
    start: float = Field(
        1800, gt=0, description="from the start of the ranks to the first step; longer is a hang"
    )
    heartbeat: float = Field(
        600, gt=0, description="without a sign of progress of any rank; longer is a hang"
    )
    hang_floor: float = Field(
        20,
        gt=0,
        description=(
            "without a sign of progress that are no hang however short the steps are; a hang is"
            " ten times the longest step so far, but at most `heartbeat`"
        ),
    )
    lease: float = Field(
        15,
        gt=0,
        description=(
            "of silence between supervisor and agent; longer is a lost contact, and the host stops"
            " its ranks"
        ),
    )
    grace: float = Field(
        10, ge=0, description="from TERM to KILL of ranks that are stopped; 0 of engine native's"
    )
    clock: float = Field(30, gt=0, description="that the clocks of two hosts may differ")


class Fleet(Table):
    """The compute nodes of an AWS ParallelCluster, which `fleet` starts and stops."""

    name: str = Field(
        pattern=r"^[A-Za-z][A-Za-z0-9-]*$", description="the cluster's name, as pcluster knows it"
    )
    region: str | None = Field(
        None,
        pattern=r"^[a-z0-9-]+$",
        description="its AWS region; by default that of your AWS configuration",
    )


class Cluster(Table):
    """Where jobs run."""

    name: str = Field("", pattern=NAME, description="the table's name, filled in")
    launcher: Literal["local", "ssh", "pdsh", "slurm", "kubernetes"] = Field(
        "local", description="how ranks are started"
    )
    device: Device = Field(
        default_factory=lambda: built_in_device("cpu"),
        description="name of a row of the device table: cpu, cuda (any GPU), h100-sxm-80gb, ...",
    )
    hostfile: str | None = Field(
        None,
        description=(
            "ssh, pdsh: the file that lists hosts and their slots; by default /job/hostfile"
        ),
    )
    spares: int = Field(
        0,
        ge=0,
        description=(
            "ssh, pdsh: hosts of the hostfile beyond `nodes` that replace bad ones; they wait with"
            " what ranks need imported, and hold no slots"
        ),
    )
    interface: str | None = Field(
        None,
        min_length=1,
        description=(
            "ssh, pdsh: the network that ranks talk over: an interface (eth0) or a CIDR"
            " (10.0.0.0/8)"
        ),
    )
    ssh_args: Strings = Field((), description="ssh, pdsh: more arguments of ssh")
    srun_args: Strings = Field(
        (),
        description=(
            "slurm: more arguments of the srun that starts an agent on each node, --network=... say"
        ),
    )
    python: str | None = Field(
        None,
        pattern="^/",
        description=(
            "ssh, pdsh, kubernetes: the Python interpreter on the nodes, 3.11 or newer (3.8 where"
            " they run only engines other than 'native', and no stages); by default the path of the"
            " one on the head; of an image: python3"
        ),
    )
    node_folder: str = Field(
        "/dev/shm",
        pattern="^/",
        description="a folder of each node's own, for heartbeats and the locks of its slots",
    )
    watch: WatchLimits = Field(default_factory=WatchLimits)
    failures: dict[Annotated[str, Field(pattern=NAME)], FailureRule] = Field(
        default_factory=dict,
        description=(
            "what failures mean, by names of your own; tried in order, before the rules that come"
            " with trainkit"
        ),
    )
    quarantine_seconds: float = Field(
        3600,
        ge=0,
        description="ssh, pdsh: how long a host that is suspected of a failure is left out",
    )
    prolog: Strings = Field(
        (), description="shell lines that a node must run before anything else (modules, venv)"
    )
    slurm: SlurmOptions = Field(default_factory=dict, description="long options of sbatch")
    stages: dict[Annotated[str, Field(pattern=NAME)], StagePlace] = Field(
        default_factory=dict,
        description="where stages run: prep-data, index, weights, engine-prebuild",
    )
    filesystems: dict[Annotated[str, Field(pattern=NAME)], Filesystem] = Field(
        default_factory=dict, description="shared file systems, by names of your own"
    )
    kubernetes: KubernetesOptions | None = Field(None, description="its nodes run pods")
    fleet: Fleet | None = Field(None, description="its nodes are an AWS ParallelCluster's")
    gpus_per_node: int = Field(
        0, ge=0, description="GPUs (or cores of another accelerator) of one node"
    )
    memory_bytes: int | None = Field(
        None,
        ge=1,
        description=(
            "memory of one node; not given: unknown, but for launcher = 'local' on CPUs, which is"
            " this machine"
        ),
    )
    max_nodes: int | None = Field(None, ge=1, description="nodes there are")
    ranks_per_node: int | None = Field(
        None,
        ge=1,
        description=(
            "processes a node; by default gpus_per_node, at least 1; slots of a hostfile"
            " override it"
        ),
    )
    network_gb_per_second: float | None = Field(
        None, gt=0, description="of one node to the others, one way, 1e9 bytes a second"
    )
    root: str | None = Field(
        None,
        min_length=1,
        description="folder for runs, code snapshots and data; by default that of jobs.toml",
    )
    hub_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^@\s]+$",
        description="where hf:NAME is fetched from; by default the public hub",
    )
    env: Environment = Field(
        default_factory=dict, description="environment variables of every rank"
    )
    secrets: SecretNames = Field(
        (),
        description=(
            "names of secret variables taken from the caller's environment; '?' at the end:"
            " optional"
        ),
    )

    @field_validator("slurm")
    @classmethod
    def _known_to_sbatch(cls, value: SlurmOptions) -> SlurmOptions:
        return refuse_unknown_options(value)

    @model_validator(mode="after")
    def _pods_can_be_made(self) -> Cluster:
        pods = self.kubernetes
        if not self.launcher_traits.pods:
            return self
        if pods is None:
            raise needs(
                "launcher",
                f"launcher = '{self.launcher}' needs a table [clusters.{self.name}.kubernetes] with"
                " image and volumes",
            )
        if self.root is not None and not pods.holds(self.root):
            raise needs(
                "kubernetes.volumes",
                f"kubernetes.volumes: none that can be written to holds root = '{self.root}', the"
                " folder of runs and data, by the same path as here",
            )
        for stage, place in self.stages.items():
            for key in ("partition", "slurm"):
                if getattr(place, key):
                    raise wrong(
                        f"stages.{stage}.{key}",
                        f"stages.{stage}.{key} is Slurm's; units in pods get their part of"
                        " kubernetes.resources",
                    )
        asked = [name for name in self.secrets if not name.endswith("?")]
        self.refuse_in_pods(None, asked, "secrets")
        return self

    def refuse_in_pods(
        self, container: str | None, secrets: Sequence[str], key: str = "notify"
    ) -> None:
        """Raise an error of the schema where the nodes are pods that cannot have this container, or
        do not have these secrets, which `key` names."""
        if not self.launcher_traits.pods or self.kubernetes is None:
            return
        if container is not None:
            raise wrong(
                "container",
                f"container '{container}': pods run in clusters.{self.name}.kubernetes.image;"
                " container = 'none' takes it away",
            )
        if missing := [name for name in secrets if name not in self.kubernetes.secrets]:
            raise needs(
                key,
                f"{key}: {', '.join(missing)}: pods do not have your environment; say which secret"
                f' holds it: clusters.{self.name}.kubernetes.secrets.{missing[0]} = "NAME/KEY"',
            )

    def connect_seconds(self, *, container: bool = False) -> float:
        """watch.connect, or what it is by default."""
        usual = CONTAINER_CONNECT_SECONDS if container else self.launcher_traits.connect_seconds
        return self.watch.connect or usual

    @property
    def root_folder(self) -> Path:
        """The folder that holds data, stamps, code and runs; by default the one that this process
        is in."""
        return Path(self.root or ".")

    @property
    def launcher_traits(self) -> LauncherTraits:
        """What is special about the hosts that the launcher starts ranks on."""
        return LAUNCHER_TRAITS[self.launcher]

    @field_validator("stages")
    @classmethod
    def _stages_that_there_are(cls, value: dict[str, StagePlace]) -> dict[str, StagePlace]:
        return refuse_unknown_stages(value)

    @property
    def device_type(self) -> Literal["cpu", "cuda", "neuron"]:
        """torch's name for the kind of device."""
        return self.device.kind
