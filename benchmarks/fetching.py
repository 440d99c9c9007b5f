"""Claim: fetching a sample takes at least 5 times less CPU than Megatron's GPTDataset, a sample
of a whole batch at least 20 times less.

    python benchmarks/fetching.py [--tokens 110000000] [--folder DIR]

Writes one .bin/.idx pair of random ids whose documents are as long as web text's (log-normal,
median 500 tokens, mean about 1,000) and reads it in random order with megatron-core's GPTDataset
(no attention mask; a batch: 32 samples and torch's default_collate) and with trainkit: windows
of the native order, and Megatron's own samples by Megatron's own index, whose tokens are
compared with Megatron's in the same run. Each by map and without. Microseconds are CPU time of
one thread, best of several rounds that take turns; all files in the page cache. Ratio: the
peer's time over ours; of a batch, over a sample of the peer's batch.

Then, each in a process of its own: seconds to the first batch, cold (the page cache asked to drop
the pair) and warm, imports not counted; and resident memory over an epoch. (A map is renewed
after 256 MiB of it were touched: a file smaller than that stays mapped whole; --tokens 400000000
makes a larger one.) Needs megatron-core: pip install --no-deps megatron-core.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.order.loader import Loader, ReadSchedule
from trainkit.data.order.native import NativeOrder
from trainkit.data.order.samples import MegatronSamples, NativeSamples, Samples

SEQ_LENGTH, BATCH, VOCAB = 2048, 32, 50257
SINGLE_LIMIT, BATCH_LIMIT = 5.0, 20.0
COUNT, ROUNDS = 4096, 5  # samples of a round
SIDES = ("GPTDataset", "native mmap", "native pread", "megatron mmap", "megatron pread")


def write_pair(prefix: Path, tokens: int) -> None:
    """Random ids in documents of web text's lengths."""
    generator, done = np.random.default_rng(0), 0
    with IndexedWriter(prefix, np.uint16) as writer:
        while done < tokens:
            lengths = np.maximum(1, generator.lognormal(np.log(500), 1.18, 4096)).astype(np.int64)
            writer.add_documents(
                generator.integers(0, VOCAB, int(lengths.sum()), np.uint16), lengths
            )
            done += int(lengths.sum())


class Words:
    """As much of a tokenizer as GPTDataset asks for."""

    vocab_size, eod = VOCAB, VOCAB - 1
    unique_identifiers = {"class": "Words"}  # noqa: RUF012


def gpt_dataset(prefix: Path, *, mmap: bool = True) -> Any:
    """Megatron's dataset over the whole pair, one epoch; its index in `prefix`.cache."""
    for name in ("megatron", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        gpt, utils = (
            importlib.import_module(f"megatron.core.datasets.{name}")
            for name in ("gpt_dataset", "utils")
        )
    plain = {
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    cache = f"{prefix}.cache"
    config = gpt.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ_LENGTH,
        split="1",
        path_to_cache=cache,
        mmap_bin_files=mmap,
        tokenizer=Words(),
        **plain,
    )
    low = gpt.GPTDataset.build_low_level_dataset(str(prefix), config)
    return gpt.GPTDataset(
        low,
        str(prefix),
        np.arange(len(low.sequence_lengths), dtype=np.int32),
        None,
        utils.Split.train,
        config,
    )


def samples_of(side: str, prefix: Path) -> tuple[Samples, Any]:
    """Our samples of a side, and the order of their numbers: Megatron's shuffle index, or None."""
    kind, mode = side.split()
    dataset = IndexedDataset(prefix, mmap=mode == "mmap")
    if kind == "native":
        return NativeSamples(dataset, "1", "train", SEQ_LENGTH, mode == "mmap"), None
    index = {
        part: next(Path(f"{prefix}.cache").glob(f"*-train-{part}_index.npy"))
        for part in ("document", "sample", "shuffle")
    }
    arrays = {part: np.load(path, mmap_mode="r") for part, path in index.items()}
    return (
        MegatronSamples(
            dataset, arrays["document"], arrays["sample"], SEQ_LENGTH, mmap=mode == "mmap"
        ),
        arrays["shuffle"],
    )


def _numbers(samples: Samples, shuffle: Any) -> Any:
    """`COUNT` sample numbers in random order."""
    order = (
        np.random.default_rng(1).permutation(samples.num_samples)[:COUNT]
        if shuffle is None
        else np.asarray(shuffle[:COUNT])
    )
    return order[: len(order) // BATCH * BATCH].astype(np.int64)


def _ours(samples: Samples, numbers: Any, size: int) -> Callable[[], object]:
    groups, out, rows = (
        numbers.reshape(-1, size),
        np.empty((size, SEQ_LENGTH + 1), np.int64),
        np.arange(size),
    )

    def work() -> None:
        for group in groups:
            samples.read(group, rows, out)

    return work


def _theirs(dataset: Any, count: int, size: int) -> Callable[[], object]:
    from torch.utils.data import default_collate

    def work() -> None:
        for first in range(0, count, size):
            found = [dataset[i] for i in range(first, first + size)]
            if size > 1:
                default_collate(found)

    return work


def compare_tokens(dataset: Any, prefix: Path) -> int:
    """Megatron's samples are Megatron's: returns how many were compared."""
    for side in SIDES[3:]:
        samples, shuffle = samples_of(side, prefix)
        numbers = _numbers(samples, shuffle)[:512]
        out = np.empty((len(numbers), SEQ_LENGTH + 1), np.int64)
        samples.read(numbers, np.arange(len(numbers)), out)
        for i, row in enumerate(out):
            theirs = dataset[i]
            assert np.array_equal(row[:-1], theirs["tokens"].numpy()) and np.array_equal(
                row[1:], theirs["labels"].numpy()
            ), f"{side}: sample {i} differs"
    return len(numbers)


def measure_samples(prefix: Path) -> None:
    """The table of microseconds a sample."""
    dataset, mapless = gpt_dataset(prefix), gpt_dataset(prefix, mmap=False)
    print(
        f"tokens equal to GPTDataset's in {compare_tokens(dataset, prefix)} samples, both modes\n"
    )
    works: dict[tuple[str, int], Callable[[], object]] = {}
    for size in (1, BATCH):
        works["GPTDataset", size] = _theirs(dataset, COUNT // 8, size)
        works["GPTDataset, mmap off", size] = _theirs(mapless, COUNT // 8, size)
        for side in SIDES[1:]:
            samples, shuffle = samples_of(side, prefix)
            works[side, size] = _ours(samples, _numbers(samples, shuffle), size)
    best = dict.fromkeys(works, float("inf"))
    for _ in range(ROUNDS):
        for key, work in works.items():
            began = time.thread_time()
            work()
            best[key] = min(
                best[key],
                (time.thread_time() - began)
                / (COUNT // 8 if key[0].startswith("GPT") else COUNT)
                * 1e6,
            )
    print(
        f"{'us a sample':<22} {'single':>9} {'ratio':>7} {'batch':>9} {'ratio':>7}"
        f" {'samples/s of a core':>20}"
    )
    for side in dict.fromkeys(name for name, _ in works):
        ratios = [best["GPTDataset", size] / best[side, size] for size in (1, BATCH)]
        print(
            f"{side:<22} {best[side, 1]:>9.2f} {ratios[0]:>7.1f} {best[side, BATCH]:>9.2f}"
            f" {ratios[1]:>7.1f} {1e6 / best[side, BATCH]:>20,.0f}"
        )
    lowest = [
        min(best["GPTDataset", size] / best[side, size] for side in SIDES[1:3])
        for size in (1, BATCH)
    ]
    said = [
        "within" if ratio >= limit else "BELOW"
        for ratio, limit in zip(lowest, (SINGLE_LIMIT, BATCH_LIMIT), strict=True)
    ]
    print(
        f"native, lower mode: single {lowest[0]:.1f}x, {said[0]} the limit of {SINGLE_LIMIT:.0f}x;"
        f" batch {lowest[1]:.1f}x, {said[1]} {BATCH_LIMIT:.0f}x"
    )


def measure_loader(prefix: Path) -> None:
    """Samples a second through the order, the threads and the buffers."""
    samples, _ = samples_of("native mmap", prefix)
    order = NativeOrder([samples.num_samples], None, "train", 1234, ["data"])
    loader = Loader(
        order,
        [samples],
        SEQ_LENGTH,
        ReadSchedule(lambda consumed, n: [range(consumed, consumed + n)], lambda at: BATCH),
    )
    wall, cpu = time.perf_counter(), time.process_time()
    for consumed in range(0, 4 * COUNT, BATCH):
        for _ in loader.read(consumed, BATCH):
            pass
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    loader.close()
    print(
        f"\nLoader, 2 threads, batches of {BATCH}: {4 * COUNT / wall:,.0f} samples/s,"
        f" {cpu / 4 / COUNT * 1e6:.2f} us of CPU a sample, all threads counted"
    )


def _opened(side: str, prefix: Path) -> tuple[int, Callable[[int], object]]:
    """Samples of an epoch, and what reads the batch that begins at a position."""
    if side == "GPTDataset":
        from torch.utils.data import default_collate

        dataset = gpt_dataset(prefix)
        return len(dataset), lambda first: default_collate(
            [dataset[i] for i in range(first, first + BATCH)]
        )
    samples, shuffle = samples_of(side, prefix)
    out, rows = np.empty((BATCH, SEQ_LENGTH + 1), np.int64), np.arange(BATCH)
    order = NativeOrder([samples.num_samples], None, "train", 1234, ["data"])

    def read(first: int) -> object:
        numbers = (
            order.window(first, BATCH)[1]
            if shuffle is None
            else np.asarray(shuffle[first : first + BATCH]).astype(np.int64)
        )
        samples.ahead(numbers)
        return samples.read(numbers, rows, out)

    return samples.num_samples, read


def one_side(side: str, prefix: Path) -> dict[str, Any]:
    """In a process of its own: seconds to the first batch, then MB of resident memory at the
    quarters of an epoch above those after it."""
    if side == "GPTDataset":
        with contextlib.suppress(Exception):
            gpt_dataset(prefix.with_name("missing"))  # its imports are not counted
    began = time.perf_counter()
    total, read = _opened(side, prefix)
    read(0)
    seconds, base = time.perf_counter() - began, _resident_mb()
    quarters: list[int] = []
    for first in range(0, total - BATCH, BATCH):
        read(first)
        if first * 4 // total > len(quarters):
            quarters.append(round(_resident_mb() - base))
    return {"seconds": seconds, "quarters": [*quarters, round(_resident_mb() - base)]}


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _drop(prefix: Path) -> None:
    """Tell the page cache to let go of the pair and of Megatron's index."""
    for path in (bin_path(prefix), idx_path(prefix), *Path(f"{prefix}.cache").glob("*.npy")):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_starts(prefix: Path) -> None:
    """The table of first batches and resident memory."""
    print(
        f"\n{'':<16} {'first batch, cold ms':>21} {'warm ms':>9}   resident MB above it at 1/4,"
        " 1/2, 3/4 and the end of an epoch"
    )
    for side in SIDES:
        found = []
        for cold in (True, False):
            if cold:
                _drop(prefix)
            argv = [sys.executable, __file__, "--side", side, "--folder", str(prefix.parent)]
            done = subprocess.run(argv, check=True, capture_output=True, text=True)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        quarters = " ".join(f"{mb:>6}" for mb in found[1]["quarters"])
        print(
            f"{side:<16} {1e3 * found[0]['seconds']:>21.1f} {1e3 * found[1]['seconds']:>9.1f}  "
            f" {quarters}"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=110_000_000)
    parser.add_argument(
        "--folder", help="where the data goes, and stays; by default a temporary folder"
    )
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.side:
        print(json.dumps(one_side(asked.side, Path(asked.folder) / "data")))
        return
    import torch

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        prefix = Path(asked.folder or temporary) / "data"
        if not bin_path(prefix).exists():
            write_pair(prefix, asked.tokens)
        dataset = IndexedDataset(prefix)
        size = bin_path(prefix).stat().st_size
        print(
            f"{dataset.num_tokens:,} tokens, {size / 1e6:.0f} MB, {dataset.num_documents:,}"
            f" documents, samples of {SEQ_LENGTH} + 1 tokens"
        )
        measure_samples(prefix)
        measure_loader(prefix)
        measure_starts(prefix)


if __name__ == "__main__":
    main()
