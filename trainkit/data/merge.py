"""The last unit of prep-data: token shards joined into one .bin/.idx, and the dataset's manifest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainkit.base.files import read_json, write_json
from trainkit.base.forms import document
from trainkit.base.unit import Progress, run_unit
from trainkit.data.indexed import IndexedDataset, best_dtype, merge
from trainkit.data.tokenizer import end_of_document, load_tokenizer

COUNTS = ("documents", "empty_documents", "tokens", "text_bytes")


def work(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Merge, then write dataset.json with the sums over the shards' stamps."""
    prefix = Path(spec["prefix"])
    tokenizer = load_tokenizer(Path(spec["tokenizer"]))
    merge([Path(p) for p in spec["shards"]], prefix)
    results = [read_json(Path(p))["result"] for p in spec["token_stamps"]]
    left_out: dict[str, int] = {}
    for path in spec["text_stamps"]:
        result = read_json(Path(path))["result"]
        for reason in result["left_out"]:
            left_out[reason] = left_out.get(reason, 0) + result["left_out"][reason]
    counts = {name: sum(r[name] for r in results) for name in COUNTS}
    vocab_size = tokenizer.get_vocab_size()
    manifest = document(
        "dataset/1",
        name=spec["name"],
        vocab_size=vocab_size,
        eod_id=end_of_document(tokenizer, spec["eod_token"], Path(spec["tokenizer"])),
        dtype=str(best_dtype(vocab_size)),
        sequences=len(IndexedDataset(prefix)),
        **counts,
        left_out=left_out,
        shards=len(results),
    )
    write_json(Path(spec["manifest"]), manifest)
    progress(1, 1)
    return counts


if __name__ == "__main__":
    run_unit(work)
