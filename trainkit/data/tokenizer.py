"""A dataset's tokenizer.json: trained on its corpus, or taken from a file, or made of GPT-2's
two. As a program: the unit that makes it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import write_text
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.data.sums import file_sum, identity_of
from trainkit.data.text.documents import BadLine, TextDocument
from trainkit.data.text.filters import DocumentFilter
from trainkit.data.text.formats import open_documents
from trainkit.data.text.rejects import raise_bad
from trainkit.data.unit_specs import TokenizerResult, TokenizerSettings, TokenizerSpec

if TYPE_CHECKING:  # the schema of jobs.toml costs each unit a third of its start
    from trainkit.jobs.datasets import Tokenizer as TokenizerTable

# bytes of a file whose sum is taken: of a larger one that a BPE is trained on only a start is read
MOST_SUMMED = 2**32
# characters of a word that training looks at together: the library takes the square of a word's
# length, hours for a megabyte of letters without a space
LONGEST_WORD = 1000


def plain(error: Exception) -> str:
    """What a library written in Rust says of a file, without the names and places of its own
    source."""
    words = str(error).strip().partition("\n")[0].partition(" (os error")[0]
    kind = re.match(
        r"data did not match any variant of untagged enum (\w+?)(?:Untagged|Wrapper)?( at line"
        r" .*)?$",
        words,
    )
    if kind is None:
        return re.sub(r", expected struct \w+", "", words)
    part = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind[1]).lower()
    return f"its {part} is of a type, or has fields, that this library does not know{kind[2] or ''}"


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json. Special tokens written in a text are text: no document can end
    another.

    Raises ConfigError (exit 6) where the file is missing or is not a tokenizer.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception for every failure
        raise ConfigError(
            f"{path} cannot be read as a tokenizer.json: {plain(error)}",
            exit=Exit.STAGE_FAILED,
            hint="give the tokenizer.json of the `tokenizers` library, whole",
        ) from None
    tokenizer.encode_special_tokens = True
    return tokenizer


def end_of_document(tokenizer: Tokenizer, eod_token: str, path: Path) -> int:
    """The id of the end-of-document token. Raises ConfigError (exit 6) where the vocabulary
    lacks it."""
    eod = tokenizer.token_to_id(eod_token)
    if eod is None:
        raise ConfigError(
            f"{path} has no token {eod_token!r}",
            exit=Exit.STAGE_FAILED,
            hint="set tokenizers.X.eod_token to the token that ends a document",
        )
    return int(eod)


def train_bpe(texts: Iterator[str], vocab_size: int, eod_token: str) -> Tokenizer:
    """Train a byte-level BPE as GPT-2's (every byte is in the alphabet, so every text can be
    encoded)."""
    tokenizer = Tokenizer(models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = pre_tokenizers.FixedLength(length=LONGEST_WORD)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[eod_token],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer


def gpt2_bpe(vocab_file: Path, merge_file: Path, eod_token: str) -> Tokenizer:
    """GPT-2's tokenizer from its two files: the vocabulary (vocab.json, encoder.json) and the
    merges (merges.txt, vocab.bpe).

    Raises ConfigError (exit 6): one cannot be read or is not what its name says, or the
    vocabulary lacks `eod_token`.
    """
    try:
        vocabulary = json.loads(vocab_file.read_text(encoding="utf-8"))
        lines = merge_file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{vocab_file} and {merge_file} cannot be read as GPT-2's files: {error}",
            exit=Exit.STAGE_FAILED,
            hint="give GPT-2's vocab.json and merges.txt",
        ) from None
    if not isinstance(vocabulary, dict) or not all(
        isinstance(number, int) for number in vocabulary.values()
    ):
        raise ConfigError(
            f"{vocab_file} is not an object of tokens and ids",
            exit=Exit.STAGE_FAILED,
            hint="give GPT-2's vocab.json",
        )
    merges: list[tuple[str, str]] = []
    for line in lines:
        if not line or line.startswith("#version"):
            continue
        left, _, right = line.partition(" ")
        # looked up here: the library panics on a merge that the vocabulary does not have
        if not right or " " in right or not {left, right, left + right} <= vocabulary.keys():
            raise ConfigError(
                f"{merge_file}: merge {len(merges) + 1} is {line[:80]!r}, which is not two tokens"
                f" of {vocab_file} that make a third",
                exit=Exit.STAGE_FAILED,
                hint="give GPT-2's vocab.json and merges.txt, which belong together",
            )
        merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    if eod_token not in vocabulary:
        end_of_document(tokenizer, eod_token, vocab_file)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eod_token])
    return tokenizer


def _texts(spec: TokenizerSpec, progress: ProgressCallback) -> Iterator[str]:
    """Texts of all shards in order until `training_bytes` are read: those that will be
    tokenized."""
    done = 0
    limit = spec.settings.training_bytes
    total = min(limit, spec.total_bytes)
    options = spec.reading.options
    wanted = DocumentFilter(spec.reading.filters)
    for shard in spec.shards:
        with open(shard, "rb") as file:
            documents = open_documents(shard.name, file, options, str(shard))
            for found in documents:
                if isinstance(found, BadLine) and spec.reading.on_error == "stop":
                    raise_bad(found, documents)
                for data in (wanted(found) or []) if isinstance(found, TextDocument) else []:
                    if done >= limit:
                        return
                    text = data.decode()
                    yield text
                    done += len(text)
                    progress(min(done, total - 1), total)


def given_tokenizer(settings: TokenizerSettings | TokenizerTable) -> Tokenizer:
    """The tokenizer that the files of a table make, which is not of type bpe. Raises ConfigError
    (exit 6) where they cannot be read, or lack the token that ends a document."""
    if settings.type == "gpt2":
        assert settings.vocab_file is not None and settings.merge_file is not None
        return gpt2_bpe(Path(settings.vocab_file), Path(settings.merge_file), settings.eod_token)
    assert settings.path is not None
    path = Path(settings.path)
    tokenizer = load_tokenizer(path)
    end_of_document(tokenizer, settings.eod_token, path)
    return tokenizer


def _make(spec: TokenizerSpec, progress: ProgressCallback) -> Tokenizer:
    settings = spec.settings
    if settings.type != "bpe":
        return given_tokenizer(settings)
    assert settings.vocab_size is not None
    return train_bpe(_texts(spec, progress), settings.vocab_size, settings.eod_token)


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Make tokenizer.json as a `TokenizerSpec` says. Returns a `TokenizerResult`, as JSON."""
    spec = TokenizerSpec.from_json(value)
    given = [identity_of(path) for path in spec.given if path.is_file()]
    tokenizer = _make(spec, progress)
    write_text(spec.tokenizer, tokenizer.to_str(pretty=True))
    read = []
    for name, size, mtime_ns in given:
        digest = file_sum(Path(name)) if size <= MOST_SUMMED else None
        read.append((name, size, mtime_ns, digest))
    return TokenizerResult(tokenizer.get_vocab_size(), tuple(read)).to_json()


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    run_unit(work)
