"""What nvidia-smi's figures become: MiB are bytes, and a figure that it does not have is none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trainkit.base.files import write_json
from trainkit.base.process import identity
from trainkit.runs.devices import Gpu, RankUsage, _gpus, _visible, _with_gpus, observe_devices
from trainkit.runs.events import AttemptStarted, EventLog, RankEnded, RankStarted
from trainkit.runs.folder import RunFolder


def test_figures_of_nvidia_smi(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\necho '0, GPU-a, NVIDIA H100, 97, 1024, 81559, 512.25, 61'\necho '1, GPU-b,"
        " NVIDIA H100, [N/A], 1, 2, [N/A], [N/A]'\n"
    )
    program.chmod(0o755)
    assert _gpus(str(program)) == [
        Gpu(0, "GPU-a", "NVIDIA H100", 97.0, 1024 * 1024**2, 81559 * 1024**2, 512.25, 61.0),
        Gpu(1, "GPU-b", "NVIDIA H100", None, 1024**2, 2 * 1024**2, None, None),
    ]


def gpu(index: int, uuid: str) -> Gpu:
    return Gpu(index, uuid, "H100", 1.0, 2, 3, 4.0, 5.0)


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        (None, ["GPU-a1", "GPU-b2", "GPU-b3"]),
        ("2,0", ["GPU-b3", "GPU-a1"]),
        (" 1 ", ["GPU-b2"]),
        ("GPU-a,GPU-b3", ["GPU-a1", "GPU-b3"]),
        ("1,9,0", ["GPU-b2"]),  # up to the first that is not there
        ("", []),
        ("0,,1", ["GPU-a1"]),
    ],
)
def test_gpus_are_numbered_as_cuda_does(wanted: str | None, seen: list[str]) -> None:
    gpus = [gpu(0, "GPU-a1"), gpu(1, "GPU-b2"), gpu(2, "GPU-b3")]
    assert [each.uuid for each in _visible(gpus, wanted)] == seen


def test_ranks_get_their_gpus(tmp_path: Path) -> None:
    """By the pid that nvidia-smi lists, else by the rank's place on its node."""
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase $1 in *compute*) echo '41, GPU-b, 1024'; echo '[N/A], GPU-a, 1';; *)\n"
        "echo '0, GPU-a, H100, 1, 2, 3, 4, 5'; echo '1, GPU-b, H100, 1, 2, 3, 4, 5';; esac\n"
    )
    program.chmod(0o755)
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    world = {
        "schema": "world/1",
        "passed_on": {"CUDA_VISIBLE_DEVICES": "0"},
        "command": {"env": {"CUDA_VISIBLE_DEVICES": "1,0"}},
        "nodes": [{"ranks": [0, 1, 2]}, {"ranks": [3, 4]}],
    }
    write_json(run.world, world)
    ranks = [RankUsage(rank, 40 + rank, 1.0, 2, 3) for rank in range(1, 6)]
    found = _with_gpus(run, ranks, str(program))
    assert [(each.rank, each.gpu.uuid if each.gpu else None, each.gpu_by) for each in found] == [
        (1, "GPU-b", "pid"),
        (2, None, None),  # its place is 2, and two GPUs are visible
        (3, "GPU-b", "local rank"),
        (4, "GPU-a", "local rank"),
        (5, None, None),  # of no node
    ]
    assert found[0].process_gpu_bytes == 1024 * 1024**2 and found[2].process_gpu_bytes is None


def test_only_living_ranks_of_this_host_are_looked_at(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "job" / "id")
    here = os.uname().nodename
    log = EventLog(run.attempt(1))
    supervisor = identity().to_json()
    log.write(AttemptStarted("id", 1, supervisor, 4))
    children = [subprocess.Popen(["sleep", "600"]) for _ in range(2)]
    try:
        for rank, child in enumerate(children):
            log.write(RankStarted(rank, here, child.pid))
        log.write(RankStarted(2, "node7", children[0].pid))
        log.write(RankStarted(3, here, os.getppid()))  # of another parent: not ours any more
        log.write(RankEnded(1, 0, False, True))
        usage = observe_devices(run, "cpu", seconds=0.01)
        assert [rank.rank for rank in usage.ranks] == [0]
        assert usage.ranks[0].pid == children[0].pid and usage.ranks[0].resident_bytes > 0
        assert usage.note == "ranks on node7 are not seen from here"
        usage = observe_devices(run, "cuda", seconds=0.01, path=str(tmp_path))
        assert usage.note == "there is no nvidia-smi on this host: GPUs are not seen"
        assert usage.to_json()["devices_note"] == usage.note
    finally:
        for child in children:
            child.kill()
            child.wait()
        log.close()
