"""By which keys documents are compared: equal text, or bands of MinHash."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping

import numpy as np
import xxhash
from numpy.typing import NDArray

from trainkit import _index
from trainkit.data.curate.contract import CrawledDocument
from trainkit.data.curate.key_files import Words64
from trainkit.data.curate.words import load_words
from trainkit.jobs.curation import ExactStep, MinHashStep

MERSENNE = 2**61 - 1
BLANK_LINES = re.compile(r"(\n{2,})")
FEEDS = re.compile(r"(\n)")


def text_key(text: str) -> int:
    """What equal texts share, 64 bits: of 10^9 different ones two are taken for equal once in 37
    corpora."""
    return xxhash.xxh3_64_intdigest(text.encode())


def pieces_of(text: str, unit: str) -> list[str]:
    """The lines or paragraphs of a text, and between them what separates them."""
    return (FEEDS if unit == "line" else BLANK_LINES).split(text)


class ExactKeys:
    """Records (key, document's key, number) of documents, paragraphs or lines."""

    def __init__(self, step: ExactStep) -> None:
        self._step = step
        self._records = array("Q")

    def add(self, number: int, document: CrawledDocument) -> None:
        """Take in a document."""
        for key in self.keys(document.text):
            self._records.extend((key, document.key, number))

    def keys(self, text: str) -> set[int]:
        """The keys of a text."""
        if self._step.unit == "document":
            return {text_key(text)}
        pieces = pieces_of(text, self._step.unit)[::2]
        return {
            text_key(piece.strip())
            for piece in pieces
            if len(piece.strip()) >= self._step.min_characters
        }

    def records(self) -> Words64:
        """uint64 [1, R, 3]."""
        return np.array(self._records, np.uint64).reshape(1, -1, 3)


def hash_parameters(step: MinHashStep) -> tuple[list[int], list[int]]:
    """a and b of datatrove's MinhashConfig of the same seed (dedup/minhash.py)."""
    count = step.bands * step.rows
    generator = np.random.RandomState(step.seed)
    a = generator.randint(1, MERSENNE, dtype=np.uint64, size=(1, count))
    b = generator.randint(0, MERSENNE, dtype=np.uint64, size=(1, count))
    return a[0].tolist(), b[0].tolist()


class MinHashKeys:
    """Records (key of a band, number): the XXH64 of the band's values, little-endian. Of 10^9
    documents two are taken for candidates once in 37 bands."""

    def __init__(self, step: MinHashStep, language: str) -> None:
        self._step = step
        self._words = load_words(language)
        self._hash = _index.MinHash(step.ngram, *hash_parameters(step))
        self._numbers = array("Q")
        self._keys = bytearray()

    def values(self, text: str) -> NDArray[np.int64]:
        """The signature: int64 [bands * rows], or [0] of fewer words than a shingle has."""
        return self._hash(self._words, text.lower())

    def keys_of(self, text: str) -> bytes:
        """The keys of a text's bands, 8 bytes each; none of fewer words than a shingle has."""
        return self._hash.band_keys(self._words, text.lower(), self._step.rows)

    def add(self, number: int, document: CrawledDocument) -> None:
        """Take in a document."""
        keys = self.keys_of(document.text)
        if keys:
            self._numbers.append(number)
            self._keys += keys

    def records(self) -> Words64:
        """uint64 [bands, R, 2]."""
        keys = np.frombuffer(self._keys, "<u8").reshape(-1, self._step.bands).T
        numbers = np.broadcast_to(np.array(self._numbers, np.uint64), keys.shape)
        return np.stack([keys, numbers], axis=2)


def step_keys(step: Mapping[str, object], language: str) -> ExactKeys | MinHashKeys:
    """What makes the keys of a step, from its table."""
    if step["step"] == "minhash":
        return MinHashKeys(MinHashStep.model_validate(step), language)
    return ExactKeys(ExactStep.model_validate(step))
