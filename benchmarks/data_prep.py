"""Claim: .jsonl and .jsonl.zst become .bin/.idx at 65 % of the rate of the encoder's bare
kernel, 40 times as fast as tokenizers, 60 as datatrove.

    python benchmarks/data_prep.py [--quick] [--tokenizer TOKENIZER.json] [--bytes N] [--rounds N]

The text is this machine's own: documentation, man pages, headers, Python sources, each file
once; what there is of it is said, nothing is repeated. It is code-heavy: ratios carry over to
text of the web, MB/s do not. The vocabulary is GPT-2's, of $TRAINKIT_TEST_DATA or
../shared/data.

  trainkit       the unit of prep-data as it is run, `python -m
  trainkit.data.tokenize.shard_worker`: a process's whole CPU time, its start, the
                 loading of two tokenizers, hashes, fsync and the comparison of one document in
                 10,000 with tokenizers in it. One of a dataset's later shards: the first one
                 also compares its first 200 documents (--quick shows none of that). `per core`
                 is MB of text a CPU second.
  gigatoken      its encode_batch on one thread over the same bytes, which lie in memory; ids are
  thrown away. No start, no reading, no writing. tokenizers     encode_batch_fast, and tiktoken's
  encode_ordinary: likewise; of the first part of the text. datatrove      JsonlReader and
  DocumentTokenizer, from .jsonl to .ds, without its start.

Ratios are medians over rounds in which the contenders take turns. Two workers: two processes on
a core each, against the same two shards one after the other on one core. Peak memory is what the
kernel counted.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from trainkit.base.worker import PARENT_VARIABLE
from trainkit.cli.checkout.machine import describe, machine
from trainkit.data.tokenizer import gpt2_bpe

PLACES = (
    "/usr/share/doc",
    "/usr/share/man",
    "/usr/share/info",
    "/usr/lib/python3",
    "/usr/include",
    "/usr/share/perl",
)
ENDINGS = (
    ".py",
    ".pyi",
    ".md",
    ".rst",
    ".txt",
    ".h",
    ".hpp",
    ".c",
    ".cpp",
    ".pm",
    ".pl",
    ".html",
    ".toml",
    ".yaml",
    ".sh",
)
LIMITS = {
    "per core MB/s": 130.0,
    "gigatoken": 0.65,
    "tokenizers": 40.0,
    "datatrove": 60.0,
    "two workers": 1.8,
    "peak MB": 400.0,
}
# of the text, for the slow ones
PARTS = {"gigatoken": 1.0, "tiktoken": 0.06, "tokenizers": 0.03, "datatrove": 0.02}
PILE_BYTES, PILE_HOURS, CORES = 850e9, (8, 27), 96
# the last: English text of the web under GPT-2's vocabulary, about
SLIMPAJAMA_TOKENS, SLIMPAJAMA_FILES, BYTES_PER_TOKEN = 627e9, 59166, 4.2


def files() -> list[Path]:
    """Files of text of this machine, in an order that mixes them and is always the same."""
    found: list[Path] = []
    for place in (*PLACES, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for folder, folders, names in os.walk(place):
            folders[:] = [name for name in folders if name not in ("__pycache__", ".git")]
            text = "/share/man" in folder or "/share/doc" in folder
            found += [Path(folder, name) for name in names if text or name.endswith(ENDINGS)]
    random.Random(0).shuffle(sorted_files := sorted(set(found)))
    return sorted_files


def documents(most: int) -> Iterator[str]:
    """Each text once, whatever the number of its copies, up to `most` bytes in all."""
    seen: set[bytes] = set()
    size = 0
    for path in files():
        try:
            data = (
                path.read_bytes()
                if not path.is_symlink() and path.stat().st_size < 3_000_000
                else b""
            )
            data = gzip.decompress(data) if path.suffix == ".gz" else data
            text = data.decode()
        except (OSError, EOFError, ValueError):
            continue
        digest = hashlib.blake2b(data, digest_size=16).digest()
        if len(data) < 100 or "\0" in text or digest in seen:
            continue
        seen.add(digest)
        size += len(data)
        yield text
        if size >= most:
            return


@dataclass(frozen=True)
class Corpus:
    """The text in files: all of it, its two halves, and a first part of 50 MB."""

    folder: Path
    text_bytes: int
    documents: int

    @classmethod
    def write(cls, folder: Path, most: int) -> Corpus:
        size = count = 0
        names = ("all", "half-0", "half-1", "small")
        with contextlib.ExitStack() as stack:
            opened = {
                name: stack.enter_context(open(folder / f"{name}.jsonl", "wb")) for name in names
            }
            for text in documents(most):
                line = (
                    json.dumps(
                        {"text": text, "meta": {"number": count}}, ensure_ascii=False
                    ).encode()
                    + b"\n"
                )
                for name in ("all", f"half-{count % 2}", *(["small"] if size < 50_000_000 else [])):
                    opened[name].write(line)
                size, count = size + len(text.encode()), count + 1
        for name in names:
            with (
                open(folder / f"{name}.jsonl", "rb") as source,
                open(folder / f"{name}.jsonl.zst", "wb") as target,
            ):
                zstandard.ZstdCompressor(level=3).copy_stream(source, target)
        (folder / "one.jsonl").write_text('{"text": "one document"}\n')
        return cls(folder, size, count)


@dataclass(frozen=True)
class Run:
    """What a process took. `cpu`, `wall` in seconds, `peak` in MB."""

    text_bytes: int
    cpu: float
    wall: float
    peak: float
    result: dict[str, Any]

    @property
    def per_core(self) -> float:
        """MB of text a CPU second."""
        return self.text_bytes / 1e6 / self.cpu


class Workers:
    """Starts the unit of prep-data for files of the corpus."""

    def __init__(self, corpus: Corpus, tokenizer: Path) -> None:
        self.folder, self.tokenizer = corpus.folder, tokenizer

    def start(self, name: str, core: int | None = None) -> tuple[subprocess.Popen[bytes], float]:
        """One unit, on a core of its own if asked for."""
        path, spec = self.folder / name, self.folder / f"{name}.spec.json"
        words = {
            "do": "tokens",
            "shard": str(path),
            "size": path.stat().st_size,
            "tokenizer": str(self.tokenizer),
            "eod_token": "<|endoftext|>",
        }
        spec.write_text(
            json.dumps(
                {
                    **words,
                    "first": False,
                    "prefix": str(self.folder / "out" / name),
                    "text_key": "text",
                    "encoder": "gigatoken",
                }
            )
        )
        argv = [sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker", str(spec)]
        env = {**os.environ, PARENT_VARIABLE: str(os.getpid())}  # it ends with this process
        began, child = time.perf_counter(), subprocess.Popen(argv, stdout=subprocess.PIPE, env=env)
        if core is not None:
            os.sched_setaffinity(child.pid, {core})  # before it has begun to load anything
        return child, began

    def finish(self, started: tuple[subprocess.Popen[bytes], float]) -> Run:
        """Wait for it; its own CPU seconds and peak memory, as the kernel counted them."""
        child, began = started
        assert child.stdout is not None
        out = child.stdout.read()
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - began
        child.stdout.close()
        child.returncode = os.waitstatus_to_exitcode(status)
        said = json.loads(out.splitlines()[-1])
        if child.returncode:
            raise SystemExit(f"the unit failed: {said}")
        return Run(
            said["result"]["text_bytes"],
            usage.ru_utime + usage.ru_stime,
            wall,
            usage.ru_maxrss * 1024 / 1e6,
            said["result"],
        )

    def run(self, name: str, core: int | None = None) -> Run:
        return self.finish(self.start(name, core))


def peer(name: str, corpus: Corpus, tokenizer: Path) -> Run | str:
    """One contender, or why it could not run."""
    argv = [
        sys.executable,
        str(Path(__file__).parent / "peers" / "data_prep.py"),
        name,
        str(corpus.folder / "all.jsonl"),
        str(tokenizer),
    ]
    env = {
        **os.environ,
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    child = subprocess.run(
        [*argv, str(int(corpus.text_bytes * PARTS[name]))],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode:
        return (child.stderr.strip().splitlines() or ["no word"])[-1][:150]
    said = json.loads(child.stdout.splitlines()[-1])
    return Run(said["text_bytes"], said["cpu"], said["wall"], 0.0, said)


def two_workers(workers: Workers, ending: str) -> tuple[float, float]:
    """Wall seconds of the two halves, one after the other on one core and both at once on two."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    one = sum(workers.run(f"half-{n}{ending}", first).wall for n in range(2))
    began = time.perf_counter()
    started = [workers.start(f"half-{n}{ending}", core) for n, core in enumerate((first, second))]
    for process in started:
        workers.finish(process)
    return one, time.perf_counter() - began


def _row(words: str, runs: list[Run], ratio: str = "") -> None:
    peak = max(run.peak for run in runs)
    cores, walls = (
        list(values)
        for values in zip(
            *((run.per_core, run.text_bytes / 1e6 / run.wall) for run in runs), strict=True
        )
    )
    median = statistics.median
    size, shown = runs[0].text_bytes / 1e6, f"{peak:,.0f}" if peak else "-"
    print(
        f"{words:<26} {size:>8,.1f} {median(cores):>9,.1f} {max(cores):>9,.1f}"
        f" {median(walls):>9,.1f} {shown:>8}   {ratio}",
        flush=True,
    )


def _verdict(name: str, value: float, *, most: bool = False) -> str:
    limit = LIMITS[name]
    return (
        f"{name}: {value:.2f}, limit {limit:g}:"
        f" {'within' if (value <= limit if most else value >= limit) else 'NOT REACHED'}"
    )


def measure(corpus: Corpus, tokenizer: Path, rounds: int) -> list[str]:
    """Run all contenders in turns, print the table, return the verdicts."""
    workers = Workers(corpus, tokenizer)
    ours: dict[str, list[Run]] = {".jsonl": [], ".jsonl.zst": []}
    peers: dict[str, list[Run]] = {name: [] for name in PARTS}
    absent: dict[str, str] = {}
    for number in range(rounds):
        for name in PARTS:
            if name in absent or (number and name != "gigatoken"):
                continue
            found = peer(name, corpus, tokenizer)
            if isinstance(found, str):
                absent[name] = found
            else:
                peers[name].append(found)
        for ending, runs in ours.items():
            runs.append(workers.run(f"all{ending}"))
    print(
        f"{'':<26} {'MB text':>8} {'per core':>9} {'best':>9} {'wall MB/s':>9} {'peak MB':>8}  "
        " ratio: trainkit's .jsonl rate per core over the peer's"
    )
    for ending, runs in ours.items():
        _row(f"trainkit {ending}", runs)
    rate = statistics.median(run.per_core for run in ours[".jsonl"])
    ratios: dict[str, float] = {}
    for name, runs in peers.items():
        if runs:
            pairs = zip(ours[".jsonl"], runs, strict=False)
            ratios[name] = statistics.median(
                mine.per_core / theirs.per_core for mine, theirs in pairs
            )
            _row(name, runs, f"{ratios[name]:.2f}")
        else:
            print(f"{name:<26} left out: {absent[name]}")
    verdicts = [
        _verdict("per core MB/s", rate),
        *(
            _verdict(name, ratios[name])
            for name in ("gigatoken", "tokenizers", "datatrove")
            if name in ratios
        ),
    ]
    start = min(workers.run("one.jsonl").cpu for _ in range(3))
    megabytes = ours[".jsonl"][0].text_bytes / 1e6
    steady = megabytes / (megabytes / rate - start)
    print(
        f"\na process that encodes one document takes {start:.2f} CPU seconds; without that"
        f" trainkit .jsonl is at {steady:.1f} MB/s per core",
        end="",
    )
    bare = [run.per_core for run in peers["gigatoken"]]
    print(f", {steady / statistics.median(bare):.2f} of gigatoken" if bare else "")
    verdicts += [*_memory(workers), *_scaling(workers, rounds)]
    _project(steady, start)
    return verdicts


def _memory(workers: Workers) -> list[str]:
    small, whole = (
        max(workers.run(f"{name}.jsonl{packing}").peak for packing in ("", ".zst"))
        for name in ("small", "all")
    )
    print(f"peak memory with 50 MB of text {small:.0f} MB, with all of it {whole:.0f} MB")
    return [_verdict("peak MB", whole, most=True)]


def _scaling(workers: Workers, rounds: int) -> list[str]:
    if len(os.sched_getaffinity(0)) < 2:
        return ["two workers: not measured, there is one core"]
    found = {}
    for ending in (".jsonl", ".jsonl.zst"):
        pairs = [two_workers(workers, ending) for _ in range(rounds)]
        found[ending] = statistics.median(one / two for one, two in pairs)
        print(
            f"two halves {ending}: {statistics.median(p[0] for p in pairs):.2f} s on one core,"
            f" {statistics.median(p[1] for p in pairs):.2f} s by two workers"
        )
    return [_verdict("two workers", found[".jsonl"])]


def _project(rate: float, start: float) -> None:
    """What it would take on many cores, from MB/s per core and CPU seconds a process."""
    pile = PILE_BYTES / 1e6 / rate / CORES / 3600
    slim = (
        (SLIMPAJAMA_TOKENS * BYTES_PER_TOKEN / 1e6 / rate + SLIMPAJAMA_FILES * start) / CORES / 3600
    )
    published = " to ".join(map(str, PILE_HOURS))
    print(
        f"\non {CORES} such cores, encoding alone: the Pile ({PILE_BYTES / 1e9:.0f} GB) {pile:.2f}"
        f" h, published {published} h on other machines;"
    )
    print(
        f"SlimPajama ({SLIMPAJAMA_TOKENS / 1e9:.0f}e9 tokens of about {BYTES_PER_TOKEN} bytes,"
        f" {SLIMPAJAMA_FILES:,} processes) {slim:.2f} h"
    )


def make_tokenizer(given: Path | None, folder: Path) -> Path:
    """The tokenizer.json: the one given, or GPT-2's from its two files."""
    if given:
        return given.resolve()
    data = Path(
        os.environ.get(
            "TRAINKIT_TEST_DATA", Path(__file__).resolve().parents[2] / "shared" / "data"
        )
    )
    if not (data / "gpt2-vocab.json").is_file():
        raise SystemExit(f"{data} has no gpt2-vocab.json: give --tokenizer TOKENIZER.json")
    gpt2_bpe(data / "gpt2-vocab.json", data / "gpt2-merges.txt", "<|endoftext|>").save(
        str(folder / "gpt2.json")
    )
    return folder / "gpt2.json"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="30 MB of text, one round")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json instead of GPT-2's")
    parser.add_argument("--bytes", type=int, default=500_000_000, help="of text at most")
    parser.add_argument("--rounds", type=int, default=3)
    words = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="trainkit-data-prep-") as name:
        folder = Path(name)
        (folder / "out").mkdir()
        tokenizer = make_tokenizer(words.tokenizer, folder)
        corpus = Corpus.write(folder, 30_000_000 if words.quick else words.bytes)
        print(describe(machine()), flush=True)
        print(
            f"load {os.getloadavg()[0]:.1f}; {corpus.text_bytes / 1e6:.0f} MB of text in"
            f" {corpus.documents:,} documents, each once\n",
            flush=True,
        )
        verdicts = measure(corpus, tokenizer, 1 if words.quick else words.rounds)
    print("\n" + "\n".join(verdicts))


if __name__ == "__main__":
    main()
