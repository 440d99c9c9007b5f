"""A real file system that fills up under a run: a small tmpfs in a mount namespace of its own."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import wait_for
from tests.distributed import ROOT
from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run
from tests.train.test_resume import facts, steps
from trainkit.runs.folder import RunFolder

# which needs no root where users may have namespaces
APART = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=4m,nr_inodes=150 small "$0" && exec "$@"'


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Ranks, Path, Path]]:
    """Ranks whose disk has 4 MB and 150 files; its folder as they see it, and as this process
    does."""
    folder = tmp_path_factory.mktemp("small")
    if subprocess.run(
        [*APART, "sh", "-c", MOUNT, str(folder), "true"], check=False, capture_output=True
    ).returncode:
        pytest.skip("no mount namespaces here")
    argv = [*APART, "sh", "-c", MOUNT, str(folder), sys.executable, "-m", "tests.torture.zygote"]
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    seen = Path(f"/proc/{process.pid}/root{folder}")
    wait_for(lambda: os.statvfs(seen).f_files == 150, "the mount")
    yield Ranks(process), folder, seen
    assert process.stdin is not None
    process.stdin.close()
    process.wait(600)


def fill_bytes(folder: Path) -> None:
    with open(folder / "filler", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass


def fill_files(folder: Path) -> None:
    for number in range(1000):
        (folder / f"filler{number}").touch()


@pytest.mark.parametrize("fill", [fill_bytes, fill_files])
def test_a_disk_that_fills_up(
    fill: Callable[[Path], None], small: tuple[Ranks, Path, Path], ranks: Ranks, tmp_path: Path
) -> None:
    """In step 5: the save of step 6 is left out with a warning, that of step 9 ends training.
    When there is room again, all is as if nothing had been."""
    whole = new_run(job_of("1", tmp_path))
    assert ranks.run(whole, 1) == [0]
    ranks_there, folder, seen = small
    run = new_run(job_of("1", seen / fill.__name__))
    job = json.loads(run.job.read_text())
    job["job"]["cluster"]["root"] = str(folder / fill.__name__)
    run.job.write_text(json.dumps(job))
    there = RunFolder(folder / run.path.relative_to(seen))
    run.attempt(1).path.mkdir(parents=True)
    (tmp_path / "logs").mkdir()
    # a rank's output is a pipe, and no disk, to it
    run.attempt(1).log(0).parent.symlink_to(tmp_path / "logs")
    mark = seen / "mark"

    def during(pids: list[int]) -> None:
        wait_for(mark.exists, "step 5")
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            fill(seen)
        (tmp_path / "full").touch()

    sleep = {
        "do": "sleep",
        "at": "step",
        "call": 5,
        "when": "before",
        "seconds": 0.0,
        "mark": str(folder / "mark"),
        "until": str(tmp_path / "full"),
    }
    assert ranks_there.run(there, 1, [sleep], during) == [10], log_of(run)
    for filler in [*seen.glob("filler*"), mark]:
        filler.unlink()
    log = log_of(run)
    assert log.count("training goes on, the next save tries again") == 1 and (
        "No space left" in log or "GB free" in log
    )
    assert whole_steps(run) == [3] and steps(run)[-1] <= 9
    assert facts(run) == facts(whole)[: len(facts(run))]
    assert ranks_there.run(there, 1) == [0], log_of(run)
    assert facts(run) == facts(whole) and whole_steps(run) == whole_steps(whole)
