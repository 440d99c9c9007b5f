"""A dataset's tokenizer.json: trained on its corpus, or taken from a file. As a program: the unit that makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import write_text
from trainkit.base.unit import Progress, run_unit
from trainkit.data.corpus import read_documents


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Special tokens written in a text are text: no document can end another.

    Raises ConfigError (exit 6) where the file is missing or is no tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every failure
        raise ConfigError(f"{path} cannot be read as a tokenizer.json: {error}", exit=Exit.STAGE_FAILED) from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_document(tokenizer: Tokenizer, eod_token: str, path: Path) -> int:
    """The id of the end-of-document token. Raises ConfigError (exit 6) where the vocabulary lacks it."""
    eod = tokenizer.token_to_id(eod_token)
    if eod is None:
        raise ConfigError(f"{path} has no token {eod_token!r}", exit=Exit.STAGE_FAILED, hint="set tokenizers.X.eod_token to the token that ends a document")
    return int(eod)


def train_bpe(texts: Iterator[str], vocab_size: int, eod_token: str) -> Tokenizer:
    """Train a byte-level BPE as GPT-2's (every byte is in the alphabet, so every text can be encoded)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[eod_token], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _texts(spec: dict[str, Any], progress: Progress) -> Iterator[str]:
    """Texts of all shards in order until `training_bytes` are read."""
    done, limit = 0, int(spec["training_bytes"])
    total = min(limit, int(spec["total_bytes"]))
    for shard in spec["shards"]:
        for document in read_documents(Path(shard), spec["text_key"]):
            if done >= limit:
                return
            yield document.text
            done += len(document.text)
            progress(min(done, total - 1), total)


def work(spec: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """Make tokenizer.json. Returns {"vocab_size"}."""
    target = Path(spec["tokenizer"])
    if spec["type"] == "bpe":
        tokenizer = train_bpe(_texts(spec, progress), spec["vocab_size"], spec["eod_token"])
    else:
        tokenizer = load_tokenizer(Path(spec["path"]))
    end_of_document(tokenizer, spec["eod_token"], target if spec["type"] == "bpe" else Path(spec["path"]))
    write_text(target, tokenizer.to_str(pretty=True))
    return {"vocab_size": tokenizer.get_vocab_size()}


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    run_unit(work)
