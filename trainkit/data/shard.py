"""The units of prep-data that work on one shard: `python -m trainkit.data.shard SPEC.json` writes its text or its tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainkit.base.unit import Progress, run_unit
from trainkit.data.corpus import read_documents
from trainkit.data.indexed import IndexedWriter, best_dtype
from trainkit.data.sources import SOURCES
from trainkit.data.tokenizer import end_of_document, load_tokenizer

BATCH_CHARACTERS = 2**20  # text encoded at once: bounds memory whatever the corpus's size


def write_text(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Write one shard of text from its source's recipe."""
    return SOURCES[spec["source"]].write(spec["recipe"], Path(spec["path"]), spec["text_key"])


def _batches(path: Path, text_key: str) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in read_documents(path, text_key):
        batch.append(document.text)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_tokens(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Encode one shard of text to .bin/.idx: the end-of-document id after every document that has a token.

    An empty document becomes an entry of the document index without a sequence, as in Megatron's preprocess_data.py.
    """
    tokenizer = load_tokenizer(Path(spec["tokenizer"]))
    eod = end_of_document(tokenizer, spec["eod_token"], Path(spec["tokenizer"]))
    dtype = best_dtype(tokenizer.get_vocab_size())
    documents = empty = tokens = size = 0
    with IndexedWriter(Path(spec["prefix"]), dtype) as writer:
        for texts in _batches(Path(spec["shard"]), spec["text_key"]):
            for text, encoding in zip(texts, tokenizer.encode_batch_fast(texts, add_special_tokens=False), strict=True):
                ids = encoding.ids
                writer.add_document(np.array([*ids, eod] if ids else [], dtype=dtype))
                documents += 1
                empty += not ids
                tokens += len(ids) + bool(ids)
                size += len(text.encode())
            progress(min(size, spec["size"]), spec["size"])
    return {"documents": documents, "empty_documents": empty, "tokens": tokens, "text_bytes": size}


def work(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Do what `spec["do"]` names: "text" or "tokens"."""
    return write_text(spec, progress) if spec["do"] == "text" else write_tokens(spec, progress)


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process a shard: the processes are the parallelism
    run_unit(work)
