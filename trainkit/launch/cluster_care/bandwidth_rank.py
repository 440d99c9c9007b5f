"""One rank of an all-reduce between two hosts: `python pair_rank.py JSON` prints what it
measured as one line of JSON.

Its argument: backend, address, port, rank, world, device (the GPU's number, null on the CPU),
bytes, repeat, seconds.
"""

from __future__ import annotations

import datetime
import json
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

WARM = 2  # all-reduces before those that count: connections are made by the first


def measure(asked: dict[str, Any]) -> dict[str, Any]:
    """Seconds of one all-reduce (the median of `repeat`) and whether its sum was right.

    Bus bandwidth is that of nccl-tests (doc/PERFORMANCE.md): bytes / seconds * 2 (n - 1) / n,
    the same for any number of ranks.
    """
    world = int(asked["world"])
    device = torch.device("cpu" if asked["device"] is None else f"cuda:{asked['device']}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    limit = datetime.timedelta(seconds=float(asked["seconds"]))
    if ":" in asked["address"]:
        where = f"tcp://[{asked['address']}]:{asked['port']}"
    else:
        where = f"tcp://{asked['address']}:{asked['port']}"
    dist.init_process_group(
        asked["backend"],
        init_method=where,
        rank=int(asked["rank"]),
        world_size=world,
        timeout=limit,
    )
    values = torch.empty(int(asked["bytes"]) // 4, device=device)
    times = []
    for number in range(WARM + int(asked["repeat"])):
        values.fill_(float(asked["rank"]) + 1.0)
        _wait(device)
        began = time.perf_counter()
        dist.all_reduce(values)
        _wait(device)
        if number >= WARM:
            times.append(time.perf_counter() - began)
    right = bool((values == world * (world + 1) / 2).all())
    dist.destroy_process_group()
    seconds = statistics.median(times)
    return {
        "seconds": seconds,
        "gb_per_second": values.numel() * 4 / seconds * 2 * (world - 1) / world / 1e9,
        "right": right,
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
