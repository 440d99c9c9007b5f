"""A shared root that does not answer for a while: the run waits for it and goes on."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.conftest import bring_up
from tests.cluster.on_head import ClusterProject, make_project
from tests.cluster.test_endings import NO_RETRIES, begun, events
from tests.conftest import wait_for
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import last_step

STEPS = 200
STALL_SECONDS = 60.0  # four times the lease by default
INSTANTS = (  # an event, or a step
    "folder",
    "started",
    "agent_joined",
    "rank_started",
    "go",
    20,
    60,
    120,
    180,
    "rank_ended",
)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; hosts that boot later have it too."""
    image = tmp_path / "disk.img"
    image.touch()
    os.truncate(image, 2**29)
    folder = tmp_path / "disk"
    folder.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no file system that can be frozen here: {error}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def root(disk: Path, request: pytest.FixtureRequest) -> Iterator[ClusterProject]:
    """A project on that disk, with one rank on each of two hosts."""
    cluster = bring_up(request, "cluster of namespaces", 2)
    project = make_project(disk / "project", cluster)
    project.hosts("node1 slots=1", "node2 slots=1")
    yield project
    cluster.close()


@contextlib.contextmanager
def frozen(project: ClusterProject) -> Iterator[None]:
    """Whoever writes to the project's disk waits until the block is left; reads go on."""
    subprocess.run(["fsfreeze", "--freeze", project.path.parent], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "--unfreeze", project.path.parent], check=True)


def test_a_stall_longer_than_the_lease_stops_no_rank(root: ClusterProject, tmp_path: Path) -> None:
    """One rank ends meanwhile, of which an event is to be written; its peer goes on."""
    begins = tmp_path / "begins"
    ends = tmp_path / "ends"
    root.ranks_do(f"""
        import os
        while not os.path.exists({str(begins)!r} if rank else {str(ends)!r}):
            steps(1, 0.05)
        done()
        """)
    lease = 2
    process = root.start("train", "random", "--set", f"cluster.watch.lease={lease}", *NO_RETRIES)
    run = begun(root, process)
    with frozen(root):
        begins.touch()
        time.sleep(3 * lease)
    ends.touch()
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert not [event for event in events(run) if event["event"] == "contact_lost"]


def reached(project: ClusterProject, process: subprocess.Popen[str], instant: str | int) -> None:
    """Wait for an instant of the second run."""

    def there() -> bool:
        if process.poll() is not None:
            pytest.fail(f"it ended before {instant}: {process.communicate()}")
        runs = project.runs()
        if len(runs) < 2 or instant == "folder":
            return len(runs) == 2
        if isinstance(instant, int):
            return last_step(RunFolder(runs[-1])) >= instant
        return any(event["event"] == instant for event in events(runs[-1]))

    wait_for(there, f"instant {instant}", timeout=1200)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_losses_are_the_same_through_a_stall_at_each_instant(root: ClusterProject) -> None:
    path: Path = root.path / "jobs.toml"
    text = path.read_text().replace("train_iters = 30", f"train_iters = {STEPS}")
    path.write_text(text.replace("lease = 8, ", "").replace("connect = 120, ", ""))
    root.invoke("train", "random")
    expected = root.losses(root.runs()[0])

    process = root.start("train", "random", *NO_RETRIES)
    for instant in INSTANTS:
        reached(root, process, instant)
        with frozen(root):
            time.sleep(STALL_SECONDS)
    out, err = process.communicate()
    assert process.returncode == 0, out + err
    run = root.runs()[-1]
    assert root.losses(run) == expected and len(expected) == STEPS
    stalls = [event for event in events(run) if event["event"] == "root_stalled"]
    assert stalls and all(stall["root"] == str(root.path) for stall in stalls), stalls
    assert not (run / "attempts/2").exists()
