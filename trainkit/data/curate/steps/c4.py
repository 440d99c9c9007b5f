"""step = "c4": lines are taken out of a document, and documents that are then too short."""

from __future__ import annotations

from trainkit import _index
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.words import load_words
from trainkit.jobs.curation import C4Step


class C4Filter:
    """C4's rules (csrc/index/curation/web_rules.h)."""

    def __init__(self, table: C4Step, language: str) -> None:
        self._rule = _index.C4Quality(**table.model_dump(exclude={"step"}))
        self._words = load_words(language)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        found, kept = self._rule(self._words, document.text)
        if found is not None:
            return Dropped(*found)
        document.text = kept
        return None
