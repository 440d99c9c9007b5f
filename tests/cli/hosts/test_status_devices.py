"""What `status` shows of a running run: its processes by psutil, its GPUs by an nvidia-smi of
the test's own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests import forkserver
from tests.conftest import Project, wait_for
from trainkit.base.process import identity
from trainkit.cli.inspect.runs import devices_table
from trainkit.runs.devices import DeviceUsage, Gpu, RankUsage, observe_devices
from trainkit.runs.events import AttemptEnded, AttemptStarted, EventLog, RankEnded, RankStarted
from trainkit.runs.folder import RunFolder

MIB = 2**20
BUSY = "import sys; block = bytearray(64 * 2**20); print(flush=True)\nwhile True: pass"
GPUS = """\
0, GPU-aaaa-1, NVIDIA H100 80GB HBM3, 97, 41000, 81559, 512.25, 61
1, GPU-bbbb-2, NVIDIA H100 80GB HBM3, [N/A], 12, 81559, [Not Supported], 33
"""


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A busy process that holds 64 MiB; its parent is this one."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


def started(
    root: Path, *ranks: tuple[int, str, int], supervisor: int | None = None
) -> tuple[RunFolder, EventLog]:
    """A run whose supervisor is this process, with ranks (number, host, pid)."""
    run = RunFolder(root / "runs" / "text" / "20260101-000000-aaaa")
    events = EventLog(run.attempt(1))
    own = identity().to_json() | ({"pid": supervisor} if supervisor else {})
    events.write(AttemptStarted(run.id, 1, own, len(ranks)))
    for rank, host, pid in ranks:
        events.write(RankStarted(rank, host, pid))
    return run, events


def write_world(run: RunFolder, ranks: list[int], **env: str) -> None:
    run.world.parent.mkdir(parents=True, exist_ok=True)
    nodes = [{"host": "h", "address": "127.0.0.1", "node_rank": 0, "ranks": ranks}]
    run.world.write_text(
        json.dumps(
            {
                "schema": "world/1",
                "nodes": nodes,
                "command": {"env": env},
                "passed_on": {"CUDA_VISIBLE_DEVICES": "1,0"},
            }
        )
    )


def nvidia_smi(folder: Path, gpus: str, apps: str, code: int = 0) -> str:
    """A program of that name; returns the PATH it is found on."""
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nquery, form = sys.argv[1:]\nassert form =="
        " '--format=csv,noheader,nounits', form\nanswers ="
        " {'--query-gpu=index,uuid,name,utilization.gpu,memory.used,memory.total,"
        "power.draw,temperature.gpu':"
        f" {gpus!r}, '--query-compute-apps=pid,gpu_uuid,used_memory':"
        f" {apps!r}}}\nsys.stdout.write(answers[query])\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    return str(folder)


def test_a_real_process(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    run, _ = started(tmp_path, (0, os.uname().nodename, child.pid))

    def at_work() -> RankUsage | None:
        (seen,) = observe_devices(run, "cpu").ranks
        return seen if seen.cpu_percent > 0 else None

    # others may have all processors meanwhile
    rank = wait_for(at_work, "a processor for the busy process")
    assert (rank.rank, rank.pid, rank.gpu) == (0, child.pid, None)
    assert rank.threads == 1 and rank.resident_bytes > 64 * MIB


def test_only_ranks_that_live_here(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    here = os.uname().nodename
    run, events = started(
        tmp_path,
        (0, here, child.pid),
        (1, "elsewhere", child.pid),
        (2, here, 2**22 + 1),
        (3, here, os.getppid()),
    )
    view = observe_devices(run, "cpu", seconds=0.01)
    assert [rank.rank for rank in view.ranks] == [0]  # 2 is gone, 3 is another's process now
    assert view.note == "ranks on elsewhere are not seen from here"
    events.write(RankEnded(0, 0, stopped=False, done=True))
    assert observe_devices(run, "cpu", seconds=0.01).ranks == []


def test_gpus_by_pid(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    run, _ = started(tmp_path, (0, os.uname().nodename, child.pid))
    write_world(run, [0])
    path = nvidia_smi(tmp_path / "bin", GPUS, f"1, GPU-bbbb-2, 5\n{child.pid}, GPU-aaaa-1, 40000\n")
    view = observe_devices(run, "cuda", seconds=0.01, path=path)
    (rank,) = view.ranks
    assert rank.gpu == Gpu(
        0, "GPU-aaaa-1", "NVIDIA H100 80GB HBM3", 97.0, 41000 * MIB, 81559 * MIB, 512.25, 61.0
    )
    assert (rank.gpu_by, rank.process_gpu_bytes, view.note) == ("pid", 40000 * MIB, None)
    document = json.loads(json.dumps(view.to_json()))
    assert (
        document["devices"][0]["gpu"]["utilization_percent"] == 97.0
        and document["devices_note"] is None
    )


@pytest.mark.parametrize(
    ("ranks", "env", "index"),
    [
        ([0, 7], {}, 0),
        ([7, 0], {}, 1),
        ([7], {"CUDA_VISIBLE_DEVICES": "GPU-aaaa"}, 0),
        ([7], {"CUDA_VISIBLE_DEVICES": "5,1"}, None),
    ],
)
def test_gpus_where_a_container_hides_pids(
    tmp_path: Path,
    child: subprocess.Popen[bytes],
    ranks: list[int],
    env: dict[str, str],
    index: int | None,
) -> None:
    """cuda:LOCAL_RANK of what CUDA_VISIBLE_DEVICES lets through: "1,0", as the caller had it,
    unless the job says otherwise."""
    run, _ = started(tmp_path, (7, os.uname().nodename, child.pid))
    write_world(run, ranks, **env)
    (rank,) = observe_devices(
        run, "cuda", seconds=0.01, path=nvidia_smi(tmp_path / "bin", GPUS, "")
    ).ranks
    assert (rank.gpu.index if rank.gpu else None, rank.gpu_by, rank.process_gpu_bytes) == (
        index,
        None if index is None else "local rank",
        None,
    )
    if index == 1:
        assert rank.gpu is not None and (rank.gpu.utilization_percent, rank.gpu.power_watts) == (
            None,
            None,
        )


def test_without_an_answer_of_nvidia_smi(tmp_path: Path, child: subprocess.Popen[bytes]) -> None:
    run, _ = started(tmp_path, (0, os.uname().nodename, child.pid))
    write_world(run, [0])
    absent = observe_devices(run, "cuda", seconds=0.01, path=str(tmp_path / "nowhere"))
    assert (
        len(absent.ranks) == 1
        and absent.note == "there is no nvidia-smi on this host: GPUs are not seen"
    )
    broken = observe_devices(
        run,
        "cuda",
        seconds=0.01,
        path=nvidia_smi(tmp_path / "bin", "No devices were found\n", "", code=9),
    )
    assert (
        len(broken.ranks) == 1
        and "nvidia-smi does not answer" in str(broken.note)
        and "status 9" in str(broken.note)
    )


def printed(view: DeviceUsage) -> list[str]:
    screen = io.StringIO()
    Console(file=screen, width=160).print(devices_table(view))
    return screen.getvalue().splitlines()


def test_the_table() -> None:
    process = RankUsage(0, 4711, 99.6, 12, 3 * 2**29)
    assert [line.split() for line in printed(DeviceUsage([process]))] == [
        ["rank", "pid", "CPU", "threads", "memory"],
        ["0", "4711", "100%", "12", "1.50", "GiB"],
    ]
    gpu = Gpu(3, "GPU-a", "NVIDIA [odd] H100", None, 2**30, 80 * 2**30, 512.25, 61.0)
    heading, known, unknown = printed(
        DeviceUsage([RankUsage(0, 1, 0, 1, 0, gpu, "pid"), RankUsage(1, 2, 0, 1, 0)])
    )
    assert heading.split()[5:] == ["GPU", "busy", "GPU", "memory", "power", "heat"]
    assert known.split("GiB", 1)[1].split() == [
        "3:",
        "NVIDIA",
        "[odd]",
        "H100",
        "?",
        "1.00",
        "GiB",
        "of",
        "80.00",
        "GiB",
        "512",
        "W",
        "61",
        "C",
    ]
    assert unknown.split()[-5:] == ["?"] * 5


def status(project: Project) -> dict[str, Any]:
    done = forkserver.run(
        [sys.executable, "-m", "invoke", "status", "last", "--json"],
        cwd=project.path,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_task(project: Project, child: subprocess.Popen[bytes]) -> None:
    run, events = started(project.path, (0, os.uname().nodename, child.pid))
    done = forkserver.run(
        [sys.executable, "-m", "invoke", "show", "random", "--json"],
        cwd=project.path,
        env=project.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    run.job.write_text(done.stdout)
    running = status(project)
    assert (running["schema"], running["state"]) == ("run/1", "running")
    assert [(rank["rank"], rank["pid"]) for rank in running["devices"]] == [
        (0, child.pid)
    ] and running["devices_note"] is None
    events.write(AttemptEnded(0, None, failure_class="success"))
    assert status(project)["devices"] == []
