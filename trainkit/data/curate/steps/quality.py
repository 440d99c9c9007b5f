"""The rules of Gopher and FineWeb on whole documents (csrc/index/curation)."""

from __future__ import annotations

from trainkit import _index
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.words import load_words
from trainkit.jobs.curation import FinewebStep, GopherQualityStep, GopherRepetitionStep

Rule = _index.GopherQuality | _index.GopherRepetition | _index.FinewebQuality


class RuleFilter:
    """Asks one compiled rule.

    Args:
        rule: of the thresholds.
        language: of words.
    """

    def __init__(self, rule: Rule, language: str) -> None:
        self._rule = rule
        self._words = load_words(language)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        found = self._rule(self._words, document.text)
        return None if found is None else Dropped(*found)


class GopherFilter(RuleFilter):
    """step = "gopher-quality"."""

    def __init__(self, table: GopherQualityStep, language: str) -> None:
        super().__init__(_index.GopherQuality(**table.model_dump(exclude={"step"})), language)


class RepetitionFilter(RuleFilter):
    """step = "gopher-repetition"."""

    def __init__(self, table: GopherRepetitionStep, language: str) -> None:
        super().__init__(_index.GopherRepetition(**table.model_dump(exclude={"step"})), language)


class FinewebFilter(RuleFilter):
    """step = "fineweb"."""

    def __init__(self, table: FinewebStep, language: str) -> None:
        super().__init__(_index.FinewebQuality(**table.model_dump(exclude={"step"})), language)
