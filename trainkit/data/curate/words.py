"""Words of a text, by spaCy's rules of a language: they need no model, and thresholds that others
published count these; and what rules ask of a code point, worked out once a process from Python's
own Unicode."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.step_files import need_spacy

# what csrc/index/curation/characters.h calls them
SPACE, ALPHA, LINE_BREAK, DECIMAL, PUNCTUATION, BLANK, SYMBOL, TERMINAL, SENTENCE_END = (
    1 << bit for bit in range(9)
)
# datatrove's PUNCTUATION (utils/text.py), after CCNet: what is a space when texts are compared
BLANKS = (
    "!/—”:％１〈&(、━\\【#%「」，】；+^]~“《„';’{|∶´[=-`*．（–？！：$～«〉,><》)?）。…@_.\"}►»"
    + "".join(map(chr, (*range(9), *range(11, 32), *range(127, 160))))
)
# datatrove's TERMINAL_PUNCTUATION: the characters of spaCy's sentencizer and these
FURTHER_TERMINALS = "".join(
    map(
        chr,
        (
            *(0x61D, 0x61E, 0x837, 0x839, 0x83D, 0x83E, 0x17D4, 0x17D5, 0x17D6, 0x17D9, 0x17DA),
            *(0x1B7D, 0x1B7E, 0x2E53, 0x2E54, 0x11944, 0x11946, 0x11EF7, 0x11EF8),
            *(0x11F43, 0x11F44, 0x16E98, *range(0x10F55, 0x10F5A), *range(0x10F86, 0x10F8A)),
        ),
    )
)
POINTS = 0x110000


@lru_cache(maxsize=1)
def _unicode() -> tuple[NDArray[np.uint16], list[tuple[int, str]]]:
    flags = np.zeros(POINTS, np.uint16)
    folds = []
    categories = {"Nd": DECIMAL}
    for point in range(POINTS):
        category = unicodedata.category(character := chr(point))
        if category in ("Cn", "Co", "Cs"):
            continue
        flag = categories.get(category, PUNCTUATION if category[0] == "P" else 0)
        flag |= SPACE * character.isspace() | ALPHA * (category[0] == "L")
        flags[point] = flag
        if point >= 0x80 and (category == "Mn" or unicodedata.decomposition(character)):
            plain = _without_marks(character)
            if plain != character:
                folds.append((point, plain))
    # Hangul syllables decompose by rule (Unicode 3.12), of which no table is kept
    folds += [(point, _without_marks(chr(point))) for point in range(0xAC00, 0xD7A4)]
    for point in (*range(10, 14), 0x1C, 0x1D, 0x1E, 0x85, 0x2028, 0x2029):
        flags[point] |= LINE_BREAK
    return flags, folds


def _without_marks(character: str) -> str:
    return "".join(
        each
        for each in unicodedata.normalize("NFD", character)
        if unicodedata.category(each) != "Mn"
    )


def character_classes(sentence_ends: str) -> tuple[NDArray[np.uint16], list[tuple[int, str]]]:
    """The arguments of `_index.TextWords`.

    Args:
        sentence_ends: characters that end a sentence.

    Returns:
        flags of each code point, uint16 [0x110000], and what `simplify` writes for those that it
        changes.
    """
    flags, folds = _unicode()
    flags = flags.copy()
    for flag, characters in (
        (BLANK, BLANKS),
        (TERMINAL, sentence_ends + FURTHER_TERMINALS),
        (SYMBOL, BLANKS + sentence_ends + FURTHER_TERMINALS),
        (SENTENCE_END, sentence_ends),
    ):
        flags[[ord(character) for character in characters]] |= flag
    return flags, folds


@lru_cache(maxsize=2)
def load_words(language: str) -> _index.TextWords:
    """What splits texts into words.

    Raises MissingExtra (exit 6) without spaCy; ConfigError (exit 6) for a language whose rules
    need more than spaCy itself.
    """
    need_spacy()
    import spacy
    from spacy.pipeline import Sentencizer

    try:
        pipeline: Any = spacy.blank(language)
        tokenizer = pipeline.tokenizer
        rules = [rule for rule in tokenizer.rules if rule.split() == [rule]]
        pipeline.vocab.lex_attr_getters = {}  # what a word looks like is not asked
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"datasets.X.curate.words = {language!r}: {error}",
            exit=Exit.STAGE_FAILED,
            hint="name a language whose words spaCy finds by rules, such as en, de or fr",
        ) from None

    def split(pieces: Sequence[str]) -> list[list[int]]:
        with pipeline.memory_zone():  # else its vocabulary holds every word ever seen
            return [[len(word.text.encode()) for word in tokenizer(piece)] for piece in pieces]

    flags, folds = character_classes("".join(Sentencizer.default_punct_chars))
    return _index.TextWords(flags, folds, rules, split, language == "en")
