"""The last unit of prep-data for ready-made .bin/.idx pairs: each is checked, and the dataset's
manifest written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.indexed.paths import bin_path, idx_path
from trainkit.data.sums import file_sum, identity_of
from trainkit.data.tokenizer import end_of_document, load_tokenizer
from trainkit.data.unit_specs import CheckSpec, FileRead

BLOCK = 2**22  # tokens looked at at once: bounds memory


@dataclass
class _Counts:
    """What the pairs hold together, and what was read of them."""

    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    dtypes: set[str] = field(default_factory=set)
    read: list[FileRead] = field(default_factory=list)

    def to_json(self) -> dict[str, object]:
        return {"documents": self.documents, "sequences": self.sequences, "tokens": self.tokens}


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Check the pairs of a `CheckSpec` against themselves and the vocabulary, then write
    dataset.json.

    Raises ConfigError (exit 6): a pair is damaged, or holds an id that the tokenizer does not have.
    """
    spec = CheckSpec.from_json(value)
    tokenizer = load_tokenizer(spec.tokenizer)
    vocab_size = tokenizer.get_vocab_size()
    total = sum(IndexedDataset(prefix).num_tokens for prefix in spec.prefixes)
    counts = _Counts()
    for prefix in spec.prefixes:
        _check_pair(prefix, spec.tokenizer, vocab_size, counts, total, progress)
    manifest = document(
        "dataset/1",
        name=spec.name,
        vocab_size=vocab_size,
        eod_id=end_of_document(tokenizer, spec.eod_token, spec.tokenizer),
        dtypes=sorted(counts.dtypes),
        pairs=[str(prefix) for prefix in spec.prefixes],
        **(counts.to_json() if counts.dtypes else {}),
    )
    write_json(spec.manifest, manifest)
    return {**counts.to_json(), "read": [list(file) for file in counts.read]}


def _check_pair(
    prefix: Path,
    tokenizer: Path,
    vocab_size: int,
    counts: _Counts,
    total: int,
    progress: ProgressCallback,
) -> None:
    """Check one pair and add what it holds to `counts`. One at a time is open: maps are few."""
    bin_identity = identity_of(bin_path(prefix))
    idx_identity = identity_of(idx_path(prefix))
    digest = xxhash.xxh3_128()
    pair = IndexedDataset(prefix)
    pair.verify()
    for start in range(0, pair.num_tokens, BLOCK):
        block = pair.tokens[start : start + BLOCK]
        digest.update(block.data)
        highest = int(block.max())
        if highest >= vocab_size or int(block.min()) < 0:
            raise ConfigError(
                f"{bin_path(prefix)} holds the id {highest} among tokens {start:,} and after, but"
                f" {tokenizer} has {vocab_size:,} ids",
                exit=Exit.STAGE_FAILED,
                hint="name the tokenizer that these pairs were written with",
            )
        progress(counts.tokens + min(start + BLOCK, pair.num_tokens), total)
    counts.dtypes.add(str(pair.dtype))
    counts.read.append((*bin_identity, digest.hexdigest()))
    counts.read.append((*idx_identity, file_sum(idx_path(prefix))))
    counts.documents += pair.num_documents
    counts.sequences += len(pair)
    counts.tokens += pair.num_tokens


if __name__ == "__main__":
    run_unit(work)
