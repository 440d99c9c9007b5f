"""What the ranks of a running run do to this host: processor, threads and memory by psutil, GPUs
by nvidia-smi."""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import psutil

from trainkit.base.lazy_dataclasses import asdict, dataclass, replace
from trainkit.runs.events import (
    AttemptStarted,
    RankEnded,
    RankStarted,
    events_of,
    first_event,
    read_events,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.world import read_world

SAMPLE_SECONDS = 0.2  # over which the processor's load is taken
QUERY_SECONDS = 20.0  # nvidia-smi takes long where drivers are not kept loaded
MIB = 2**20
GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "utilization.gpu",
    "memory.used",
    "memory.total",
    "power.draw",
    "temperature.gpu",
)
APP_FIELDS = ("pid", "gpu_uuid", "used_memory")


@dataclass(frozen=True)
class Gpu:
    """One GPU. None where nvidia-smi has no figure."""

    index: int
    uuid: str
    name: str
    utilization_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    power_watts: float | None
    temperature_celsius: float | None


@dataclass(frozen=True)
class RankUsage:
    """One rank's process. `cpu_percent` is of one core; `process_gpu_bytes` what nvidia-smi says
    that it holds.

    `gpu_by` is how its GPU was found: nvidia-smi lists the pid, or, where a container hides pids
    from it, cuda:LOCAL_RANK by its place.
    """

    rank: int
    pid: int
    cpu_percent: float
    threads: int
    resident_bytes: int
    gpu: Gpu | None = None
    gpu_by: Literal["pid", "local rank"] | None = None
    process_gpu_bytes: int | None = None


@dataclass(frozen=True)
class DeviceUsage:
    """The ranks that live on this host; `note` says what could not be seen."""

    ranks: list[RankUsage]
    note: str | None = None

    def to_json(self) -> dict[str, object]:
        """The keys that `status --json` has of it."""
        return {"devices": [asdict(rank) for rank in self.ranks], "devices_note": self.note}


def observe_devices(
    run: RunFolder,
    device_type: Literal["cpu", "cuda"],
    *,
    seconds: float = SAMPLE_SECONDS,
    path: str | None = None,
) -> DeviceUsage:
    """Look at the ranks of a running run. Takes `seconds`, on CUDA also as long as nvidia-smi.

    Args:
        run: the run; its newest attempt is running.
        device_type: what its ranks compute on.
        seconds: time over which the processor's load is taken.
        path: where nvidia-smi is looked for; by default PATH.
    """
    here = os.uname().nodename
    pids = {}
    elsewhere = set()
    events = read_events(run.attempts()[-1])
    ended = {event.rank for event in events_of(events, RankEnded)}
    started = first_event(events, AttemptStarted)
    supervisor = started.supervisor["pid"] if started else None
    for event in events_of(events, RankStarted):
        if event.rank in ended:
            continue
        if event.host == here:
            pids[event.rank] = event.pid
        else:
            elsewhere.add(event.host)
    ranks = list(_processes(pids, supervisor, seconds))
    note = f"ranks on {', '.join(sorted(elsewhere))} are not seen from here" if elsewhere else None
    if device_type != "cuda":
        return DeviceUsage(ranks, note)
    program = shutil.which("nvidia-smi", path=path)
    if program is None:
        return DeviceUsage(ranks, "there is no nvidia-smi on this host: GPUs are not seen")
    try:
        return DeviceUsage(_with_gpus(run, ranks, program), note)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return DeviceUsage(ranks, f"nvidia-smi does not answer: {error}")


def _processes(pids: dict[int, int], parent: int | None, seconds: float) -> Iterator[RankUsage]:
    """Those of the ranks' processes that live: children of the supervisor, so never another
    process that got the number of a dead one."""
    found: dict[int, psutil.Process] = {}
    for rank, pid in pids.items():
        try:
            process = psutil.Process(pid)
            if process.ppid() != parent:
                continue
            process.cpu_percent()  # begins to measure
        except psutil.Error:
            continue
        found[rank] = process
    if found:
        time.sleep(seconds)
    for rank, process in found.items():
        try:
            with process.oneshot():
                yield RankUsage(
                    rank,
                    process.pid,
                    process.cpu_percent(),
                    process.num_threads(),
                    process.memory_info().rss,
                )
        except psutil.Error:
            continue


def _query(program: str, what: str, fields: Sequence[str]) -> list[list[str]]:
    argv = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    text = subprocess.run(
        argv,
        capture_output=True,
        text=True,
        timeout=QUERY_SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout
    rows = [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]
    return [row for row in rows if len(row) == len(fields)]


def _number(cell: str) -> float | None:
    """A figure, or None for "[N/A]" and the like."""
    try:
        return float(cell)
    except ValueError:
        return None


def _memory(cell: str) -> int | None:
    number = _number(cell)
    return None if number is None else int(number * MIB)


def _gpus(program: str) -> list[Gpu]:
    rows = _query(program, "gpu", GPU_FIELDS)
    return [
        Gpu(
            int(i),
            uuid,
            name,
            _number(use),
            _memory(held),
            _memory(all_),
            _number(watt),
            _number(heat),
        )
        for i, uuid, name, use, held, all_, watt, heat in rows
    ]


def _with_gpus(run: RunFolder, ranks: list[RankUsage], program: str) -> list[RankUsage]:
    """The ranks and their GPUs. Raises OSError, SubprocessError or ValueError where nvidia-smi
    does not say what it should."""
    gpus = _gpus(program)
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    apps = {
        int(pid): (by_uuid.get(uuid), _memory(held))
        for pid, uuid, held in _query(program, "compute-apps", APP_FIELDS)
        if pid.isdigit()
    }
    world = read_world(run)
    found = []
    for rank in ranks:
        gpu, held = apps.get(rank.pid, (None, None))
        if gpu is not None:
            found.append(replace(rank, gpu=gpu, gpu_by="pid", process_gpu_bytes=held))
            continue
        node = world.node_of(rank.rank)
        if node is not None:
            visible = _visible(gpus, world.visible_devices(node))
            local_rank = node.ranks.index(rank.rank)
            if local_rank < len(visible):
                rank = replace(rank, gpu=visible[local_rank], gpu_by="local rank")
        found.append(rank)
    return found


def _visible(gpus: list[Gpu], wanted: str | None) -> list[Gpu]:
    """The GPUs as CUDA numbers them: all, or those that CUDA_VISIBLE_DEVICES lists by number or
    by the beginning of a UUID, up to the first that is not there (CUDA C++ programming guide,
    "CUDA environment variables")."""
    if wanted is None:
        return gpus
    found = []
    for word in wanted.split(","):
        gpu = next(
            (
                g
                for g in gpus
                if word.strip() == str(g.index)
                or (word.strip() and g.uuid.startswith(word.strip()))
            ),
            None,
        )
        if gpu is None:
            break
        found.append(gpu)
    return found
