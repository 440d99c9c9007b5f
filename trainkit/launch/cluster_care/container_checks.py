"""What `doctor` says of the containers of a cluster's jobs: the runtime, its folders and the image
on every host, and how long a container takes to start there."""

from __future__ import annotations

import json
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.base.files import write_json, write_text
from trainkit.base.lazy_dataclasses import asdict, dataclass, field
from trainkit.base.records import Record
from trainkit.jobs.schema import Job
from trainkit.launch.cluster_care.host_checks import GIB
from trainkit.launch.cluster_care.remote_commands import (
    CommandResult,
    RemoteCommand,
    run_on_agents,
)
from trainkit.launch.containers import NodeContainer, node_container
from trainkit.launch.containers.contract import WorkFolder
from trainkit.launch.containers.runtimes import RUNTIMES, extra_files, start_lines
from trainkit.launch.supervise.agent_pool import AgentPool
from trainkit.launch.supervise.host_consistency import Finding

PROBE = Path("trainkit", "launch", "cluster_care", "container_probe.py")
SLOW = 3.0  # times what most hosts take
SLOW_SECONDS = 5.0  # more than what most hosts take
LATE_SHARE = 0.5  # of watch.connect
LEAST = 2 * GIB  # where the image's size is not known


@dataclass(frozen=True)
class RuntimeFolder:
    """A folder of the runtime's on one host; of one that is missing, what it would be made in.

    Args:
        path: where it is.
        exists: whether it is there.
        kind: of its file system, as mount(8) names it.
        source: what is mounted.
        shared: whether other hosts see it too.
        noexec: whether programs on it cannot be run.
        free: bytes.
        unwritable: why one cannot write there.
        unlockable: why a file there cannot be locked.
    """

    path: str
    exists: bool
    kind: str
    source: str
    shared: bool
    noexec: bool
    free: int
    unwritable: str | None
    unlockable: str | None


@dataclass(frozen=True)
class ContainerReport(Record):
    """One container's table on one host.

    Args:
        host: its name.
        container: the [containers.X] table.
        runtime: containers.X.runtime.
        image: containers.X.image.
        error: why the host could not be asked; None where it could.
        path: where the runtime's program is.
        version: of it.
        runtime_error: why it is not usable.
        image_error: why the image is not.
        size: of the image, in bytes.
        id: tells whether two hosts have the same.
        folders: of the runtime, by the variable that names each.
        lacks: what rootless podman lacks.
        seconds: of the first and the second start; fewer where one failed.
        start_error: why.
    """

    host: str
    container: str
    runtime: str
    image: str
    error: str | None = None
    path: str | None = None
    version: str | None = None
    runtime_error: str | None = None
    image_error: str | None = None
    size: int | None = None
    id: str | None = None
    folders: Mapping[str, RuntimeFolder] = field(default_factory=dict)
    lacks: Sequence[str] = ()
    seconds: Sequence[float] = ()
    start_error: str | None = None


async def look_at_containers(pool: AgentPool, jobs: Sequence[Job]) -> list[ContainerReport]:
    """Ask every host of a pool, whose agents bind what they start, about the container of each
    job, one after the other; by job and node."""
    session = pool.session
    reports = []
    for number, job in enumerate(jobs):
        folder = session.folder.absolute() / f"container-{number}"
        seconds = job.cluster.connect_seconds(container=True)
        request, container = _write_request(job, folder, session.run, seconds)
        argv = (
            session.python,
            "-I",
            "-S",
            str(session.code / PROBE),
            str(request),
        )
        asked = {node: [RemoteCommand(argv, dict(job.cluster.env))] for node in pool.present}
        said = await run_on_agents(
            pool, asked, 2 * seconds + 120, key_prefix=f"container-{number}-"
        )
        reports += [
            _report(pool.host(node), container, result) for (node, _), result in said.items()
        ]
    return reports


def _write_request(job: Job, folder: Path, name: str, seconds: float) -> tuple[Path, NodeContainer]:
    """What each node is asked, and the scripts by which it starts `true` in the image: those of
    a run, with nothing to run."""
    container = node_container(job, folder, name, 0, since=0)
    assert container is not None
    settings = container.settings
    questions = RUNTIMES[settings.runtime].questions
    files = {
        container.script.name: "#!/bin/bash\nexit 0\n",
        "node.sh": "\n".join(["#!/bin/bash", "set -e", *start_lines(container)]) + "\n",
        **extra_files(container),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for file, text in files.items():
        write_text(folder / file, text, 0o755)
    request = folder / "request.json"
    asked = {
        **asdict(questions),
        "folders": {name: each.default for name, each in questions.folders.items()},
        "image": settings.image,
        "is_file": container.file is not None,
        "start": str(folder / "node.sh"),
        "seconds": seconds,
    }
    write_json(request, asked)
    return request, container


def _report(host: str, container: NodeContainer, said: CommandResult) -> ContainerReport:
    settings = container.settings
    head = (host, settings.name, settings.runtime, settings.image)
    try:
        value = json.loads(said.out)
    except ValueError:
        return ContainerReport(*head, error=said.last)
    start = value.get("start", {"seconds": [], "error": None})
    return ContainerReport(
        *head,
        path=value["runtime"]["path"],
        version=value["runtime"]["version"],
        runtime_error=value["runtime"]["error"],
        image_error=value["image"]["error"],
        size=value["image"]["size"],
        id=value["image"]["id"],
        folders={name: RuntimeFolder(**each) for name, each in value["folders"].items()},
        lacks=value.get("lacks", ()),
        seconds=start["seconds"],
        start_error=start["error"],
    )


def find_container_problems(
    reports: Sequence[ContainerReport], jobs: Sequence[Job]
) -> Iterator[Finding]:
    """What is wrong with containers, host by host."""
    for job in jobs:
        assert job.container is not None
        own = [report for report in reports if report.container == job.container.name]
        for report in own:
            yield from _host_problems(report, own, job)


def _host_problems(
    report: ContainerReport, all_hosts: Sequence[ContainerReport], job: Job
) -> Iterator[Finding]:
    label = f"containers.{report.container}"
    host = report.host
    if report.error is not None:
        advice = "its Python must be 3.8 or newer (clusters.X.python)"
        yield Finding(host, "container", f"{label} was not looked at: {report.error}", advice)
        return
    yield from _of_runtime(report, all_hosts, label)
    yield from _of_image(report, all_hosts, label, job)
    for name, folder in report.folders.items():
        yield from _of_folder(report, name, folder)
    yield from _of_start(report, all_hosts, label, job)


def _of_runtime(
    report: ContainerReport, all_hosts: Sequence[ContainerReport], label: str
) -> Iterator[Finding]:
    if report.runtime_error is not None:
        yield Finding(
            report.host,
            "container",
            f"{label}: {report.runtime_error}",
            "install it there, put it on PATH by clusters.X.prolog, start its daemon, or let you"
            f" use it (group docker); or another {label}.runtime",
        )
    usual, times = Counter(each.version for each in all_hosts).most_common(1)[0]
    if report.version is not None and report.version != usual:
        yield Finding(
            report.host,
            "container",
            f"{label}: {report.runtime} {report.version}; {usual or 'none'} on {times} of"
            f" {len(all_hosts)} hosts",
            "two versions may take options and images differently: install the same on all",
            wrong=False,
        )
    if report.lacks:
        yield Finding(
            report.host,
            "container",
            f"{label}: podman without root has no {', '.join(report.lacks)} for you",
            "`usermod --add-subuids 100000-165535 --add-subgids 100000-165535 USER` as root, and"
            " install uidmap (shadow-utils)",
        )


def _of_image(
    report: ContainerReport, all_hosts: Sequence[ContainerReport], label: str, job: Job
) -> Iterator[Finding]:
    assert job.container is not None
    if report.runtime_error is None and report.image_error is not None:
        if job.container.is_made:
            advice = f"invoke build-container {job.name}"
        else:
            advice = f"pull or copy it there; its name is {label}.image"
        yield Finding(
            report.host, "container", f"{label}: image {report.image}: {report.image_error}", advice
        )
    counted = Counter(each.id for each in all_hosts if each.id is not None)
    if report.id is not None and report.id != counted.most_common(1)[0][0]:
        yield Finding(
            report.host,
            "container",
            f"{label}: its image {report.image} is another ({_short(report.id)}) than that of most"
            f" hosts ({_short(counted.most_common(1)[0][0])})",
            "pull it again there, or name it by its digest",
        )


def _short(id: str) -> str:
    """An image's id as docker shows it; of a file its bytes."""
    return f"{int(id):,} bytes" if id.isdigit() else id[:19]


def _of_folder(report: ContainerReport, name: str, folder: RuntimeFolder) -> Iterator[Finding]:
    place = f"{name} = {folder.path} ({folder.kind})"
    sets = f"set {name} in clusters.X.prolog, or in the site's configuration"
    if folder.unwritable is not None:
        yield Finding(
            report.host, "container", f"{place}: one cannot write there: {folder.unwritable}", sets
        )
    of_runtime = RUNTIMES[report.runtime].questions.folders[name]
    if folder.unlockable is not None and of_runtime.locked:
        yield Finding(
            report.host,
            "container",
            f"{place}: files cannot be locked there ({folder.unlockable}), and several tasks"
            " import at once",
            f"mount it with locks (Lustre: -o flock; NFS: lockd), or {sets}",
        )
    if folder.shared and of_runtime.holds:
        yield Finding(
            report.host,
            "container",
            f"{place} is shared with other hosts, and holds {of_runtime.holds}",
            f"a folder of the node's own is quicker and in nobody's way: {sets}",
            wrong=of_runtime.runs,
        )
    if folder.noexec and of_runtime.runs:
        yield Finding(
            report.host,
            "container",
            f"{place} is mounted noexec: no program of an image runs there",
            sets,
        )
    needed = _room(report, of_runtime)
    if needed and folder.free < needed:
        yield Finding(
            report.host,
            "container",
            f"{place}: {folder.free / GIB:.1f} GiB are free, and the image needs"
            f" {needed / GIB:.1f}",
            f"make room there (`enroot remove`, old caches), or {sets}",
        )


def _room(report: ContainerReport, folder: WorkFolder) -> float:
    """How many bytes have to be free in a folder."""
    is_file = report.image.startswith("/")
    share = folder.room if is_file else max(folder.room, folder.room_to_import)
    return LEAST if share and report.size is None else share * (report.size or 0)


def _of_start(
    report: ContainerReport, all_hosts: Sequence[ContainerReport], label: str, job: Job
) -> Iterator[Finding]:
    if report.start_error is not None:
        yield Finding(
            report.host,
            "container",
            f"{label} does not start: {report.start_error}",
            f"`invoke train {job.name} --dry-run` prints the lines; run them there by hand",
        )
    if not report.seconds:
        return
    cold = report.seconds[0]
    limit = job.cluster.connect_seconds(container=True)
    usual = statistics.median(each.seconds[0] for each in all_hosts if each.seconds)
    if cold > LATE_SHARE * limit:
        yield Finding(
            report.host,
            "container",
            f"{label} takes {cold:.0f} s to start; runs wait {limit:g} s for all hosts",
            "raise watch.connect; or stripe the image file, or copy it to the nodes (stage_to)",
            wrong=False,
        )
    if cold > SLOW * usual and cold > usual + SLOW_SECONDS:
        yield Finding(
            report.host,
            "container",
            f"{label} takes {cold:.1f} s to start; most hosts take {usual:.1f} s",
            "its disk, its network to the image's file system, or what else runs there",
            wrong=False,
        )


def pages_note(reports: Sequence[ContainerReport]) -> str:
    """What "cold" means, for people."""
    if any(os.path.isabs(report.image) for report in reports):
        return "cold: the image's file was dropped from the node's memory before"
    return "cold: the first start of this look; a registry's image may be in memory already"
