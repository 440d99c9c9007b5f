"""The contenders of benchmarks/data_prep.py: each runs in a process of its own that this file is
the program of, on one thread.

    python benchmarks/peers/data_prep.py NAME CORPUS TOKENIZER BYTES

What each is stands in benchmarks/data_prep.py. CORPUS is a .jsonl, of which it takes the first
BYTES of text. It says one JSON object on stdout: {"text_bytes", "tokens", "cpu", "wall"}:
seconds after everything is imported and loaded and the encoder has had its first call.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


def _texts(corpus: Path, most: int) -> list[str]:
    import orjson

    found, size = [], 0
    with open(corpus, "rb") as file:
        for line in file:
            text = orjson.loads(line)["text"]
            found.append(text)
            size += len(text.encode())
            if size >= most:
                break
    return found


def _batches(texts: list[Any], size: int) -> Iterator[list[Any]]:
    batch, held = [], 0
    for text in texts:
        batch.append(text)
        held += len(text)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _timed(work: Callable[[], int], size: int) -> dict[str, Any]:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    return {
        "text_bytes": size,
        "tokens": tokens,
        "cpu": time.process_time() - cpu,
        "wall": time.perf_counter() - wall,
    }


def gigatoken(corpus: Path, tokenizer: Path, most: int) -> dict[str, Any]:
    """encode_batch alone: texts are bytes in memory, ids are thrown away."""
    import gigatoken

    encoder = gigatoken.Tokenizer(tokenizer)
    texts = [text.encode() for text in _texts(corpus, most)]
    batches = list(_batches(texts, 2**22))
    encoder.encode_batch([b"warm"], parallel=False)
    return _timed(
        lambda: sum(
            len(encoder.encode_batch(batch, parallel=False).layout.content.data)
            for batch in batches
        ),
        sum(map(len, texts)),
    )


def tokenizers(corpus: Path, tokenizer: Path, most: int) -> dict[str, Any]:
    """encode_batch_fast alone."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    texts = _texts(corpus, most)
    encoder.encode_batch_fast(["warm"])
    size = sum(len(text.encode()) for text in texts)
    batches = list(_batches(texts, 2**20))
    return _timed(
        lambda: sum(
            len(e.ids)
            for batch in batches
            for e in encoder.encode_batch_fast(batch, add_special_tokens=False)
        ),
        size,
    )


def tiktoken(corpus: Path, tokenizer: Path, most: int) -> dict[str, Any]:
    """encode_ordinary alone, with the same vocabulary."""
    import tiktoken

    vocabulary = json.loads(tokenizer.read_bytes())["model"]["vocab"]
    # GPT-2's characters for bytes
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = {chr(byte): byte for byte in printable}
    characters |= {
        chr(256 + n): byte
        for n, byte in enumerate(byte for byte in range(256) if byte not in printable)
    }
    ranks = {
        bytes(characters[c] for c in token): number
        for token, number in vocabulary.items()
        if all(c in characters for c in token)
    }
    ranks.pop(b"<|endoftext|>", None)
    pattern = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
    encoder = tiktoken.Encoding("bench", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    texts = _texts(corpus, most)
    encoder.encode_ordinary("warm")
    return _timed(
        lambda: sum(len(encoder.encode_ordinary(text)) for text in texts),
        sum(len(text.encode()) for text in texts),
    )


def datatrove(corpus: Path, tokenizer: Path, most: int) -> dict[str, Any]:
    """JsonlReader and DocumentTokenizer, one task: from .jsonl to .ds."""
    logging.disable(logging.CRITICAL)
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    importlib.import_module("loguru").logger.remove()
    texts = _texts(corpus, most)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "in").mkdir()
        (Path(folder) / "in" / "x.jsonl").write_text(
            "".join(json.dumps({"text": text, "id": str(n)}) + "\n" for n, text in enumerate(texts))
        )
        steps = [
            JsonlReader(f"{folder}/in"),
            DocumentTokenizer(
                f"{folder}/out",
                tokenizer_name_or_path=str(tokenizer),
                eos_token="<|endoftext|>",
                shuffle_documents=False,
            ),
        ]
        executor = LocalPipelineExecutor(
            steps, tasks=1, workers=1, logging_dir=f"{folder}/log", skip_completed=False
        )
        timed = _timed(lambda: len(str(executor.run())), sum(len(text.encode()) for text in texts))
        written = sum(path.stat().st_size for path in Path(folder).glob("out/**/*.ds"))
    return {**timed, "tokens": written // 2 - len(texts)}


CONTENDERS = {
    "gigatoken": gigatoken,
    "tokenizers": tokenizers,
    "tiktoken": tiktoken,
    "datatrove": datatrove,
}

if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    # or this file's neighbours could be imported
    sys.path = [
        path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent
    ]
    print(json.dumps(CONTENDERS[name](Path(rest[0]), Path(rest[1]), int(rest[2]))))
