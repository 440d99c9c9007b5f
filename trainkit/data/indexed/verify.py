"""Checks a prepared dataset from its first byte to its last; names all that is wrong, not only
the first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.base.errors import ConfigError, Problem, SourceLocation
from trainkit.base.files import sha256_file
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.indexed.paths import bin_path
from trainkit.data.indexed.statistics import document_lengths
from trainkit.data.sums import file_sum

BLOCK = 2**22  # tokens looked at at once: bounds memory
COUNTS = ("documents", "sequences", "tokens")


@dataclass
class VerifyReport:
    """What a check saw: counts of what could be read, and what is wrong."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    checked_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)

    def say(self, path: Path, message: str, hint: str = "") -> None:
        self.problems.append(Problem(message, SourceLocation(str(path)), hint))

    def __iadd__(self, other: VerifyReport) -> VerifyReport:
        for name in (*COUNTS, "checked_bytes"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.problems += other.problems
        return self


def verify_pair(prefix: Path, vocab_size: int, eod_id: int | None) -> VerifyReport:
    """Check a pair: .idx against .bin and itself, every id against the vocabulary, the last id
    of every document.

    Args:
        eod_id: what ends a document; None: nothing does.
    """
    found = VerifyReport()
    try:
        pair = IndexedDataset(prefix)
        pair.verify()
    except ConfigError as error:
        found.problems += error.list
        return found
    found.documents = len(pair.document_indices) - 1
    found.sequences = len(pair)
    found.tokens = pair.num_tokens
    _check_ids(pair, vocab_size, found)
    if eod_id is not None:
        _check_ends(pair, eod_id, found)
    return found


def _check_ids(pair: IndexedDataset, vocab_size: int, found: VerifyReport) -> None:
    wrong = 0
    first = 0
    example = 0
    for start in range(0, pair.num_tokens, BLOCK):
        block = pair.tokens[start : start + BLOCK]
        if int(block.max()) < vocab_size and int(block.min()) >= 0:
            continue
        places = np.flatnonzero((block < 0) | (block >= vocab_size))
        if not wrong:
            first = start + int(places[0])
            example = int(block[places[0]])
        wrong += len(places)
    if wrong:
        found.say(
            bin_path(pair.prefix),
            f"token {first:,} is the id {example}, but the tokenizer has {vocab_size:,} ids"
            f" ({wrong:,} such tokens)",
        )


def _check_ends(pair: IndexedDataset, eod_id: int, found: VerifyReport) -> None:
    wrong = 0
    example = (0, 0)
    document = 0
    token = 0
    for lengths in document_lengths(pair):
        filled = np.flatnonzero(lengths)  # a document without a token has no end
        ids = pair.tokens[token + np.cumsum(lengths)[filled] - 1]
        bad = np.flatnonzero(ids != eod_id)
        if len(bad) and not wrong:
            example = document + int(filled[bad[0]]), int(ids[bad[0]])
        wrong = wrong + len(bad)
        document = document + len(lengths)
        token = token + int(lengths.sum())
    if wrong:
        message = (
            f"document {example[0]:,} ends with the id {example[1]}, not with the end-of-document"
            f" {eod_id} ({wrong:,} such documents)"
        )
        found.say(
            bin_path(pair.prefix),
            message,
            "tokenizers.X.append_eod = false says that none is written",
        )


def verify_dataset(
    folder: Path, manifest: dict[str, Any], prefixes: Sequence[Path], *, eod: bool
) -> VerifyReport:
    """Check a dataset against its dataset.json: checksums, then every pair, then the counts.

    Args:
        folder: of dataset.json and tokenizer.json.
        manifest: read from it.
        prefixes: its pairs.
        eod: documents end with the end-of-document token.
    """
    found = _check_sums(folder, manifest)
    for prefix in prefixes:
        found += verify_pair(prefix, manifest["vocab_size"], manifest["eod_id"] if eod else None)
    for name in COUNTS:
        if manifest.get(name, getattr(found, name)) != getattr(found, name):
            found.say(
                folder / "dataset.json",
                f"says {manifest[name]:,} {name}, the pairs hold {getattr(found, name):,}",
            )
    return found


def _check_sums(folder: Path, manifest: dict[str, Any]) -> VerifyReport:
    """XXH128 of every range that the manifest lists, as many at once as there are cores, and
    SHA-256 of tokenizer.json."""
    found = VerifyReport()
    sums = manifest.get("checksums", [])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for entry, problem in zip(
            sums, pool.map(lambda entry: _sum_problem(folder, entry), sums), strict=True
        ):
            found.checked_bytes += entry["bytes"]
            if problem:
                found.say(
                    folder / entry["file"],
                    problem,
                    "the file changed after it was written: prepare the data again with --force",
                )
    sizes: dict[str, int] = {}
    for entry in sums:
        sizes[entry["file"]] = sizes.get(entry["file"], 0) + entry["bytes"]
    for name, size in sizes.items():
        if (folder / name).is_file() and (folder / name).stat().st_size != size:
            found.say(
                folder / name,
                f"has {(folder / name).stat().st_size:,} bytes, dataset.json says {size:,}",
            )
    tokenizer = folder / "tokenizer.json"
    if "tokenizer_sha256" in manifest and (
        not tokenizer.is_file() or sha256_file(tokenizer) != manifest["tokenizer_sha256"]
    ):
        found.say(
            tokenizer,
            "is not the tokenizer that the tokens were made with",
            "prepare the data again, or put the former file back",
        )
    return found


def _sum_problem(folder: Path, entry: dict[str, Any]) -> str | None:
    path = folder / entry["file"]
    start = entry["start"]
    size = entry["bytes"]
    try:
        digest = file_sum(path, start, size)
    except OSError as error:
        return str(error.strerror)
    if digest == entry["xxh128"]:
        return None
    return (
        f"bytes {start:,} to {start + size:,}: XXH128 is {digest}, dataset.json says"
        f" {entry['xxh128']}"
    )
