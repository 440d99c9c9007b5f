"""Compares gigatoken and tokenizers code point by code point, and writes
trainkit/data/tokenize/proved_table.py: `python -m tests.data.encoder_proof`.

Classes: a tokenizer whose merges join a character of a known class with any byte beside it shows
whether both stand in one word; that is asked of every code point, before and behind a letter, a
number, a sign, a space and a newline, for each kind of tokenizer that `proved` allows. Normal
form: every code point by itself, beside a mark of each combining class that is old enough for
both (order), and beside every code point of its block (composition; by Unicode's stability
policy one that one table has and another has not involves a new code point, and such stand
together).

It takes seven minutes of one processor.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers

from trainkit.data.tokenize import proved, proved_table

Ranges = tuple[tuple[int, int], ...]
SEPARATOR = "<|separator|>"
CLASSES = ("a", "1", "!", " ", "\n")
# in other planes nothing has a class of its own
ASSIGNED = (*range(0x80, 0xD800), *range(0xE000, 0x40000), *range(0xE0000, 0xF0000))
EVERY = (*range(0x80, 0xD800), *range(0xE000, 0x110000))
AT_ONCE = 4096  # contexts in one text
BLOCK = 128  # a script's code points stand within

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
KINDS: dict[str, Any] = {"gpt2": {**BYTE_LEVEL, "use_regex": True}}
for _name, _pattern in proved.PATTERNS.items():
    _split = {
        "type": "Split",
        "pattern": {"Regex": _pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    KINDS[_name] = {
        "type": "Sequence",
        "pretokenizers": [_split, {**BYTE_LEVEL, "use_regex": False}],
    }


def tokenizer_json(
    kind: Any,
    merges: Iterable[tuple[str, str]] = (),
    normalizer: Any = None,
    added: Sequence[dict[str, Any]] = (),
    **model: Any,
) -> bytes:
    """A byte-level BPE with these merges of characters; ids are bytes, then merges in order,
    then SEPARATOR."""
    vocab = {character: byte for byte, character in enumerate(proved.byte_characters())}
    pairs = list(merges)
    for pair in pairs:
        vocab.setdefault("".join(pair), len(vocab))
    separator = {
        "id": len(vocab),
        "special": True,
        "content": SEPARATOR,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
    }
    plain = dict.fromkeys(
        ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    )
    words = {
        "type": "BPE",
        **plain,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [list(p) for p in pairs],
    }
    steps = {
        "normalizer": normalizer,
        "pre_tokenizer": kind,
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
    }
    value = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [separator, *added],
        **steps,
        "model": {**words, **model},
    }
    return json.dumps(value).encode()


def encoders(content: bytes) -> tuple[Callable[[str], NDArray[Any]], Callable[[str], NDArray[Any]]]:
    """One text's ids by (tokenizers, gigatoken); special tokens are parsed."""
    import gigatoken

    slow, fast = Tokenizer.from_str(content.decode()), gigatoken.Tokenizer.from_json(content)

    def by_gigatoken(text: str) -> NDArray[Any]:
        return np.asarray(
            fast.encode_batch([text.encode()], parallel=False).layout.content.data
        ).astype(np.int64)

    def by_tokenizers(text: str) -> NDArray[Any]:
        # `encode` would find offsets too
        return np.array(slow.encode_batch_fast([text], add_special_tokens=False)[0].ids, np.int64)

    return by_tokenizers, by_gigatoken


def classes(kind: str, points: Sequence[int], contexts: Sequence[str] = CLASSES) -> set[int]:
    """The code points that the two put into different classes."""
    characters = proved.byte_characters()
    merges = dict.fromkeys(
        p
        for c in contexts
        for b in characters
        for p in ((characters[ord(c)], b), (b, characters[ord(c)]))
    )
    slow, fast = encoders(tokenizer_json(KINDS[kind], merges))
    found: set[int] = set()
    for context in contexts:
        for before in (True, False):
            for start in range(0, len(points), AT_ONCE):
                block = points[start : start + AT_ONCE]
                text = SEPARATOR.join(
                    chr(p) + context if before else context + chr(p) for p in block
                )
                theirs, ours = slow(text), fast(text)
                if not np.array_equal(theirs, ours):
                    separator = 256 + len(merges) - _repeated(merges)
                    pairs = zip(_cut(theirs, separator), _cut(ours, separator), block, strict=True)
                    found |= {point for a, b, point in pairs if not np.array_equal(a, b)}
    return found


def _repeated(merges: Iterable[tuple[str, str]]) -> int:
    joined = ["".join(pair) for pair in merges]
    return len(joined) - len(set(joined))


def _cut(ids: NDArray[Any], separator: int) -> list[NDArray[Any]]:
    return np.split(ids, np.flatnonzero(ids == separator))


class NormalForms:
    """NFC by both, of many short texts at once."""

    def __init__(self) -> None:
        self._theirs = normalizers.NFC()
        self._ours = encoders(tokenizer_json(KINDS["gpt2"], normalizer={"type": "NFC"}))[1]

    def differ(self, texts: Sequence[str]) -> list[int]:
        """Numbers of the texts, none of which has a newline, of which the two make different
        ones."""
        joined = "\n".join(texts)
        theirs, ours = (
            self._theirs.normalize_str(joined),
            self._ours(joined).astype(np.uint8).tobytes().decode(),
        )
        if theirs == ours:
            return []
        return [
            i
            for i, (a, b) in enumerate(zip(theirs.split("\n"), ours.split("\n"), strict=True))
            if a != b
        ]


def old_marks() -> list[str]:
    """A mark of each combining class that has been there since Unicode 3.2."""
    marks: dict[int, str] = {}
    for point in ASSIGNED:
        if order := unicodedata.ucd_3_2_0.combining(chr(point)):
            marks.setdefault(order, chr(point))
    return list(marks.values())


def order_differs(forms: NormalForms, points: Sequence[int]) -> set[int]:
    """Code points that stand elsewhere among marks; or are another by themselves."""
    found: set[int] = set()
    for mark in ("", *old_marks()):
        for start in range(0, len(points), AT_ONCE):
            block = points[start : start + AT_ONCE]
            texts = [f"a{mark}{chr(p)}a" for p in block] + [f"a{chr(p)}{mark}a" for p in block]
            found |= {block[i % len(block)] for i in forms.differ(texts)}
    return found


def composition_differs(forms: NormalForms, known: set[int]) -> set[int]:
    """The second of each pair that one composes and the other does not; of pairs with none that
    is `known`."""
    found: set[int] = set()
    for start in range(0x80, 0x40000, BLOCK):
        block = [p for p in range(start, start + BLOCK) if not 0xD800 <= p < 0xE000]
        pairs = [(a, b) for a in block for b in block]
        found |= {
            pairs[i][1]
            for i in forms.differ([chr(a) + chr(b) for a, b in pairs])
            if not known & {*pairs[i]}
        }
    return found


def ranges(points: Iterable[int]) -> Ranges:
    """Inclusive ranges."""
    found: list[tuple[int, int]] = []
    for point in sorted(points):
        if found and found[-1][1] == point - 1:
            found[-1] = (found[-1][0], point)
        else:
            found.append((point, point))
    return tuple(found)


def compare(say: Callable[[str], None] = lambda words: None) -> tuple[Ranges, Ranges]:
    """(classes, normal forms): what the table has to hold for the versions that are installed."""
    by_kind = {}
    for kind in KINDS:
        by_kind[kind] = classes(kind, EVERY)
        say(f"{kind}: {len(by_kind[kind]):,} code points are put into different classes")
    forms = NormalForms()
    order = order_differs(forms, ASSIGNED)
    say(f"NFC: of {len(order):,} code points the place among marks differs")
    composed = composition_differs(forms, order)
    say(f"NFC: with {len(composed):,} more something is composed by one alone")
    return ranges(set().union(*by_kind.values())), ranges(order | composed)


def table(versions: dict[str, tuple[str, ...]], class_ranges: Ranges, form_ranges: Ranges) -> str:
    """The text of proved_table.py."""

    def rows(values: Ranges) -> Iterator[str]:
        # one a line, as ruff leaves them
        yield from (f"    (0x{low:04X}, 0x{high:04X})," for low, high in values)

    lines = [
        '"""Code points of which gigatoken and tokenizers differ, as inclusive ranges: made by',
        'tests/data/encoder_proof.py, not by hand."""',
        "",
    ]
    lines += [
        "# versions that were compared, with this result",
        "VERSIONS: dict[str, tuple[str, ...]] = {",
    ]
    lines += [
        f'    "{name}": ({", ".join(json.dumps(version) for version in found)},),'
        for name, found in versions.items()
    ]
    lines += [
        "}",
        "# classes: letter, number, space, other",
        "CLASSES: tuple[tuple[int, int], ...] = (",
        *rows(class_ranges),
        ")",
    ]
    lines += [
        "# normal form C: the place among marks, and what is composed",
        "NFC: tuple[tuple[int, int], ...] = (",
        *rows(form_ranges),
        ")",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Compare, and write the table; versions that gave the same before stay in it."""
    class_ranges, form_ranges = compare(lambda words: print(words, flush=True))
    now = {name: str(version) for name, version in proved.installed().items()}
    same = (class_ranges, form_ranges) == (proved_table.CLASSES, proved_table.NFC)
    before = proved_table.VERSIONS if same else {}
    versions = {
        name: tuple(sorted({*before.get(name, ()), version})) for name, version in now.items()
    }
    Path(proved_table.__file__).write_text(table(versions, class_ranges, form_ranges))
    print("the table is the same" if same else "the table has changed", file=sys.stderr)


if __name__ == "__main__":
    main()
