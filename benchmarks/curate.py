"""Claim: FineWeb's steps run 20 times as fast as in datatrove, signatures at 60 MB/s a core.

    python benchmarks/curate.py [--quick] [--peer-python PYTHON] [--documents N] [--rounds N]
                                [--millions 5,10,20]

The text is prose of this machine's own documentation: paragraphs that are letters in nine parts of
ten, joined into documents of about 3,000 characters, each once.

  trainkit    the units of prep-data as they are run, the steps language, gopher-repetition,
              gopher-quality, c4, fineweb, and the keys of minhash: CPU time of their processes,
              reading and writing included, less that of the same units for one document
  datatrove   its filters and its signatures over the same documents, in one process of PYTHON,
              which has datatrove 0.10, without its start and without writing what is kept

Both must keep the same documents. The second table is signatures alone, from text in memory. The
third is the search for duplicates among so many million documents: key files of random keys with a
tenth of the documents in groups, joined and clustered; what it costs must grow as they do.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.data_prep import documents
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.cli.checkout.machine import describe, machine
from trainkit.data.curate.key_files import write_keys
from trainkit.data.curate.read_back import read_shard
from trainkit.data.curate.signatures import MinHashKeys
from trainkit.data.curate.specs import ClusterSpec, FilterSpec, JoinSpec, KeysSpec, NumberSpec
from trainkit.data.curate.step_files import language_model
from trainkit.data.unit_specs import ReadingSettings
from trainkit.jobs.curation import RECIPES, MinHashStep

SIZE = 3000  # characters of a document, about
BANDS = 14
SHARD = 500_000  # documents of a shard of keys
RATIO, SPEED, GIB = 20.0, 60.0, 1.0  # what is wanted


def is_prose(paragraph: str) -> bool:
    """Whether it reads like text of the web, not like code."""
    words = paragraph.split()
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return len(words) >= 12 and letters >= 0.9 * len(paragraph)


def pieces(most: int) -> list[str]:
    """So many documents, as many as there are at most."""
    found: list[str] = []
    piece = ""
    for text in documents(2**40):
        for paragraph in text.split("\n\n"):
            joined = " ".join(paragraph.split())
            if is_prose(joined):
                piece += joined + "\n"
            if len(piece) >= SIZE:
                found.append(piece[: 2 * SIZE].strip())
                piece = ""
        if len(found) >= most:
            break
    return found[:most]


class UnitRun:
    """A unit's process: its CPU and wall seconds, its peak memory in GiB, its result."""

    def __init__(self, module: str, spec: Any, folder: Path) -> None:
        path = folder / "spec.json"
        path.write_text(json.dumps(spec.to_json()))
        argv = [sys.executable, "-I", "-m", f"trainkit.data.curate.{module}", str(path)]
        env = {**os.environ, PARENT_VARIABLE: str(os.getpid())}
        began = time.perf_counter()
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, env=env)
        assert child.stdout is not None
        lines = child.stdout.read().splitlines()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"the unit failed: {lines[-1:]}")
        self.wall = time.perf_counter() - began
        self.cpu = usage.ru_utime + usage.ru_stime
        self.peak = usage.ru_maxrss / 2**20
        self.result = json.loads(lines[-1])["result"]


def ours(shard: Path, folder: Path) -> tuple[float, list[int]]:
    """(CPU seconds, numbers of the documents that are kept)."""
    steps = [step for step in RECIPES["fineweb"]() if step.step not in ("minhash", "pii")]
    out = folder / "kept.jsonl.zst"
    spec = FilterSpec(
        "00000",
        shard,
        None,
        shard.stat().st_size,
        ReadingSettings("text"),
        tuple(step.model_dump(mode="json") for step in steps),
        tuple(range(len(steps))),
        "en",
        out,
        folder / "dropped.jsonl.zst",
        folder / "rejects.jsonl",
    )
    filtered = UnitRun("filter_worker", spec, folder)
    minhash = MinHashStep(step="minhash").model_dump(mode="json")
    keys = KeysSpec(out, "text", minhash, "en", folder / "keys")
    signed = UnitRun("duplicates_worker", keys, folder)
    kept = [int(str(document.fields["number"])) for document in read_shard(out, "text")]
    return filtered.cpu + signed.cpu, kept


def beside_datatrove(texts: list[str], python: str, rounds: int, folder: Path) -> None:
    """Both in turns on the same documents."""
    shard = folder / "documents.jsonl"
    with open(shard, "w") as file:
        for number, text in enumerate(texts):
            file.write(json.dumps({"text": text, "number": number}) + "\n")
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    mine: list[float] = []
    theirs: list[float] = []
    single = folder / "one.jsonl"
    single.write_text(json.dumps({"text": texts[0], "number": 0}) + "\n")
    for _ in range(rounds):
        start, _ = ours(single, folder)
        seconds, kept = ours(shard, folder)
        print(f"{seconds:.1f} CPU s, {start:.1f} of them the start of two processes")
        mine.append(len(texts) / (seconds - start))
        if not python:
            continue
        script = str(Path(__file__).parent / "peers" / "curate.py")
        argv = [python, script, str(shard), str(language_model())]
        out = subprocess.run(argv, capture_output=True, text=True, check=False)
        if out.returncode:
            raise SystemExit(out.stderr[-2000:])
        said = json.loads(out.stdout.splitlines()[-1])
        theirs.append(len(texts) / said["cpu"])
        same = len(set(kept) & set(said["kept"])) / max(1, len(set(kept) | set(said["kept"])))
        print(f"kept by both: {len(kept):,} here, {len(said['kept']):,} there, {same:.2%} alike")
    rate = statistics.median(mine)
    print(f"{len(texts):,} documents, {megabytes:,.1f} MB")
    print(f"trainkit   {rate:10,.0f} documents/s a core, {megabytes / len(texts) * rate:.1f} MB/s")
    if theirs:
        ratio = statistics.median(a / b for a, b in zip(mine, theirs, strict=True))
        print(f"datatrove  {statistics.median(theirs):10,.0f} documents/s a core")
        print(f"ratio {ratio:.1f} (wanted {RATIO:g}): {verdict(ratio >= RATIO)}")


def signatures(texts: list[str], rounds: int) -> None:
    """Signatures of text in memory."""
    maker = MinHashKeys(MinHashStep(step="minhash"), "en")
    size = sum(len(text.encode()) for text in texts) / 1e6
    rates = []
    for _ in range(rounds + 1):
        began = time.process_time()
        for text in texts:
            maker.keys_of(text)
        rates.append(size / (time.process_time() - began))
    rate = statistics.median(rates[1:])
    print(
        f"signatures {rate:.0f} MB/s a core, {rates[0]:.0f} when all words are new (wanted"
        f" {SPEED:g}): {verdict(rate >= SPEED)}"
    )


def verdict(reached: bool) -> str:
    """What stands behind a figure."""
    return "reached" if reached else "NOT REACHED"


def write_random_keys(folder: Path, count: int) -> tuple[Path, ...]:
    """Key files of `count` documents, a tenth of which share a band with another."""
    dice = np.random.default_rng(count)
    paths = []
    for first in range(0, count, SHARD):
        size = min(SHARD, count - first)
        records = np.empty((BANDS, size, 2), np.uint64)
        records[:, :, 0] = dice.integers(0, 2**64, (BANDS, size), np.uint64)
        records[:, :, 1] = np.arange(size, dtype=np.uint64)
        alike = dice.random(size) < 0.1
        groups = dice.integers(0, count // 20 + 1, size, np.uint64)
        records[:, alike, 0] = groups[alike] * np.uint64(0x9E3779B97F4A7C15)
        facts = dice.integers(1, 2**63, (size, 2), np.uint64)
        paths.append(folder / f"{first:010d}.keys")
        write_keys(paths[-1], facts, records)
    return tuple(paths)


def search(millions: float, folder: Path) -> float:
    """Find the duplicates among so many documents; returns CPU seconds a million."""
    count = int(millions * 1e6)
    keys = write_random_keys(folder, count)
    numbers = folder / "numbers.json"
    runs = [UnitRun("duplicates_worker", NumberSpec((), keys, numbers), folder)]
    edges = tuple(folder / f"{band}.pairs" for band in range(BANDS))
    for band, path in enumerate(edges):
        spec = JoinSpec(numbers, band, 0, 1, True, path)
        runs.append(UnitRun("duplicates_worker", spec, folder))
    cluster = ClusterSpec(numbers, edges, folder / "duplicates")
    runs.append(UnitRun("duplicates_worker", cluster, folder))
    cpu = sum(run.cpu for run in runs)
    peak = max(run.peak for run in runs)
    print(
        f"{millions:>6g} million documents: {cpu:7.1f} CPU s, {cpu / millions:.2f} s a million,"
        f" peak {peak:.2f} GiB ({verdict(peak <= GIB)}), {runs[-1].result['duplicates']:,} left out"
    )
    return cpu / millions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peer-python", default="", metavar="PYTHON")
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--millions", default="5,10,20")
    options = parser.parse_args()
    print(describe(machine()))
    count = 500 if options.quick else options.documents
    rounds = 1 if options.quick else options.rounds
    texts = pieces(count)
    with tempfile.TemporaryDirectory(prefix="curate-") as name:
        beside_datatrove(texts, options.peer_python, rounds, Path(name))
    signatures(texts, rounds)
    for millions in (0.1,) if options.quick else map(float, options.millions.split(",")):
        with tempfile.TemporaryDirectory(prefix="curate-") as name:
            search(millions, Path(name))


if __name__ == "__main__":
    main()
