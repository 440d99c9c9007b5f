"""Claim: a checkpoint is written at 70 % of the rate of a plain fsynced write of its bytes; behind training it costs 5 % of that, and 12 bytes a parameter.

    python benchmarks/checkpoint.py [--quick] [--gb X ...] [--rounds N] [--folder DIR] [--rows FILE]

One rank, fp32 weights and both moments of so many parameters in tensors of 16 MB and less, in a process of its own for each contender and round; the
contenders take turns. Every one ends with its bytes durable:

  plain         the same bytes from the same memory into one file by write, then fsync.
  trainkit      Saver.save: free space looked up, written, hashed and fsynced, manifest, rename, folder fsynced, older checkpoints pruned.
  behind        the same with save_async: `stall` is how long training waits for the copy, at the first save (memory is made) and at later ones.
  DCP           torch.distributed.checkpoint.save with its own FileSystemWriter, which fsyncs.
  torch.save    to a file, then fsync.

GB/s are of the data; the ratio is plain's seconds over the contender's in the same round, the median of the rounds. `peak` is what saving and loading add
to the process's memory, in parts of the data. Loading is into the tensors as they lie there, from files that were dropped from the page cache: trainkit
reads every file twice with verify = "full" (the second time from the cache), once with "size".
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMITS = {"blocking": 0.70, "stall": 0.05, "bytes": 1.01}
CONTENDERS = ("plain", "trainkit", "behind", "DCP", "torch.save")
LARGEST = 2**22  # elements of a tensor
SAVES = 3  # of each process; the first makes memory, the table has the others' median


def make(parameters: int) -> dict[str, Any]:
    """Weights and moments, by name."""
    import torch

    sizes = [LARGEST] * (parameters // LARGEST) + [n for n in (parameters % LARGEST,) if n]
    whole = {f"layers.{i}.weight": torch.randn(n) for i, n in enumerate(sizes)}
    moments = {f"optimizer.{m}.{name}": torch.randn(w.shape) for m in ("exp_avg", "exp_avg_sq") for name, w in whole.items()}
    return {f"model.{name}": w for name, w in whole.items()} | moments


def forget(folder: Path) -> None:
    """Drop what was written from the page cache."""
    for path in (p for p in folder.rglob("*") if p.is_file()):
        handle = os.open(path, os.O_RDONLY)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _saver(folder: Path, *, behind: bool) -> Any:
    from trainkit.jobs.schema import Checkpoint
    from trainkit.train.saver import Saver

    return Saver(Checkpoint(keep_last=1, save_async=behind), folder)


def _trainkit(tensors: dict[str, Any], folder: Path, *, behind: bool) -> tuple[Callable[[int], float], dict[str, Callable[[], object]]]:
    """(a save, which returns the seconds training waited; ways to load)."""
    from trainkit.runs.checkpoints import finished, open_checkpoint, verify
    from trainkit.train.checkpoint import load

    saver = _saver(folder, behind=behind)
    about: dict[str, Any] = {"consumed_samples": 0, "layout": {}, "job": {}, "state": {}, "validation": {}}

    def save(number: int) -> float:
        began = time.perf_counter()
        saver.save(tensors, before=lambda: None, last=False, step=number, **about)
        stall = time.perf_counter() - began
        saver.finish()
        return stall

    def newest(*, full: bool) -> None:
        (found,) = finished(folder)
        if verify(found, "full" if full else "size"):
            raise SystemExit(f"{found} is damaged")
        load(open_checkpoint(found), tensors)

    return save, {"load full": lambda: newest(full=True), "load size": lambda: newest(full=False)}


def _peer(name: str, tensors: dict[str, Any], folder: Path) -> tuple[Callable[[int], float], dict[str, Callable[[], object]]]:
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

    # The one before goes when the new one is there, as trainkit's does: memory that the page cache has just freed is faster to fill.
    path = folder / "checkpoint"

    def plain() -> None:
        with open(path, "wb", buffering=0) as file:
            for tensor in tensors.values():
                rest = memoryview(tensor.numpy()).cast("B")
                while rest:
                    rest = rest[file.write(rest) :]
            os.fsync(file.fileno())

    def torch_save() -> None:
        torch.save(tensors, path)
        _fsync(path)

    def torch_load() -> None:
        for key, value in torch.load(path, weights_only=True).items():
            tensors[key].copy_(value)

    saves: dict[str, Callable[[], object]] = {
        "plain": plain,
        "DCP": lambda: dcp_save(tensors, storage_writer=FileSystemWriter(path)),
        "torch.save": torch_save,
    }
    loads = {"plain": {}, "DCP": {"load": lambda: dcp_load(tensors, checkpoint_id=path)}, "torch.save": {"load": torch_load}}[name]

    def save(number: int) -> float:
        former = path.with_name("former")
        if path.exists():
            path.rename(former)
        began = time.perf_counter()
        saves[name]()
        seconds = time.perf_counter() - began
        shutil.rmtree(former) if former.is_dir() else former.unlink(missing_ok=True)
        return seconds

    return save, loads


def side(name: str, parameters: int, folder: Path) -> dict[str, Any]:
    """One contender: what it took."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
    tensors, folder = make(parameters), folder / "checkpoints"
    folder.mkdir()
    data = sum(t.nbytes for t in tensors.values())
    own = name in ("trainkit", "behind")
    save, loads = _trainkit(tensors, folder, behind=name == "behind") if own else _peer(name, tensors, folder)
    before, taken, stalls = _peak(), [], []
    for number in range(1, SAVES + 1):
        began = time.perf_counter()
        stalls.append(save(number))
        taken.append(time.perf_counter() - began if own else stalls[-1])
    found: dict[str, Any] = {"seconds": statistics.median(taken[1:]), "first_stall": stalls[0], "stall": statistics.median(stalls[1:])}
    found["bytes_per_parameter"] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / parameters
    sums = {key: float(tensor.double().sum()) for key, tensor in tensors.items()}
    for way, load in loads.items():
        for tensor in tensors.values():
            tensor.zero_()
        os.sync()
        forget(folder)
        began = time.perf_counter()
        load()
        found[way] = time.perf_counter() - began
        if {key: float(tensor.double().sum()) for key, tensor in tensors.items()} != sums:
            raise SystemExit(f"{name}: {way} gives other numbers")
    return found | {"peak": (_peak() - before) / data}


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def compare(gigabytes: float, rounds: int, where: Path | None) -> list[dict[str, Any]]:
    """Run all contenders in turn, print the table of one size."""
    parameters = int(gigabytes * 1e9 / 12)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name, found in runs.items():
            with tempfile.TemporaryDirectory(dir=where) as folder:
                argv = [sys.executable, "-P", __file__, "--side", name, "--parameters", str(parameters), "--folder", folder]
                done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True)
                found.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"\n{gigabytes:g} GB, {parameters:,} parameters, {rounds} rounds")
    print(f"{'':12} {'s':>7} {'GB/s':>6} {'ratio':>6} {'stall s':>8} {'first':>7} {'B/par.':>7} {'peak':>6}   load, s (GB/s)")
    rows = []
    for name, found in runs.items():
        middle = {key: statistics.median(r[key] for r in found) for key in found[0]}
        ratio = statistics.median(p["seconds"] / r["seconds"] for p, r in zip(runs["plain"], found, strict=True))
        stall = statistics.median(r["stall"] / b["seconds"] for r, b in zip(found, runs["trainkit"], strict=True))
        loads = ", ".join(f"{key[5:] or 'all'} {middle[key]:.2f} ({gigabytes / middle[key]:.2f})" for key in middle if key.startswith("load"))
        waits = f"{middle['stall']:8.3f} {middle['first_stall']:7.3f}" if name == "behind" else f"{'-':>8} {'-':>7}"
        print(
            f"{name:12} {middle['seconds']:7.2f} {gigabytes / middle['seconds']:6.2f} {ratio:6.2f} {waits} {middle['bytes_per_parameter']:7.3f}"
            f" {middle['peak']:6.2f}   {loads}",
            flush=True,
        )
        rows.append({"gigabytes": gigabytes, "contender": name, "ratio": ratio, "stall_ratio": stall, **middle})
    print(f"stall of a later save behind training: {100 * rows[2]['stall_ratio']:.1f} % of the blocking save's seconds, limit {100 * LIMITS['stall']:.0f} %")
    return rows


def verdict(rows: list[dict[str, Any]]) -> str:
    """The claim, judged."""
    missed = []
    for row in rows:
        size = f"{row['gigabytes']:g} GB"
        if row["contender"] == "trainkit" and row["ratio"] < LIMITS["blocking"]:
            missed.append(f"{size}: {row['ratio']:.2f} of a plain write instead of {LIMITS['blocking']:.2f}")
        if row["contender"] == "behind" and row["stall_ratio"] > LIMITS["stall"]:
            missed.append(f"{size}: a stall of {100 * row['stall_ratio']:.1f} % instead of {100 * LIMITS['stall']:.0f} %")
        if row["contender"] in ("trainkit", "behind") and row["bytes_per_parameter"] > 12 * LIMITS["bytes"]:
            missed.append(f"{size}: {row['bytes_per_parameter']:.3f} bytes a parameter")
    return "within all limits" if not missed else "MISSED: " + "; ".join(missed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="0.25 GB once: about a minute")
    parser.add_argument("--gb", type=float, nargs="+", default=[0.25, 1.0, 2.0], help="sizes of the data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the file system that is measured, instead of the system's temporary folder")
    parser.add_argument("--rows", type=Path, help="write the tables' numbers into this file as well")
    for hidden in ("--side", "--parameters"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.side:
        print(json.dumps(side(words.side, int(words.parameters), words.folder)))
        return
    rows = [row for size in ([0.25] if words.quick else words.gb) for row in compare(size, 1 if words.quick else words.rounds, words.folder)]
    print(f"\n{verdict(rows)}")
    if words.rows:
        words.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
