"""The rules of Gopher and FineWeb on whole documents (csrc/index/curation)."""

from __future__ import annotations

from trainkit import _index
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.words import load_words
from trainkit.jobs.curation import FinewebStep, GopherQualityStep, GopherRepetitionStep

Rule = type[_index.GopherQuality | _index.GopherRepetition | _index.FinewebQuality]
Thresholds = GopherQualityStep | GopherRepetitionStep | FinewebStep


class RuleFilter:
    """Asks one compiled rule.

    Args:
        rule: which one.
        table: its thresholds.
        language: of words.
    """

    def __init__(self, rule: Rule, table: Thresholds, language: str) -> None:
        self._rule = rule(**table.model_dump(exclude={"step"}))
        self._words = load_words(language)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        found = self._rule(self._words, document.text)
        return None if found is None else Dropped(*found)
