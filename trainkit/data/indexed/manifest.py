"""dataset.json: what a prepared dataset holds, what was left out of it and why, what each shard
came from, and the sums of its files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import read_json, sha256_file, write_json
from trainkit.base.lazy_dataclasses import asdict, dataclass, field
from trainkit.base.records import Record
from trainkit.data.curate.funnel import added, counts_of
from trainkit.data.indexed.paths import SCHEMA, bin_path, idx_path
from trainkit.data.indexed.published import check_published
from trainkit.data.sums import file_sum
from trainkit.data.unit_specs import MergeShard, MergeSpec, TextResult, TokensResult
from trainkit.jobs.schema import Dataset

COUNTS = ("documents", "empty_documents", "sequences", "tokens", "text_bytes", "lines", "rejects")
REASONS = ("left_out", "rejected", "passed_over")


@dataclass(frozen=True)
class ShardResult:
    """What the units of one shard reported.

    Args:
        tokens: of the unit that encoded it.
        text: of the one that wrote its text, if one did.
        fetched: of the one that fetched it, as it stands in the stamp.
    """

    tokens: TokensResult
    text: TextResult | None = None
    fetched: Mapping[str, object] = field(default_factory=dict)


def read_results(spec: MergeSpec) -> list[ShardResult]:
    """What the units of each shard reported, in the shards' order."""
    found = []
    for shard in spec.shards:
        results = {kind: read_json(path)["result"] for kind, path in shard.stamps.items()}
        text = TextResult.from_json(results["text"]) if "text" in results else None
        tokens = TokensResult.from_json(results["tokens"])
        found.append(ShardResult(tokens, text, results.get("fetch", {})))
    return found


@dataclass(frozen=True)
class DatasetTotals(Record):
    """Counts over all shards; `left_out`: {reason: documents}, `rejected`: {kind: lines},
    `passed_over`: {reason: members of archives, records of web archives}."""

    documents: int
    empty_documents: int
    sequences: int
    tokens: int
    text_bytes: int
    lines: int
    rejects: int
    left_out: Mapping[str, int]
    rejected: Mapping[str, int]
    passed_over: Mapping[str, int]


def totals(shards: Sequence[ShardResult]) -> DatasetTotals:
    """The counts of all shards together."""
    tokens = [shard.tokens for shard in shards]
    texts = [shard.text for shard in shards if shard.text is not None]
    return DatasetTotals(
        documents=sum(shard.documents for shard in tokens),
        empty_documents=sum(shard.empty_documents for shard in tokens),
        sequences=sum(shard.sequences for shard in tokens),
        tokens=sum(shard.tokens for shard in tokens),
        text_bytes=sum(shard.text_bytes for shard in tokens),
        lines=sum(shard.lines for shard in tokens),
        rejects=sum(shard.rejects for shard in tokens),
        left_out=added([each.left_out for each in tokens] + [each.left_out for each in texts]),
        rejected=added(shard.rejected for shard in tokens),
        passed_over=added(shard.passed_over for shard in tokens),
    )


@dataclass
class EncoderUse:
    """What encoded some of the shards, and why; `compared` and `passed_on`: texts, see
    `TokensResult`."""

    encoder: str
    because: str
    shards: int = 0
    compared: int = 0
    passed_on: int = 0


def encoders(shards: Sequence[ShardResult]) -> list[EncoderUse]:
    """What encoded the shards; units of before this was recorded do not say it."""
    found: dict[tuple[str, str], EncoderUse] = {}
    for tokens in (shard.tokens for shard in shards if shard.tokens.encoder):
        key = (tokens.encoder, tokens.encoder_because)
        use = found.setdefault(key, EncoderUse(*key))
        use.shards += 1
        use.compared += tokens.compared
        use.passed_on += tokens.passed_on
    return list(found.values())


def ranges_path(prefix: Path) -> Path:
    """What a merged pair is made of, from just before it stands under its name until
    dataset.json says so: {"pair": [size and mtime in ns of .bin and .idx], "shards": [name,
    sequences, documents]}. Without it, a process that is killed in between would leave a pair
    that nobody knows the parts of."""
    return prefix.with_name(f"{prefix.name}.ranges.json")


def check_declared(name: str, declared: Mapping[str, int], shards: Sequence[ShardResult]) -> None:
    """Compare with what jobs.toml says was published. The shards are kept.

    Args:
        name: of the dataset.
        declared: counts that were published.
        shards: what was found.

    Raises ConfigError (exit 6) that names every count that is wrong.
    """
    seen = {
        "documents": sum(shard.tokens.lines for shard in shards),
        "text_bytes": totals(shards).text_bytes,
    }
    dataset = Dataset.model_construct(
        source="files",
        name=name,
        documents=declared.get("documents"),
        text_bytes=declared.get("text_bytes"),
    )
    check_published(dataset, {key: seen[key] for key in declared})


def check_drop(name: str, shards: Sequence[ShardResult]) -> None:
    """Raise ConfigError (exit 6) for a field of `drop` that no document has: what was to be left
    out would be there unnoticed."""
    present = added(shard.tokens.drop_present for shard in shards)
    missing = [path for path, count in present.items() if not count]
    if missing and any(shard.tokens.documents for shard in shards):
        raise ConfigError(
            f"datasets.{name}.drop: no document has the field {', '.join(map(repr, missing))}, so"
            " nothing was left out by it",
            exit=Exit.STAGE_FAILED,
            hint="correct its path (dots go into objects), or take it out; the shards are kept",
        )


@dataclass(frozen=True)
class FileChecksum:
    """XXH128 of a range of a file; `file` is relative to the folder of dataset.json."""

    file: str
    start: int
    bytes: int
    xxh128: str


def _whole_file(path: Path, folder: Path, digest: str = "") -> FileChecksum:
    size = path.stat().st_size
    return FileChecksum(str(path.relative_to(folder)), 0, size, digest or file_sum(path))


def _checksums(
    spec: MergeSpec, shards: Sequence[ShardResult], folder: Path, itemsize: int
) -> list[FileChecksum]:
    """Sums of every byte of the pairs. A merged .bin has those of its parts: nothing is read
    again, and damage is narrowed down."""
    sums: list[FileChecksum] = []
    if spec.prefix is None:
        for given, shard in zip(spec.shards, shards, strict=True):
            sums += (
                _whole_file(bin_path(given.prefix), folder, shard.tokens.bin_xxh128),
                _whole_file(idx_path(given.prefix), folder, shard.tokens.idx_xxh128),
            )
        return sums
    merged = bin_path(spec.prefix)
    if spec.shuffle:
        sums.append(_whole_file(merged, folder))
    else:
        name = str(merged.relative_to(folder))
        start = 0
        for shard in shards:
            size = shard.tokens.tokens * itemsize
            sums.append(FileChecksum(name, start, size, shard.tokens.bin_xxh128))
            start += size
    sums.append(_whole_file(idx_path(spec.prefix), folder))
    return sums


def _shard_entry(given: MergeShard, shard: ShardResult) -> dict[str, object]:
    """A shard in dataset.json: where it is from, and its counts but for zeros."""
    tokens = shard.tokens
    counts = {
        "documents": tokens.documents,
        "sequences": tokens.sequences,
        "tokens": tokens.tokens,
        "text_bytes": tokens.text_bytes,
        "rejects": tokens.rejects,
        "left_out": tokens.left_out,
    }
    return {
        "name": given.name,
        "source": {**given.source, **shard.fetched},
        **{key: count for key, count in counts.items() if count},
    }


def write_manifest(spec: MergeSpec, shards: Sequence[ShardResult]) -> DatasetTotals:
    """Write dataset.json beside the tokenizer; paths in it are relative to its folder. Returns
    the counts."""
    from trainkit.data.indexed.dataset import best_dtype  # numpy
    from trainkit.data.tokenizer import end_of_document, load_tokenizer

    folder = spec.manifest.parent
    tokenizer = load_tokenizer(spec.tokenizer)
    vocab_size = tokenizer.get_vocab_size()
    dtype = best_dtype(vocab_size)
    counts = totals(shards)
    entries = list(zip(spec.shards, shards, strict=True))
    if spec.prefix is None:
        pairs = [given.prefix for given, shard in entries if shard.tokens.tokens]
    else:
        pairs = [spec.prefix]
    manifest = document(
        SCHEMA,
        name=spec.name,
        vocab_size=vocab_size,
        eod_id=end_of_document(tokenizer, spec.eod_token, spec.tokenizer),
        tokenizer_sha256=sha256_file(spec.tokenizer),
        dtype=str(dtype),
        encoders=[asdict(use) for use in encoders(shards)],
        **counts.to_json(),
        pairs=[str(pair.relative_to(folder)) for pair in pairs],
        shards=[_shard_entry(given, shard) for given, shard in entries],
        **({"shuffled": True} if spec.shuffle else {}),
        **({"curation": counts_of(spec.curation)} if spec.curation else {}),
        checksums=[asdict(each) for each in _checksums(spec, shards, folder, dtype.itemsize)],
    )
    write_json(spec.manifest, manifest)
    return counts
