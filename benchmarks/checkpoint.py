"""Claim: a checkpoint is written at 70 % of the rate of a plain fsynced write of its bytes;
behind training it costs 5 % of that, and 12 bytes a parameter.

    python benchmarks/checkpoint.py [--quick] [--gb X ...] [--ranks N] [--rounds N] [--folder
    DIR] [--rows FILE]

fp32 weights and both moments of so many parameters in tensors of 16 MB and less, over one or
more ranks on one disk, in processes of their own for each contender and round; the contenders
take turns. Every one ends with its bytes durable, and deletes what it wrote the time before only
then (`delete`: memory that the page cache has just freed is faster to fill):

  plain         the same bytes from the same memory into one file a rank by write, then fsync.
  trainkit      CheckpointManager.save: free space looked up, written, hashed and fsynced,
                manifest, rename, folder fsynced. It deletes while training goes on.
  behind        the same with save_async. `stall` is how long training waits: in the call, and
                before the update that follows 2 s of computing for every GB (at least 0.5 s), at
                later saves and at the first one (memory is made). `lost` is the computing that
                this time had less of than without.
  DCP           torch.distributed.checkpoint.save with its own FileSystemWriter, which fsyncs.
  torch.save    to a file a rank, then fsync.

GB/s are of the data; seconds are the slowest rank's. The ratio is plain's seconds over the
contender's in the same round, the median of the rounds. `peak` is what saving and loading add to
a rank's memory, in parts of its data. Loading is into the tensors as they lie there, from files
that were dropped from the page cache: trainkit reads every file twice with verify = "full" (the
second time from the cache), once with "size".
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LIMITS = {"blocking": 0.70, "stall": 0.05, "bytes": 1.01}
CONTENDERS = ("plain", "trainkit", "behind", "DCP", "torch.save")
LARGEST = 2**22  # elements of a tensor
# of each process; the first two make memory (of the process, and of the page cache for two
# checkpoints), the table has the others' median
SAVES = 5


def make(parameters: int, rank: int) -> dict[str, Any]:
    """A rank's weights and moments, by name."""
    import torch

    sizes = [LARGEST] * (parameters // LARGEST) + [n for n in (parameters % LARGEST,) if n]
    whole = {f"layers.{rank}.{i}.weight": torch.randn(n) for i, n in enumerate(sizes)}
    moments = {
        f"optimizer.{m}.{name}": torch.randn(w.shape)
        for m in ("exp_avg", "exp_avg_sq")
        for name, w in whole.items()
    }
    return {f"model.{name}": w for name, w in whole.items()} | moments


def forget(folder: Path) -> None:
    """Drop what was written from the page cache."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


class Side:
    """One contender on one rank. A save returns when its bytes are durable."""

    loads: Mapping[str, Callable[[], object]]

    def save(self, number: int) -> dict[str, float]:
        """What it took: `seconds`, and others by name."""
        raise NotImplementedError


class Trainkit(Side):
    def __init__(
        self, tensors: dict[str, Any], folder: Path, gigabytes: float, *, behind: bool
    ) -> None:
        from trainkit.jobs.schema import CheckpointSettings
        from trainkit.train.checkpoint.manager import CheckpointManager

        self.tensors, self.folder, self.behind = tensors, folder, behind
        self.saver = CheckpointManager(CheckpointSettings(keep_last=1, save_async=behind), folder)
        self.work = max(0.5, 2 * gigabytes)
        self.rate = compute(self.work) if behind else 0.0
        self.loads = {f"load {how}": lambda how=how: self._load(how) for how in ("full", "size")}  # type: ignore[misc]

    def save(self, number: int) -> dict[str, float]:
        from trainkit.train.checkpoint.save_load import CheckpointMetadata

        metadata = CheckpointMetadata(number, consumed_samples=0)
        began = time.perf_counter()
        self.saver.save(self.tensors, metadata, last=False)
        stall, lost = time.perf_counter() - began, 0.0
        if self.behind:
            lost = self.work * (1 - compute(self.work) / self.rate)
            began = time.perf_counter()
            self.saver.wait_for_staging()
            stall += time.perf_counter() - began
        self.saver.wait_for_save()
        began = time.perf_counter()
        self.saver.wait_for_purge()
        delete = time.perf_counter() - began
        return {
            "seconds": self.saver.save_seconds if self.behind else stall,
            "stall": stall,
            "lost": lost,
            "delete": delete,
        }

    def _load(self, how: Any) -> None:
        from trainkit.train.checkpoint.newest import newest_valid_together
        from trainkit.train.checkpoint.save_load import load

        found = newest_valid_together(self.folder, how, print)
        if found is None or found.manifest.step != SAVES:
            raise SystemExit(f"{self.folder} is damaged")
        load(
            found,
            self.tensors,
            {name: tensor.shape for name, tensor in found.manifest.tensors.items()},
        )


def compute(seconds: float) -> float:
    """Multiply matrices for so long; how many a second."""
    import torch

    left, right, count, began = (
        torch.randn(256, 1024),
        torch.randn(1024, 1024),
        0,
        time.perf_counter(),
    )
    while time.perf_counter() - began < seconds:
        left @ right
        count += 1
    return count / (time.perf_counter() - began)


class Peer(Side):
    """The path of `name` under `folder` is one file a rank, or DCP's folder for all."""

    def __init__(self, name: str, tensors: dict[str, Any], folder: Path, rank: int) -> None:
        self.tensors, self.rank, self.together = tensors, rank, name == "DCP"
        self.path = folder / ("all" if self.together else f"rank-{rank}")
        self.write = {"plain": self._plain, "DCP": self._dcp, "torch.save": self._torch_save}[name]
        self.loads = {
            "plain": {},
            "DCP": {"load": self._dcp_load},
            "torch.save": {"load": self._torch_load},
        }[name]

    def save(self, number: int) -> dict[str, float]:
        import torch.distributed as dist

        former = self.path.with_name(f"{self.path.name}-former")
        deletes = self.path.exists() and (self.rank == 0 or not self.together)
        dist.barrier()
        if deletes:
            self.path.rename(former)
        dist.barrier()
        began = time.perf_counter()
        self.write()
        seconds = time.perf_counter() - began
        dist.barrier()
        began = time.perf_counter()
        if deletes:
            shutil.rmtree(former) if former.is_dir() else former.unlink()
        return {"seconds": seconds, "delete": time.perf_counter() - began}

    def _plain(self) -> None:
        with open(self.path, "wb", buffering=0) as file:
            for tensor in self.tensors.values():
                rest = memoryview(tensor.numpy()).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def _dcp(self) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        save(self.tensors, storage_writer=FileSystemWriter(self.path))

    def _torch_save(self) -> None:
        import torch

        torch.save(self.tensors, self.path)
        handle = os.open(self.path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)

    def _dcp_load(self) -> None:
        from torch.distributed.checkpoint.state_dict_loader import load

        load(self.tensors, checkpoint_id=self.path)

    def _torch_load(self) -> None:
        import torch

        for key, value in torch.load(self.path, weights_only=True).items():
            self.tensors[key].copy_(value)


def side(name: str, parameters: int, folder: Path, rank: int, ranks: int) -> dict[str, Any]:
    """One contender: what it took, of all ranks the most."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    torch.manual_seed(rank)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/group", rank=rank, world_size=ranks
    )
    tensors, folder = make(parameters // ranks, rank), folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    data = sum(t.nbytes for t in tensors.values())
    own = name in ("trainkit", "behind")
    contender = (
        Trainkit(tensors, folder, ranks * data / 1e9, behind=name == "behind")
        if own
        else Peer(name, tensors, folder, rank)
    )
    before, saves = _peak(), []
    for number in range(1, SAVES + 1):
        dist.barrier()
        saves.append(contender.save(number))
    dist.barrier()
    found = {key: statistics.median(save[key] for save in saves[2:]) for key in saves[0]}
    found["first_stall"] = saves[0].get("stall", 0.0)
    found["bytes_per_parameter"] = sum(
        p.stat().st_size for p in folder.rglob("*") if p.is_file()
    ) / (parameters // ranks * ranks)
    sums = {key: float(tensor.double().sum()) for key, tensor in tensors.items()}
    for way, load in contender.loads.items():
        for tensor in tensors.values():
            tensor.zero_()
        os.sync()
        dist.barrier()
        if rank == 0:
            forget(folder)
        dist.barrier()
        began = time.perf_counter()
        load()
        found[way] = time.perf_counter() - began
        if {key: float(tensor.double().sum()) for key, tensor in tensors.items()} != sums:
            raise SystemExit(f"{name}: {way} gives other numbers")
    found["peak"] = (_peak() - before) / data
    most = torch.tensor([*found.values()], dtype=torch.float64)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    return dict(zip(found, most.tolist(), strict=True))


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run_side(name: str, parameters: int, ranks: int, where: Path | None) -> dict[str, Any]:
    """One contender once, in processes of its own."""
    with tempfile.TemporaryDirectory(dir=where) as folder:
        argv = [
            sys.executable,
            "-P",
            __file__,
            "--side",
            name,
            "--parameters",
            str(parameters),
            "--folder",
            folder,
            "--ranks",
            str(ranks),
        ]
        children = [
            subprocess.Popen([*argv, "--rank", str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        said = [child.communicate()[0] for child in children]
        if any(child.returncode for child in children):
            raise SystemExit(f"{name} failed")
        found: dict[str, Any] = json.loads(said[0].splitlines()[-1])
        return found


def compare(gigabytes: float, ranks: int, rounds: int, where: Path | None) -> list[dict[str, Any]]:
    """Run all contenders in turn, print the table of one size."""
    parameters = int(gigabytes * 1e9 / 12)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, found in runs.items():
            found.append(run_side(name, parameters, ranks, where))
    print(
        f"\n{gigabytes:g} GB, {parameters:,} parameters, {ranks} rank{'s' * (ranks > 1)}, {rounds}"
        " rounds"
    )
    print(
        f"{'':12} {'s':>7} {'GB/s':>6} {'ratio':>6} {'delete':>6} {'stall s':>8} {'first':>7}"
        f" {'lost s':>7} {'B/par.':>7} {'peak':>6}   load, s (GB/s)"
    )
    rows = []
    for name, found in runs.items():
        middle = {key: statistics.median(r[key] for r in found) for key in found[0]}
        ratio = statistics.median(
            p["seconds"] / r["seconds"] for p, r in zip(runs["plain"], found, strict=True)
        )
        stall = (
            statistics.median(
                r["stall"] / b["seconds"] for r, b in zip(found, runs["trainkit"], strict=True)
            )
            if name == "behind"
            else 0.0
        )
        loads = ", ".join(
            f"{key[5:] or 'all'} {middle[key]:.2f} ({gigabytes / middle[key]:.2f})"
            for key in middle
            if key.startswith("load")
        )
        waits = (
            f"{middle['stall']:8.3f} {middle['first_stall']:7.3f} {middle['lost']:7.3f}"
            if name == "behind"
            else f"{'-':>8} {'-':>7} {'-':>7}"
        )
        print(
            f"{name:12} {middle['seconds']:7.2f} {gigabytes / middle['seconds']:6.2f} {ratio:6.2f}"
            f" {middle['delete']:6.2f} {waits} {middle['bytes_per_parameter']:7.3f}"
            f" {middle['peak']:6.2f}   {loads}",
            flush=True,
        )
        rows.append(
            {
                "gigabytes": gigabytes,
                "ranks": ranks,
                "contender": name,
                "ratio": ratio,
                "stall_ratio": stall,
                **middle,
            }
        )
    print(
        f"stall of a later save behind training: {100 * rows[2]['stall_ratio']:.1f} % of the"
        f" blocking save's seconds, limit {100 * LIMITS['stall']:.0f} %"
    )
    return rows


def verdict(rows: list[dict[str, Any]]) -> str:
    """The claim, judged."""
    missed = []
    for row in rows:
        size = f"{row['gigabytes']:g} GB on {row['ranks']}"
        if row["contender"] == "trainkit" and row["ratio"] < LIMITS["blocking"]:
            missed.append(
                f"{size}: {row['ratio']:.2f} of a plain write instead of {LIMITS['blocking']:.2f}"
            )
        if row["contender"] == "behind" and row["stall_ratio"] > LIMITS["stall"]:
            missed.append(
                f"{size}: a stall of {100 * row['stall_ratio']:.1f} % instead of"
                f" {100 * LIMITS['stall']:.0f} %"
            )
        if (
            row["contender"] in ("trainkit", "behind")
            and row["bytes_per_parameter"] > 12 * LIMITS["bytes"]
        ):
            missed.append(f"{size}: {row['bytes_per_parameter']:.3f} bytes a parameter")
    return "within all limits" if not missed else "MISSED: " + "; ".join(missed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="0.25 GB once: about a minute")
    parser.add_argument(
        "--gb", type=float, nargs="+", default=[0.25, 1.0, 2.0], help="sizes of the data"
    )
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--folder",
        type=Path,
        help="on the file system that is measured, instead of the system's temporary folder",
    )
    parser.add_argument(
        "--rows", type=Path, help="write the tables' numbers into this file as well"
    )
    for hidden, kind in (("--side", str), ("--parameters", int), ("--rank", int)):
        parser.add_argument(hidden, type=kind, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.side:
        print(
            json.dumps(side(words.side, words.parameters, words.folder, words.rank, words.ranks)),
            flush=True,
        )
        os._exit(0)  # gloo's threads may abort a finalizing interpreter
    rows = [
        row
        for size in ([0.25] if words.quick else words.gb)
        for row in compare(size, words.ranks, 1 if words.quick else words.rounds, words.folder)
    ]
    print(f"\n{verdict(rows)}")
    if words.rows:
        words.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
