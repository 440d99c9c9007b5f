"""Words of a text, by spaCy's rules of a language: they need no model, and thresholds that others
published count these."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.characters import character_classes
from trainkit.data.curate.step_files import need_spacy


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
