"""What datatrove says of the documents of curation_cases.py: `PYTHON datatrove_verdicts.py
documents COUNT` and `... clusters GROUPS` print it as JSON, with an interpreter that has datatrove
0.10 and spaCy.

    {"datatrove": version, "spacy": version, "verdicts": [[reason or null of each of `RULES`, sum of
    words, of both C4 texts, of the signature], ..]}; {.., "clusters": [[number, ..], ..]}
"""

from __future__ import annotations

import json
import sys
import tempfile
import zlib
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.data.curate.curation_cases import documents, near_duplicates

RULES = ("gopher-repetition", "gopher-quality", "c4", "c4-fineweb", "fineweb")


def checksum(parts: list[Any]) -> int:
    """CRC-32 of JSON."""
    return zlib.crc32(json.dumps(parts, ensure_ascii=False).encode())


def verdicts(count: int) -> dict[str, Any]:
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import MinhashDedupSignature
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.utils.text import split_into_words

    filters = (
        *(GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter()),
        *(C4QualityFilter(filter_no_terminal_punct=False), FineWebQualityFilter()),
    )
    with tempfile.TemporaryDirectory() as folder:
        signer = MinhashDedupSignature(folder)
    found = []
    for text in documents(count):
        row: list[Any] = []
        kept = []
        for rule, each in zip(RULES, filters, strict=True):
            document = Document(text=text, id="")
            try:
                said = each.filter(document)
            except ZeroDivisionError:  # of an empty text
                said = (False, "ZeroDivisionError")
            row.append(None if said is True else said[1])
            if rule.startswith("c4"):
                kept.append(document.text if said is True else None)
        shingles = signer.get_shingles(text)
        values = signer.get_signature(shingles) if shingles.size else []
        words = list(split_into_words(text))
        row += [checksum(words), checksum(kept), checksum([v for band in values for v in band])]
        found.append(row)
    return {"verdicts": found}


def clusters(groups: int) -> dict[str, Any]:
    from datatrove.data import Document
    from datatrove.pipeline.dedup.minhash import (
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )

    texts = near_duplicates(groups)
    shards = [list(range(first, len(texts), 3)) for first in range(3)]
    with tempfile.TemporaryDirectory() as folder:
        for rank, shard in enumerate(shards):
            data = (Document(text=texts[number], id=str(number)) for number in shard)
            MinhashDedupSignature(f"{folder}/signatures").run(data, rank, 3)
        for rank in range(14):
            MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/buckets").run(None, rank, 14)
        MinhashDedupCluster(f"{folder}/buckets", f"{folder}/removed", save_cluster_id=True).run(
            None, 0, 1
        )
        found: dict[Any, list[int]] = {}
        for rank, shard in enumerate(shards):
            keep = MinhashDedupFilter(f"{folder}/removed", load_cluster_ids=True)
            keep.exclusion_writer = _Sink(found)
            data = (Document(text=texts[number], id=str(number)) for number in shard)
            for document in keep.run(data, rank, 3):
                _note(found, document)
    return {"clusters": sorted(sorted(each) for each in found.values() if len(each) > 1)}


class _Sink:
    """Takes the place of a writer of what is removed."""

    def __init__(self, found: dict[Any, list[int]]) -> None:
        self.found = found

    def __enter__(self) -> _Sink:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def write(self, document: Any, rank: int) -> None:
        _note(self.found, document)


def _note(found: dict[Any, list[int]], document: Any) -> None:
    cluster = document.metadata.get("minhash_cluster_id", -1)
    if cluster != -1:
        found.setdefault(cluster, []).append(int(document.id))


if __name__ == "__main__":
    made = {"documents": verdicts, "clusters": clusters}[sys.argv[1]](int(sys.argv[2]))
    versions = {name: version(name) for name in ("datatrove", "spacy")}
    print(json.dumps({**versions, **made}, separators=(",", ":")))
