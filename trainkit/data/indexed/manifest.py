"""dataset.json: what a prepared dataset holds, what was left out of it and why, what each shard
came from, and the sums of its files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import read_json, sha256_file, write_json
from trainkit.data.indexed.dataset import best_dtype, bin_path, idx_path
from trainkit.data.indexed.published import check_published
from trainkit.data.sums import file_sum
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.jobs.schema import Dataset

SCHEMA = "dataset/1"
COUNTS = ("documents", "empty_documents", "sequences", "tokens", "text_bytes", "lines", "rejects")
REASONS = ("left_out", "rejected", "passed_over")


def read_manifest(path: Path) -> dict[str, Any]:
    """A dataset.json. Raises ConfigError (exit 6) where there is none."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: the dataset is not prepared",
            exit=Exit.STAGE_FAILED,
            hint="invoke prep-data --dataset NAME",
        )
    return read_document(path, SCHEMA)


def read_results(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What the units of each shard reported, in the shards' order: the tokens unit's words, and
    below "text" and "fetch" those of the units before it."""
    found = []
    for shard in spec["shards"]:
        results = {kind: read_json(Path(path))["result"] for kind, path in shard["stamps"].items()}
        found.append({**results.pop("tokens"), **results})
    return found


def _sum(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: dict[str, int] = {}
    for counter in counters:
        for reason, count in counter.items():
            total[reason] = total.get(reason, 0) + count
    return dict(sorted(total.items()))


def totals(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Counts over all shards; "left_out": {reason: documents}, "rejected": {kind: lines},
    "passed_over": {reason: members of archives}."""
    reasons = {
        name: _sum(
            result.get(name, {}) for shard in shards for result in (shard, shard.get("text", {}))
        )
        for name in REASONS
    }
    return {**{name: sum(shard[name] for shard in shards) for name in COUNTS}, **reasons}


def encoders(shards: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What encoded the shards, and why: {"encoder", "because", "shards", "compared",
    "passed_on"} each (see trainkit.data.tokenize.shard_worker)."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for shard in shards:
        if "encoder" not in shard:
            continue
        entry = {
            "encoder": shard["encoder"],
            "because": shard["encoder_because"],
            "shards": 0,
            "compared": 0,
            "passed_on": 0,
        }
        entry = found.setdefault((shard["encoder"], shard["encoder_because"]), entry)
        entry["shards"] += 1
        entry["compared"] += shard["compared"]
        entry["passed_on"] += shard["passed_on"]
    return list(found.values())


def ranges_path(prefix: Path) -> Path:
    """What a merged pair is made of, from just before it stands under its name until
    dataset.json says so: {"pair": [size and mtime in ns of .bin and .idx], "shards": [name,
    sequences, documents]}. Without it, a process that is killed in between would leave a pair
    that nobody knows the parts of."""
    return prefix.with_name(f"{prefix.name}.ranges.json")


def check_declared(spec: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> None:
    """Compare with what jobs.toml says was published. Raises ConfigError (exit 6) naming every
    count that is wrong; the shards are kept."""
    seen = {
        "documents": sum(shard["lines"] for shard in shards),
        "text_bytes": totals(shards)["text_bytes"],
    }
    declared = Dataset.model_construct(name=spec["name"], **spec["declared"])
    check_published(declared, {key: seen[key] for key in spec["declared"]})


def check_drop(name: str, shards: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError (exit 6) for a field of `drop` that no document has: what was to be left
    out would be there unnoticed."""
    present = _sum(shard.get("drop_present", {}) for shard in shards)
    if missing := [
        path
        for path, count in present.items()
        if not count and any(shard["documents"] for shard in shards)
    ]:
        message = (
            f"datasets.{name}.drop: no document has the field {', '.join(map(repr, missing))}, so"
            " nothing was left out by it"
        )
        raise ConfigError(
            message,
            exit=Exit.STAGE_FAILED,
            hint="correct its path (dots go into objects), or take it out; the shards are kept",
        )


def _checksums(
    spec: Mapping[str, Any], shards: Sequence[Mapping[str, Any]], folder: Path, itemsize: int
) -> list[dict[str, Any]]:
    """Sums of every byte of the pairs. A merged .bin has those of its parts: nothing is read
    again, and damage is narrowed down."""
    sums: list[dict[str, Any]] = []

    def add(path: Path, start: int, size: int, digest: str) -> None:
        sums.append(
            {"file": str(path.relative_to(folder)), "start": start, "bytes": size, "xxh128": digest}
        )

    def add_whole(path: Path, digest: str | None = None) -> None:
        add(path, 0, path.stat().st_size, digest or file_sum(path))

    if spec["prefix"] is None:
        for given, shard in zip(spec["shards"], shards, strict=True):
            add_whole(bin_path(Path(given["prefix"])), shard["bin_xxh128"])
            add_whole(idx_path(Path(given["prefix"])), shard["idx_xxh128"])
        return sums
    merged = Path(spec["prefix"])
    start = 0
    if spec["shuffle"]:
        add_whole(bin_path(merged))
    else:
        for shard in shards:
            size = shard["tokens"] * itemsize
            add(bin_path(merged), start, size, shard["bin_xxh128"])
            start += size
    add_whole(idx_path(merged))
    return sums


def write_manifest(spec: Mapping[str, Any], shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Write dataset.json beside the tokenizer; paths in it are relative to its folder. Returns
    the counts, what it was made from left out."""
    path = Path(spec["manifest"])
    tokenizer_path = Path(spec["tokenizer"])
    tokenizer = load_tokenizer(tokenizer_path)
    vocab_size = tokenizer.get_vocab_size()
    counts = totals(shards)
    parts = [
        Path(given["prefix"])
        for given, shard in zip(spec["shards"], shards, strict=True)
        if shard["tokens"]
    ]
    if spec["prefix"] is None:
        pairs = parts
    else:
        pairs = [Path(spec["prefix"])]
    own = ("documents", "sequences", "tokens", "text_bytes", "rejects", "left_out")
    manifest = document(
        SCHEMA,
        name=spec["name"],
        vocab_size=vocab_size,
        eod_id=end_of_document(tokenizer, spec["eod_token"], tokenizer_path),
        tokenizer_sha256=sha256_file(tokenizer_path),
        dtype=str(best_dtype(vocab_size)),
        encoders=encoders(shards),
        **counts,
        pairs=[str(pair.relative_to(path.parent)) for pair in pairs],
        shards=[
            {
                "name": given["name"],
                "source": {**given["source"], **shard.get("fetch", {})},
                **{key: shard[key] for key in own if shard.get(key)},
            }
            for given, shard in zip(spec["shards"], shards, strict=True)
        ],
        **({"shuffled": True} if spec["shuffle"] else {}),
        checksums=_checksums(spec, shards, path.parent, best_dtype(vocab_size).itemsize),
    )
    write_json(path, manifest)
    return counts
