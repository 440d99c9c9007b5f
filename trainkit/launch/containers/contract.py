"""What a runtime provides: the command that starts one container on a node, with the agent as its
only command."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.data.fetch.ranges import expand
from trainkit.jobs.containers import MOUNTABLE, Container
from trainkit.jobs.schema import Job
from trainkit.launch.containers.image_files import ImageFile, image_file, refuse_bad_file
from trainkit.runs.events import AllRanksStarted, first_event, read_events
from trainkit.runs.folder import RunFolder

SHARED_MEMORY = "/dev/shm"  # the host's own under every runtime here
NODE = '"$1"'  # of node.sh and inside.sh: the node's number
# Variables that would change the runtime itself, which is the host's program: only ranks get them.
ONLY_INSIDE = re.compile(
    r"PATH|HOME|TMPDIR|(LD|XDG|DOCKER|CONTAINERS?|PODMAN|APPTAINER|SINGULARITY|ENROOT|SLURM)_\w*"
)
# of the host's own, ranks get these: torch asks for a name, Slurm says which GPUs
CALLER = ("USER", "LOGNAME", "CUDA_VISIBLE_DEVICES")


class ShellText(str):
    """A word of a script that the node's own shell still has to read."""


def line(words: Sequence[str]) -> str:
    """Words as a line of a shell script."""
    return " ".join(word if isinstance(word, ShellText) else shlex.quote(word) for word in words)


@dataclass(frozen=True)
class Mount:
    """A folder or file of the host, and where it is in the container."""

    source: str
    target: str
    read_only: bool = False

    @property
    def text(self) -> str:
        """As most runtimes write it."""
        return f"{self.source}:{self.target}{':ro' if self.read_only else ''}"


@dataclass(frozen=True)
class NodeContainer:
    """The container around a node's agent, the same on every node of a session.

    Args:
        settings: its table of jobs.toml.
        mounts: all of them, outer ones first.
        env: what is set around the runtime too, since its hooks read some of it
            (NVIDIA_VISIBLE_DEVICES). ${node:VAR} is not in it: agents fill that in.
        gpus: the job computes on NVIDIA's GPUs.
        root: clusters.X.root, where it begins.
        node_folder: clusters.X.node_folder, made where it is missing.
        run: the run's id.
        attempt: its number.
        folder: the session's folder.
        since: the attempt from whose start on a container that a node has kept is a good one;
            0: nodes keep none.
        passed: further variables of the host's own that pass, where they are set.
        file: its image, where that is a file.
    """

    settings: Container
    mounts: tuple[Mount, ...]
    env: Mapping[str, str]
    gpus: bool
    root: str
    node_folder: str
    run: str
    attempt: int
    folder: Path
    since: int = 1
    passed: tuple[str, ...] = ()
    file: ImageFile | None = None

    @property
    def image(self) -> str:
        """What the runtime starts: the image, or the node's own copy of its file."""
        return self.settings.image if self.file is None else self.file.started

    @property
    def script(self) -> Path:
        """What is run in the container: inside.sh NODE."""
        return self.folder / "inside.sh"

    @property
    def command(self) -> tuple[str, ...]:
        """What is run in the container: the arguments after the image."""
        return ("/bin/bash", str(self.script), ShellText(NODE))

    @property
    def host_variables(self) -> tuple[str, ...]:
        """Of the host's own environment, what the container gets too."""
        return (*CALLER, *self.passed)

    @property
    def label(self) -> str:
        """How messages name it."""
        return f"containers.{self.settings.name}"


@dataclass(frozen=True)
class WorkFolder:
    """A folder that a runtime works in on every node.

    Args:
        default: where it is unless its variable or the site's configuration says otherwise, as a
            shell expands it.
        room: how many times the image's size has to be free there.
        room_to_import: the same where the image is not a file, and every node imports it.
        holds: what, where its file system must be the node's own; "": it may be shared.
        locked: files are locked there.
        runs: programs of images run there.
    """

    default: str
    room: float = 0.0
    room_to_import: float = 0.0
    holds: str = ""
    locked: bool = False
    runs: bool = False


@dataclass(frozen=True)
class NodeQuestions:
    """What `doctor` asks a node about a runtime.

    Args:
        program: of which it looks for the version, by these words.
        daemon: a command that fails where its daemon cannot be used; (): it has none.
        inspect: a command that prints an image's id and size; (): nodes keep no images by name.
        folders: where it works, by the variable that names each.
        config: the site's file of those variables, a line "NAME VALUE" each; "": none.
        subordinate_ids: without root it needs those of the user (subuid(5)).
    """

    program: str
    version: tuple[str, ...] = ("--version",)
    daemon: tuple[str, ...] = ()
    inspect: tuple[str, ...] = ()
    folders: Mapping[str, WorkFolder] = field(default_factory=dict)
    config: str = ""
    subordinate_ids: bool = False


@dataclass(frozen=True)
class Runtime:
    """One value of containers.X.runtime.

    Args:
        program: what has to be on the nodes.
        argv: the program and its options, a pure function of the container.
        questions: what `doctor` asks.
        files: small files it needs in the session's folder, by name.
        variables: set around it.
        before: lines of node.sh just before it starts.
        exit_codes: what its own mean, in words.
    """

    program: str
    argv: Callable[[NodeContainer], tuple[str, ...]]
    questions: NodeQuestions
    files: Callable[[NodeContainer], Mapping[str, str]] = lambda container: {}
    variables: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[NodeContainer], Sequence[str]] = lambda container: ()
    exit_codes: Mapping[int, str] = field(default_factory=dict)


def reusable_since(run: RunFolder) -> int:
    """The attempt after the last whose ranks did not begin: one of its nodes may have been
    stopped while it imported the image, and keeps half of it."""
    began = {
        attempt.number: first_event(read_events(attempt), AllRanksStarted) is not None
        for attempt in run.attempts()
    }
    return 1 + max((number for number, well in began.items() if not well), default=0)


def node_container(
    job: Job,
    folder: Path,
    run: str,
    attempt: int,
    since: int = 1,
    further: Sequence[str] = (),
    passed: Sequence[str] = (),
) -> NodeContainer | None:
    """What goes around the agents of a run's attempt; None where the job has no container.

    Args:
        folder: the session's.
        since: see NodeContainer.
        further: paths that are mounted besides what ranks need.
        passed: see NodeContainer.

    Raises:
        ConfigError: a path that no runtime can mount.
    """
    if job.container is None:
        return None
    cluster = job.cluster
    env = {
        name: value
        for name, value in job.environment.items()
        if "${node:" not in value and not ONLY_INSIDE.fullmatch(name)
    }
    return NodeContainer(
        job.container,
        mounts_of(job, further),
        env,
        cluster.device_type == "cuda",
        _root(job),
        cluster.node_folder,
        run,
        attempt,
        folder,
        since,
        tuple(passed),
        image_file(job.container),
    )


def check_container(job: Job) -> None:
    """Raise ConfigError (exit 3) with every path that the job's container has to have and no
    runtime can mount, TrainkitError (exit 8) where its image's file is not whole."""
    if job.container is not None:
        mounts_of(job)
        refuse_bad_file(job.container)


def _root(job: Job) -> str:
    return os.path.abspath(job.cluster.root or ".")


def mounts_of(job: Job, further: Sequence[str] = ()) -> tuple[Mount, ...]:
    """Everything ranks read or write and what is `further` asked for, at the path it has outside,
    and the container's own mounts; none twice, and none hidden by a later one."""
    assert job.container is not None
    root = _root(job)
    given = [
        Mount(source, target, bool(ro))
        for source, target, *ro in (text.split(":") for text in job.container.mounts)
    ]
    needed = [root, os.path.realpath(root), job.cluster.node_folder, *outside_paths(job)]
    needed += further
    mounts: list[Mount] = []
    for path in dict.fromkeys(needed):
        if not _is_mounted(path, [*given, *mounts]):
            mounts.append(Mount(path, path))
    if bad := [repr(m.source) for m in mounts if not re.fullmatch(MOUNTABLE, m.source)]:
        hint = (
            "no runtime takes a path with a blank, a comma, a colon or a quote: give the folder"
            " another name, or a link without them"
        )
        raise ConfigError(
            f"containers.{job.container.name} cannot mount {', '.join(bad)}, which the job reads or"
            " writes",
            hint=hint,
        )
    return tuple(
        sorted(
            dict.fromkeys([*mounts, *given]),
            key=lambda mount: len(Path(os.path.normpath(mount.target)).parts),
        )
    )


def _is_mounted(path: str, mounts: Sequence[Mount]) -> bool:
    """Whether the container has a folder already: by a mount of its own path, by a writable one
    above it, or as shared memory, which is the host's."""
    inside = Path(path)
    if inside.is_relative_to(SHARED_MEMORY):
        return True
    return any(
        mount.target == path
        or (
            mount.source == mount.target
            and not mount.read_only
            and inside.is_relative_to(mount.target)
        )
        for mount in mounts
    )


def outside_paths(job: Job) -> list[str]:
    """Folders outside of the root that the job's own table sends its ranks to: pairs of
    `prefixes`, a model of `init_from`."""
    datasets = [*job.prepared_datasets]
    for dataset in datasets:  # blends may hold blends
        datasets += [
            part.dataset
            for blend in (dataset.blend, dataset.valid_blend, dataset.test_blend)
            for part in blend.values()
        ]
    folders = [
        _before_pattern(text)
        for dataset in datasets
        for given in dataset.prefixes
        for text in expand(given)
    ]
    if job.init_from and not job.init_from.startswith("hf:"):
        folders.append(job.init_from)
    return sorted(dict.fromkeys(folders))


def _before_pattern(path: str) -> str:
    """The folder of a path as far as it is not a glob pattern."""
    parts = Path(path).parent.parts
    plain = next(
        (at for at, part in enumerate(parts) if any(sign in part for sign in "*?[")), len(parts)
    )
    return str(Path(*parts[:plain]))
