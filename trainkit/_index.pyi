from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

csrc_sha256: str

def permute(n: int, key: int, start: int, out: NDArray[np.int64]) -> None: ...

class Blend:
    def __init__(self, weights: NDArray[np.int64]) -> None: ...
    def at(self, start: int, dataset: NDArray[np.int16], count: NDArray[np.int64]) -> None: ...
    def counts(self, position: int) -> NDArray[np.int64]: ...

def interleave(
    ids: NDArray[np.uint32],
    stops: NDArray[np.int64],
    value: int,
    out: NDArray[np.uint16] | NDArray[np.int32],
) -> None: ...
def gather(
    source: NDArray[np.uint8],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    out: NDArray[np.uint8],
) -> None: ...

class Reader:
    def __init__(self, path: str, dtype_code: int, mmap: bool = True) -> None: ...
    @property
    def num_tokens(self) -> int: ...
    def windows(
        self,
        first: int,
        count: int,
        numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[np.int64],
    ) -> tuple[int, int, int]: ...
    def ahead(self, first: int, count: int, numbers: NDArray[np.int64], tokens: int) -> None: ...
    def documents(
        self,
        document_index: NDArray[np.int32],
        sample_index: NDArray[Any],
        lengths: NDArray[np.int32],
        offsets: NDArray[np.int64],
        numbers: NDArray[np.int64],
        rows: NDArray[np.int64],
        out: NDArray[np.int64],
        extra: int,
    ) -> tuple[int, int, int]: ...
    def ahead_of_documents(
        self,
        document_index: NDArray[np.int32],
        sample_index: NDArray[Any],
        lengths: NDArray[np.int32],
        offsets: NDArray[np.int64],
        numbers: NDArray[np.int64],
        tokens: int,
        extra: int,
    ) -> None: ...

class CodePoints:
    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None: ...
    def within(self, texts: list[bytes]) -> list[int]: ...

class MersenneTwister:
    def __init__(self, seed: int) -> None: ...
    def shuffle(
        self, values: NDArray[np.uint32] | NDArray[np.int64], narrow: int = ...
    ) -> None: ...

class MegatronDocuments:
    tokens: int
    last_length: int
    def __init__(
        self,
        fd: int,
        offset: int,
        first: int,
        last: int,
        epochs: int,
        tick: Callable[[int], None] | None = None,
        chunk: int = ...,
    ) -> None: ...
    def __len__(self) -> int: ...
    def shuffle(
        self,
        generator: MersenneTwister,
        begin: int,
        end: int,
        tick: Callable[[int], None] | None = None,
    ) -> None: ...
    def write_ids(
        self, fd: int, at: int, threads: int, tick: Callable[[int], None] | None = None
    ) -> None: ...
    def write_samples(
        self,
        fd: int,
        at: int,
        seq_length: int,
        extra: int,
        samples: int,
        wide: bool,
        threads: int,
        tick: Callable[[int], None] | None = None,
    ) -> None: ...

def write_shuffle_index(
    generator: MersenneTwister,
    separate: int,
    total: int,
    wide: bool,
    fd: int,
    at: int,
    tick: Callable[[int], None] | None = None,
) -> None: ...
def write_blend(
    weights: Sequence[float],
    sizes: Sequence[int],
    total: int,
    dataset_fd: int,
    dataset_at: int,
    number_fd: int,
    number_at: int,
    tick: Callable[[int], None] | None = None,
) -> list[int]: ...

Finding = tuple[str, float, float]  # reason, value, limit

class TextWords:
    def __init__(
        self,
        flags: NDArray[np.uint16],
        folds: Sequence[tuple[int, str]],
        exceptions: Sequence[str],
        split: Callable[[list[str]], list[list[int]]],
        english: bool,
    ) -> None: ...
    def words(self, text: str) -> list[str]: ...
    def count(self, text: str) -> int: ...
    def sentences(self, line: str) -> int: ...
    def simplify(self, lower: str, numbers: bool) -> str: ...

class GopherQuality:
    def __init__(
        self,
        *,
        min_words: float,
        max_words: float,
        min_average_length: float,
        max_average_length: float,
        max_symbol_ratio: float,
        max_bullet_lines: float,
        max_ellipsis_lines: float,
        min_alphabetic_words: float,
        min_stop_words: float,
        stop_words: Sequence[str],
    ) -> None: ...
    def __call__(self, words: TextWords, text: str) -> Finding | None: ...

class GopherRepetition:
    def __init__(
        self,
        *,
        max_lines: float,
        max_paragraphs: float,
        max_line_characters: float,
        max_paragraph_characters: float,
        top_grams: Sequence[tuple[int, float]],
        repeated_grams: Sequence[tuple[int, float]],
    ) -> None: ...
    def __call__(self, words: TextWords, text: str) -> Finding | None: ...

class FinewebQuality:
    def __init__(
        self,
        *,
        min_terminal_lines: float,
        max_short_lines: float,
        short_line: int,
        max_repeated_characters: float,
        max_feeds_per_word: float,
    ) -> None: ...
    def __call__(self, words: TextWords, text: str) -> Finding | None: ...

class C4Quality:
    def __init__(
        self,
        *,
        terminal_punctuation: bool,
        min_sentences: float,
        min_words: int,
        max_word: int,
        lorem_ipsum: bool,
        javascript: bool,
        curly_bracket: bool,
        policy: bool,
        citations: bool,
    ) -> None: ...
    def __call__(self, words: TextWords, text: str) -> tuple[Finding | None, str]: ...

class MinHash:
    def __init__(self, n: int, a: Sequence[int], b: Sequence[int]) -> None: ...
    def __call__(self, words: TextWords, lower: str) -> NDArray[np.int64]: ...
    def band_keys(self, words: TextWords, lower: str, rows: int) -> bytes: ...

class BenchmarkIndex:
    def __init__(self, n: int) -> None: ...
    def add(self, words: TextWords, lower: str, entry: int, least: int) -> tuple[int, int]: ...
    def forget_common(self, most: int) -> int: ...
    def find(self, words: TextWords, lower: str) -> list[tuple[int, int, str]]: ...

class FastTextModel:
    def __init__(self, path: str) -> None: ...
    @property
    def labels(self) -> list[str]: ...
    def best(self, text: str) -> tuple[str, float]: ...
    def score(self, text: str, label: int) -> float: ...

def unite(parents: NDArray[np.uint32], edges: NDArray[np.uint64]) -> None: ...
def find_roots(parents: NDArray[np.uint32]) -> None: ...
