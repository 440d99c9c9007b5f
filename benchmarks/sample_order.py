"""Claim: Megatron's sample order costs a quarter of Megatron's CPU time and a third of its
memory; the native order starts at once.

    python benchmarks/sample_order.py [--quick] [--pile] [--rows FILE]

The exact order: document, sample and shuffle index of a dataset of so many documents are built
by megatron-core's BlendedMegatronDatasetBuilder and by trainkit.data.order.megatron_index, each
in a process of its own, in turn; the .npy files of both are compared byte for byte. Documents
have lognormal lengths; .idx is real, .bin is a hole of the right size, for no order reads it.
CPU time is the build's, user and system, children counted, imports not; memory is what the build
adds to the process's peak, mapped pages counted. Ratio: Megatron's figure over ours; several
rounds: the best of each side.

Beside it: the sample pass on two threads, and the native order, which is built from nothing: its
start for 128 datasets, and nanoseconds an element.
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainkit import _index
from trainkit.data.indexed.format import CODES, HEADER, MAGIC, VERSION
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.order.megatron_index import IndexRequest, MegatronIndex, build_index, cache_names

SEQ_LENGTH, SEED = 2048, 1234
TOKENIZER = {"class": "None", "path": "none"}
CPU_LIMIT, MEMORY_LIMIT, THREADS_LIMIT, START_LIMIT_MS, ELEMENT_LIMIT_NS = 4.0, 3.0, 1.7, 10.0, 50.0
CHUNK = 2**22  # documents written at once
DATASETS = 128


@dataclass(frozen=True)
class Case:
    """So many documents with so many tokens in all, read for so many epochs; the least ratio of
    CPU time, 0: too small to be judged; rounds."""

    name: str
    documents: int
    tokens: int
    epochs: int
    cpu_limit: float
    rounds: int


QUICK = Case("quick", 10**6, 10**9, 3, 0.0, 3)
DEFAULT = Case("2e7 documents", 2 * 10**7, 2 * 10**10, 3, CPU_LIMIT, 3)
PILE = Case("the Pile's size", 21 * 10**7, 3 * 10**11, 1, 3.5, 1)


def write_dataset(prefix: Path, case: Case) -> int:
    """Write the pair, a chunk of documents at a time; returns its tokens."""
    rng, dtype, spread = np.random.default_rng(0), np.dtype("<u2"), 1.2
    mean = np.log(case.tokens / case.documents) - spread**2 / 2
    starts = range(0, case.documents, CHUNK)
    with open(idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], case.documents, case.documents + 1))
        for start in starts:
            file.write(
                np.maximum(rng.lognormal(mean, spread, min(CHUNK, case.documents - start)), 1)
                .astype("<i4")
                .tobytes()
            )
    lengths = np.memmap(idx_path(prefix), "<i4", "r", HEADER.size, (case.documents,))
    position = 0
    with open(idx_path(prefix), "ab") as file:
        for start in starts:
            ends = (
                position
                + np.cumsum(lengths[start : start + CHUNK], dtype=np.int64) * dtype.itemsize
            )
            file.write(np.concatenate(([position], ends[:-1])).tobytes())
            position = int(ends[-1])
        for start in starts:
            file.write(np.arange(start, min(start + CHUNK, case.documents), dtype="<i8").tobytes())
        file.write(np.array([case.documents], "<i8").tobytes())
    with open(bin_path(prefix), "wb") as file:
        file.truncate(position)
    return position // dtype.itemsize


def request_of(prefix: Path, case: Case, tokens: int) -> IndexRequest:
    """All documents, for as many samples as so many whole epochs give; one epoch: as many as
    there are."""
    asked = None if case.epochs == 1 else (case.epochs * tokens - 1) // SEQ_LENGTH
    return IndexRequest(
        prefix, 0, case.documents, "train", SEQ_LENGTH, SEED, num_samples=asked, split="1"
    )


def build_theirs(request: IndexRequest, folder: Path) -> Callable[[], object]:
    """Megatron's build, imported and configured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it misses Apex and Transformer Engine
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, pad, special_tokens_dict, unique_identifiers = 50257, 0, -1, {}, TOKENIZER  # type: ignore[var-annotated]

    config = GPTDatasetConfig(
        random_seed=request.seed,
        sequence_length=request.seq_length,
        blend=([str(request.prefix)], None),
        split=request.split,
        path_to_cache=str(folder),
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    build: Callable[[], object] = BlendedMegatronDatasetBuilder(
        GPTDataset, [request.num_samples, None, None], lambda: True, config
    ).build
    return build


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _peak_bytes() -> int:
    return 1024 * max(
        resource.getrusage(who).ru_maxrss
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def side(name: str, request: IndexRequest, folder: Path, threads: int) -> dict[str, float]:
    """Build once; what it took."""
    build: Callable[[], object] = (
        build_theirs(request, folder)
        if name == "megatron"
        else lambda: build_index(request, folder, threads, TOKENIZER)
    )
    resident, cpu, wall = _resident_bytes(), _cpu_seconds(), time.monotonic()
    build()
    return {
        "cpu": _cpu_seconds() - cpu,
        "wall": time.monotonic() - wall,
        "peak": _peak_bytes(),
        "added": max(0, _peak_bytes() - resident),
    }


def run_side(name: str, case: Case, tokens: int, work: Path, threads: int) -> dict[str, float]:
    """`side` in a process of its own."""
    words = [
        "--side",
        name,
        "--work",
        str(work),
        "--case",
        json.dumps(vars(case)),
        "--tokens",
        str(tokens),
        "--threads",
        str(threads),
    ]
    done = subprocess.run(
        [sys.executable, "-P", __file__, *words], stdout=subprocess.PIPE, text=True, check=True
    )
    taken: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return taken


def compare(request: IndexRequest, ours: Path, theirs: Path) -> None:
    """Raises SystemExit where a file of theirs is missing on our side or differs."""
    names = sorted(path.name for path in theirs.iterdir())
    mark = cache_names(request, TOKENIZER).path(ours, "trainkit.json").name
    if sorted([*names, mark]) != sorted(path.name for path in ours.iterdir()) or len(names) != 4:
        raise SystemExit(f"the files differ in name: {names}")
    for name in names:
        if not filecmp.cmp(ours / name, theirs / name, shallow=False):
            raise SystemExit(f"{name} differs")


def exact(case: Case, work: Path, threads: int) -> list[dict[str, Any]]:
    """Build with both, compare, print the table."""
    tokens = write_dataset(work / "data", case)
    request = request_of(work / "data", case, tokens)
    taken: dict[str, list[dict[str, float]]] = {"megatron": [], "trainkit": []}
    for _ in range(case.rounds):
        for name, rounds in taken.items():
            rounds.append(run_side(name, case, tokens, work, threads))
        compare(request, work / "trainkit", work / "megatron")
        samples = MegatronIndex(work / "trainkit", request, TOKENIZER).num_samples
        for folder in taken:
            for path in (work / folder).iterdir():
                path.unlink()
    print(
        f"\n{case.name}: {case.documents:,} documents, {tokens:,} tokens, {case.epochs} epochs,"
        f" {samples:,} samples of {SEQ_LENGTH}; equal files",
        flush=True,
    )
    print(
        f"{'':12} {'CPU s':>8} {'ratio':>6} {'wall s':>8} {'memory added':>13} {'ratio':>6}"
        f" {'peak':>9}   {case.rounds} rounds, {threads} threads here"
    )
    best = {
        name: {key: min(r[key] for r in rounds) for key in rounds[0]}
        for name, rounds in taken.items()
    }
    rows: list[dict[str, Any]] = []
    ours = best["trainkit"]
    for name, row in best.items():
        cpu, memory = (
            best["megatron"][key] / ours[key] if name == "trainkit" else None
            for key in ("cpu", "added")
        )
        shown = [f"{ratio:6.2f}" if ratio else f"{'-':>6}" for ratio in (cpu, memory)]
        sizes = [f"{row[key] / 2**30:.2f} GiB" for key in ("added", "peak")]
        print(
            f"{name:12} {row['cpu']:8.2f} {shown[0]} {row['wall']:8.2f} {sizes[0]:>13} {shown[1]}"
            f" {sizes[1]:>9}",
            flush=True,
        )
        rows.append(
            {
                "what": case.name,
                "contender": name,
                **row,
                **({"cpu_ratio": cpu, "memory_ratio": memory} if cpu else {}),
            }
        )
    if case.cpu_limit:
        rows[-1]["limits"] = [case.cpu_limit, MEMORY_LIMIT]
    return rows


def _best(work: Callable[[], object], repeats: int = 5) -> float:
    """Least wall seconds of several runs."""
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return best


def two_threads(case: Case, work: Path) -> dict[str, Any]:
    """The pass that makes the sample index, on one thread and on two."""
    with open(idx_path(work / "data"), "rb") as file:
        documents = _index.MegatronDocuments(file.fileno(), HEADER.size, 0, case.documents, 1)
    documents.shuffle(_index.MersenneTwister(SEED), 0, len(documents))
    samples = (documents.tokens - 1) // SEQ_LENGTH
    with open(work / "pass", "wb") as file:
        documents.write_ids(file.fileno(), 0, 2)
        taken = {1: float("inf"), 2: float("inf")}
        for _ in range(10):  # in turn, for the machine may have others on it
            for threads, best in taken.items():
                write = partial(documents.write_samples, file.fileno(), 0, SEQ_LENGTH, 1)
                now = _best(partial(write, samples, False, threads), 1)
                taken[threads] = min(best, now)
    (work / "pass").unlink()
    ratio, cores = taken[1] / taken[2], len(os.sched_getaffinity(0))
    print(
        f"\nsample pass: {taken[1]:.3f} s on one thread, {taken[2]:.3f} s on two: {ratio:.2f} times"
        f" as fast, limit {THREADS_LIMIT} ({cores} cores)",
        flush=True,
    )
    return {
        "what": "sample pass on two threads",
        "seconds": list(taken.values()),
        "ratio": ratio,
        **({"limits": [THREADS_LIMIT]} if case.cpu_limit else {}),
    }


def native() -> list[dict[str, Any]]:
    """Start and cost of the order that needs no index."""
    from trainkit.data.order.native import NativeOrder

    rng = np.random.default_rng(0)
    sizes = [int(n) for n in rng.integers(10**6, 2**33, DATASETS)]
    weights, names = (
        (1 / np.arange(1, DATASETS + 1)).tolist(),
        [f"data{n}" for n in range(DATASETS)],
    )
    start = _best(lambda: NativeOrder(sizes, weights, "train", SEED, names).window(0, 1)) * 1e3
    batch = NativeOrder(sizes, weights, "train", SEED, names)
    window = _best(lambda: batch.window(10**11, 1024)) / 1024 * 1e9
    out = np.empty(2**20, np.int64)
    element = _best(lambda: _index.permute(3 * 10**9, 1, 10**9, out)) / len(out) * 1e9
    total = sum(sizes)
    print(
        f"\nnative order, {DATASETS} datasets of {total:,} samples: first sample known after"
        f" {start:.2f} ms, limit {START_LIMIT_MS:.0f}; no index, no file"
    )
    print(
        f"  {window:.0f} ns a sample of a global batch of 1,024; permutation {element:.1f} ns an"
        f" element, limit {ELEMENT_LIMIT_NS:.0f}",
        flush=True,
    )
    return [
        {
            "what": f"native start, {DATASETS} datasets",
            "milliseconds": start,
            "limits": [START_LIMIT_MS],
        },
        {
            "what": "native permutation",
            "nanoseconds": element,
            "of_a_blended_batch": window,
            "limits": [ELEMENT_LIMIT_NS],
        },
    ]


def verdict(rows: list[dict[str, Any]]) -> str:
    """The claim, judged."""
    missed = []
    for row in (row for row in rows if "limits" in row):
        found = [row[key] for key in ("cpu_ratio", "memory_ratio", "ratio") if key in row]
        if found:
            missed += [
                f"{row['what']}: {ratio:.2f} instead of {limit}"
                for ratio, limit in zip(found, row["limits"], strict=True)
                if ratio < limit
            ]
        elif (value := row.get("milliseconds", row.get("nanoseconds"))) > row["limits"][0]:
            missed.append(f"{row['what']}: {value:.2f} instead of {row['limits'][0]}")
    return "within all limits" if not missed else "MISSED: " + "; ".join(missed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a million documents: under a minute")
    parser.add_argument(
        "--pile",
        action="store_true",
        help="2.1e8 documents, 3e11 tokens as well: 10 GB of disk, 8 GB of memory, minutes",
    )
    parser.add_argument("--threads", type=int, default=1, help="of our side")
    parser.add_argument(
        "--folder",
        type=Path,
        help=(
            "where the data is written for the time being, instead of the system's temporary folder"
        ),
    )
    parser.add_argument(
        "--rows", type=Path, help="write the tables' numbers into this file as well"
    )
    for hidden in ("--side", "--work", "--case", "--tokens"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.side:
        work, case = Path(words.work), Case(**json.loads(words.case))
        print(
            json.dumps(
                side(
                    words.side,
                    request_of(work / "data", case, int(words.tokens)),
                    work / words.side,
                    words.threads,
                )
            )
        )
        return
    rows: list[dict[str, Any]] = []
    cases = [QUICK] if words.quick else [DEFAULT, PILE] if words.pile else [DEFAULT]
    for case in cases:
        with tempfile.TemporaryDirectory(dir=words.folder) as folder:
            rows += exact(case, Path(folder), words.threads)
            if case is cases[0]:
                rows.append(two_threads(case, Path(folder)))
    rows += native()
    print(f"\n{verdict(rows)}")
    if words.rows:
        words.rows.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
