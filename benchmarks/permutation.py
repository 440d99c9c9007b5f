"""Claim: the order of samples costs less than 50 ns an element, at any n and without an array of
n numbers.

    python benchmarks/permutation.py

Prints nanoseconds an element of trainkit._index.permute beside numpy's and torch's shuffles of
all n numbers, CPU time of one thread, best of several runs. Ratio: the peer's time over ours.
The peers have to make the whole array before the first element is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch

from trainkit import _index

LIMIT_NS = 50.0
SIZES = (2**16, 2**20, 2**20 + 1, 10**7)
LARGE = (2**31 + 1, 10**12, 2**62)  # no peer: the array would take 17 GB and more
COUNT = 2**20  # elements of a large permutation that are asked for
REPEATS = 5


def _nanoseconds(work: Callable[[], object], elements: int) -> float:
    """Best of several runs, per element."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.thread_time()
        work()
        best = min(best, time.thread_time() - began)
    return best / elements * 1e9


def main() -> None:
    torch.set_num_threads(1)
    generator = np.random.default_rng(0)
    print(
        f"{'n':>22} {'permute':>10} {'numpy':>10} {'ratio':>7} {'torch':>10} {'ratio':>7}   ns an"
        f" element, limit {LIMIT_NS:.0f}"
    )
    worst = 0.0
    for n in SIZES:
        out = np.empty(n, np.int64)
        ours = _nanoseconds(lambda n=n, out=out: _index.permute(n, 1, 0, out), n)  # type: ignore[misc]
        peers = [
            _nanoseconds(lambda n=n: generator.permutation(n), n),  # type: ignore[misc]
            _nanoseconds(lambda n=n: torch.randperm(n), n),  # type: ignore[misc]
        ]
        print(f"{n:>22,} {ours:>10.1f} " + " ".join(f"{p:>10.1f} {p / ours:>7.2f}" for p in peers))
        worst = max(worst, ours)
    out = np.empty(COUNT, np.int64)
    for n in LARGE:
        ours = _nanoseconds(lambda n=n: _index.permute(n, 1, n // 2, out), COUNT)  # type: ignore[misc]
        print(f"{n:>22,} {ours:>10.1f} {'-':>10} {'-':>7} {'-':>10} {'-':>7}")
        worst = max(worst, ours)
    print(f"worst {worst:.1f} ns: {'within' if worst < LIMIT_NS else 'ABOVE'} the limit")


if __name__ == "__main__":
    main()
