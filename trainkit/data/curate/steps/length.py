"""step = "length": documents by their characters and words."""

from __future__ import annotations

from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.words import load_words
from trainkit.jobs.curation import LengthStep


class LengthFilter:
    """Leaves out what is too short or too long."""

    def __init__(self, table: LengthStep, language: str) -> None:
        self._table = table
        self._words = load_words(language) if table.min_words or table.max_words else None

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        table = self._table
        characters = len(document.text)
        if characters < table.min_characters:
            return Dropped("too_few_characters", characters, table.min_characters)
        if table.max_characters and characters > table.max_characters:
            return Dropped("too_many_characters", characters, table.max_characters)
        if self._words is None:
            return None
        words = self._words.count(document.text)
        if words < table.min_words:
            return Dropped("too_few_words", words, table.min_words)
        if table.max_words and words > table.max_words:
            return Dropped("too_many_words", words, table.max_words)
        return None
