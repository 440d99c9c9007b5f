"""Text to ids, in batches: one small contract, two encoders, what both of them together make,
and the one checked against the other.

The ids are those of Hugging Face's tokenizers, by whichever library. gigatoken makes the same,
many times faster, of every document without a code point that the two see differently
(trainkit/data/tokenize/proved.py); documents with one are encoded by tokenizers.

Special tokens that stand in a text, such as a literal <|endoftext|>, are ordinary text under
special_tokens = "text" (what tiktoken's encode_ordinary and nanoGPT do: no document can end
another), and the token itself under "parse" (what Megatron-LM and GPT-NeoX do). Added tokens
that are not special, such as GPT-NeoX-20B's runs of spaces, are always tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import orjson
from numpy.typing import DTypeLike, NDArray
from tokenizers import Tokenizer

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import install_command
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.data.tokenize.proved import differing_code_points, installed, unproved_reason
from trainkit.data.tokenizer import load_tokenizer, plain
from trainkit.data.unit_specs import EncoderKey, SpecialTokens

Ids = NDArray[np.unsignedinteger[Any]]
Lengths = NDArray[np.int64]
# of the first documents that are compared whole; of the rest of them the first CHECKED_START
CHECKED_BYTES = 2**20
CHECKED_START = 2**12
CHECKED_EVERY = 10_000  # one document in so many is compared later on, whole


class Encoder(Protocol):
    """Turns texts into ids, without end-of-document.

    `highest` is the highest id it can give.
    """

    @property
    def highest(self) -> int: ...

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
        """Ids of all texts (valid UTF-8), one after another [n], and how many each has
        [len(texts)]."""


class HuggingFaceEncoder:
    """Hugging Face's tokenizers: whatever a tokenizer.json can say, on one core at 2 to 3 MB/s."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: SpecialTokens) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.encode_special_tokens = special_tokens == "text"
        self.tokenizer.no_truncation()  # as a tokenizer.json made for inference may ask for
        self.tokenizer.no_padding()

    @property
    def highest(self) -> int:
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values(), default=0)

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
        encodings = self.tokenizer.encode_batch_fast(
            [str(text, "utf-8") for text in texts], add_special_tokens=False
        )
        parts = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        return np.concatenate(parts) if parts else np.empty(0, np.uint32), np.array(
            [len(part) for part in parts], np.int64
        )


class GigatokenEncoder:
    """gigatoken on the calling thread, the interpreter's lock released: byte-level BPE at 20 to
    100 times the speed of `HuggingFaceEncoder`.

    It always parses special tokens that it knows of; to have them as text it is given a
    tokenizer.json without them. Its own readers of files, which drop bad lines without a word,
    are not used.
    """

    def __init__(self, path: Path, special_tokens: SpecialTokens) -> None:
        try:
            import gigatoken
        except ImportError:
            raise ConfigError(
                'encoder = "gigatoken" needs gigatoken, which is not installed',
                exit=Exit.STAGE_FAILED,
                hint=f'{install_command()}\n  or set tokenizers.X.encoder = "tokenizers"',
            ) from None
        content = path.read_bytes()
        try:
            if special_tokens == "text":
                value = orjson.loads(content)
                value["added_tokens"] = [
                    token for token in value.get("added_tokens") or [] if not token.get("special")
                ]
                content = orjson.dumps(value)
            self._tokenizer = gigatoken.Tokenizer.from_json(content)
        except Exception as error:  # whatever the library makes of a model it does not have
            raise ConfigError(
                f"gigatoken cannot use {path}: {plain(error)}",
                exit=Exit.STAGE_FAILED,
                hint='set tokenizers.X.encoder = "tokenizers"',
            ) from None

    @property
    def highest(self) -> int:
        return int(self._tokenizer.vocab_size) - 1

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
        if not texts:
            return np.empty(0, np.uint32), np.empty(0, np.int64)
        layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data)
        ids = np.asarray(layout.content.data)
        return ids[offsets[0] : offsets[-1]], np.diff(offsets)


class HybridEncoder:
    """Ids of `fast`, but for texts with a code point of `ranges`: those are encoded by `exact`.

    Attributes:
        passed_on: texts that `exact` has encoded so far.
    """

    def __init__(self, fast: Encoder, exact: Encoder, ranges: Sequence[tuple[int, int]]) -> None:
        self.fast = fast
        self.exact = exact
        self.passed_on = 0
        self._points = _index.CodePoints(ranges)

    @property
    def highest(self) -> int:
        return max(self.fast.highest, self.exact.highest)

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
        found = self._points.within(list(texts))
        if not found:
            return self.fast.encode(texts)
        self.passed_on += len(found)
        theirs = set(found)
        ids, lengths = self.fast.encode(
            [b"" if number in theirs else text for number, text in enumerate(texts)]
        )
        starts = np.cumsum(lengths) - lengths
        parts = list[Ids]()
        done = 0
        for number in found:
            own, _ = self.exact.encode([texts[number]])
            start = int(starts[number])
            parts += [ids[done:start], own]
            lengths[number] = len(own)
            done = start
        return np.concatenate([*parts, ids[done:]]), lengths


class EncoderMismatch(Exception):
    """Two encoders disagree about text number `index` of a batch."""

    def __init__(self, index: int, words: str) -> None:
        super().__init__(words)
        self.index = index
        self.words = words


class CheckedEncoder:
    """An encoder whose ids are compared with another's: for the first texts, and for one in
    CHECKED_EVERY after that.

    Args:
        fast: gives the ids.
        exact: is asked as well.
        first: of how many texts from the start all are compared: whole while they have
            CHECKED_BYTES together, then the start of each.
        offset: which of CHECKED_EVERY texts is compared; other shards should have others.

    Attributes:
        compared: texts so far.
    """

    def __init__(self, fast: Encoder, exact: Encoder, first: int, offset: int) -> None:
        self.fast = fast
        self.exact = exact
        self.first = first
        self.offset = offset % CHECKED_EVERY
        self.seen = self.compared = self._bytes = 0

    @property
    def highest(self) -> int:
        return self.fast.highest

    def encode(self, texts: Sequence[bytes]) -> tuple[Ids, Lengths]:
        """As `Encoder`. Raises EncoderMismatch."""
        ids, lengths = self.fast.encode(texts)
        for index in self._chosen(len(texts)):
            # later documents are few: each by itself
            before = self._bytes if self.seen + index < self.first else 0
            # tokenizers takes 100 bytes of memory a byte
            whole = before + len(texts[index]) <= CHECKED_BYTES
            if whole:
                start = int(lengths[:index].sum())
                given = ids[start : start + int(lengths[index])]
                text = texts[index]
                self._bytes = before + len(text)
            else:
                text = texts[index][:CHECKED_START].decode("utf-8", "ignore").encode()
                given = self.fast.encode([text])[0]
            self._compare(index, text, given)
        self.seen += len(texts)
        return ids, lengths

    def _chosen(self, count: int) -> list[int]:
        first = list(range(max(0, min(count, self.first - self.seen))))
        later = range((self.offset - self.seen) % CHECKED_EVERY, count, CHECKED_EVERY)
        return sorted({*first, *later})

    def _compare(self, index: int, text: bytes, given: Ids) -> None:
        expected, _ = self.exact.encode([text])
        self.compared += 1
        if np.array_equal(expected, given):
            return
        most = min(len(expected), len(given))
        if not np.array_equal(expected[:most], given[:most]):
            at = int(np.argmax(expected[:most] != given[:most]))
        else:
            at = most
        raise EncoderMismatch(
            index,
            f"id {at} is {given[at : at + 4].tolist()}, not {expected[at : at + 4].tolist()}"
            f" ({len(given):,} ids and {len(expected):,})",
        )


@dataclass(frozen=True)
class EncoderChoice:
    """What encodes, and why: `name` is "gigatoken" or "tokenizers"."""

    name: str
    because: str

    def __str__(self) -> str:
        return f"{self.name}, because {self.because}"


def choose_encoder(path: Path, key: EncoderKey, special_tokens: SpecialTokens) -> EncoderChoice:
    """What encodes for the tokenizer.json at `path`, by the key `encoder` of its table.

    Raises ConfigError (exit 6): gigatoken is asked for, and is not proved to give the ids of
    tokenizers for this file.
    """
    if key == "tokenizers":
        return EncoderChoice("tokenizers", "tokenizers.X.encoder asks for it")
    why_not = unproved_reason(orjson.loads(path.read_bytes()), special_tokens)
    if why_not is None:
        versions = " and ".join(f"{name} {version}" for name, version in installed().items())
        return EncoderChoice(
            "gigatoken", f"it is proved to give the same ids: {versions} were compared"
        )
    if key == "gigatoken" and not why_not.endswith("is not installed"):
        raise ConfigError(
            f"gigatoken is not proved to give the ids of {path}: {why_not}",
            exit=Exit.STAGE_FAILED,
            hint=(
                'set tokenizers.X.encoder = "auto" (gigatoken where it is proved, else'
                " tokenizers) or"
                ' "tokenizers"'
            ),
        )
    return EncoderChoice("gigatoken" if key == "gigatoken" else "tokenizers", why_not)


class EncoderCache:
    """Encoders by tokenizer.json, each loaded once: a process may write thousands of small
    shards."""

    def __init__(self) -> None:
        self._loaded: dict[
            tuple[Path, str, str],
            tuple[
                EncoderChoice,
                HuggingFaceEncoder,
                GigatokenEncoder | None,
                Sequence[tuple[int, int]],
            ],
        ] = {}

    def get(
        self, path: Path, key: EncoderKey, special_tokens: SpecialTokens, *, first: int, offset: int
    ) -> tuple[Tokenizer, Encoder, EncoderChoice]:
        """(the tokenizer.json at `path`, its encoder, which one that is); gigatoken's ids are
        checked besides (see `CheckedEncoder`).

        Raises ConfigError (exit 6): see `load_tokenizer` and `choose_encoder`; gigatoken is
        required and not installed, or cannot use the file.
        """
        wanted = (path, key, special_tokens)
        if wanted not in self._loaded:
            exact = HuggingFaceEncoder(load_tokenizer(path), special_tokens)
            choice = choose_encoder(path, key, special_tokens)
            fast = None if choice.name == "tokenizers" else GigatokenEncoder(path, special_tokens)
            self._loaded[wanted] = (
                choice,
                exact,
                fast,
                () if fast is None else differing_code_points(orjson.loads(path.read_bytes())),
            )
        choice, exact, fast, ranges = self._loaded[wanted]
        if fast is None:
            return exact.tokenizer, exact, choice
        return (
            exact.tokenizer,
            CheckedEncoder(HybridEncoder(fast, exact, ranges), exact, first, offset),
            choice,
        )


def with_eod(
    ids: Ids, lengths: Lengths, sequences: Lengths | None, eod: int | None, dtype: DTypeLike
) -> tuple[NDArray[Any], Lengths]:
    """Put the end-of-document id behind the last token of each document that has any, as
    Megatron's preprocess_data.py.

    Args:
        ids: of all sequences, [n]; each fits `dtype`.
        lengths: of the sequences.
        sequences: of each document; None: one each.
        eod: the id; None: nothing is put in.

    Returns (ids in `dtype`, lengths).
    """
    if eod is None or not len(ids):
        return ids.astype(dtype), lengths
    ends = np.flatnonzero(lengths)  # sequences with tokens
    if sequences is not None:
        document = np.repeat(np.arange(len(sequences)), sequences)[ends]
        # the last such of each document
        ends = ends[np.append(document[1:] != document[:-1], True)]
    longer = lengths.copy()
    longer[ends] += 1
    out = np.empty(len(ids) + len(ends), dtype)
    _index.interleave(
        np.ascontiguousarray(ids, np.uint32), np.cumsum(lengths, dtype=np.int64)[ends], eod, out
    )
    return out, longer
