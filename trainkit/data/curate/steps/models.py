"""Steps that ask a fastText model: the language of a document, and scores of a model of one's
own."""

from __future__ import annotations

from functools import lru_cache

from trainkit import _index
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.curate.step_files import language_model
from trainkit.jobs.curation import LanguageStep, ScoreStep

PREFIX = "__label__"


@lru_cache(maxsize=4)
def _load(path: str) -> _index.FastTextModel:
    """The model. Raises ConfigError (exit 6) where it cannot be read."""
    try:
        model = _index.FastTextModel(path)
        len(model.labels)  # they are UTF-8
        return model
    except (RuntimeError, MemoryError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} cannot be read as a fastText model: {error}",
            exit=Exit.STAGE_FAILED,
            hint="give the .bin or .ftz file that fastText wrote for a supervised model",
        ) from None


class LanguageFilter:
    """step = "language"."""

    def __init__(self, table: LanguageStep, language: str) -> None:
        self._languages = frozenset(table.languages)
        self._least = table.min_score
        path = table.model or str(language_model())
        self._model = _load(path)
        known = [label.removeprefix(PREFIX) for label in self._model.labels]
        if unknown := sorted(self._languages.difference(known)):
            raise ConfigError(
                f"{path} knows no language {unknown[0]!r} (it has {', '.join(known[:10])}, ..)",
                exit=Exit.STAGE_FAILED,
                hint="set languages of the step to codes as the model writes them, such as en",
            )

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        label, probability = self._model.best(document.text)
        language = label.removeprefix(PREFIX)
        score = min(1.0, probability)
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
        known = self._model.labels
        if table.label not in known:
            raise ConfigError(
                f"{table.model} has no label {table.label!r} (it has {', '.join(known[:10])})",
                exit=Exit.STAGE_FAILED,
                hint="set label of the step to one of them",
            )
        self._label = known.index(table.label)

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        score = min(1.0, self._model.score(document.text, self._label))
        document.fields[self._table.field] = score
        if score < self._table.min_score:
            return Dropped("score", score, self._table.min_score)
        return None
