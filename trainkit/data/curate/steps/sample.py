"""step = "sample": each document none, one or several times, by its source or score."""

from __future__ import annotations

import json
import math

import xxhash

from trainkit.data.curate.contract import CrawledDocument, Dropped
from trainkit.data.text.documents import get_field
from trainkit.jobs.curation import SampleStep


class Sampler:
    """Draws by the document's key: the same documents whatever lies beside them."""

    def __init__(self, table: SampleStep, language: str) -> None:
        self._table = table

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        rate = self._rate(document)
        whole = math.floor(rate)
        draw = xxhash.xxh3_64_intdigest(document.key.to_bytes(8, "little"), self._table.seed)
        copies = whole + (draw < (rate - whole) * 2**64)
        if copies == 0:
            return Dropped("not_sampled", rate, 1.0)
        document.copies *= copies
        return None

    def _rate(self, document: CrawledDocument) -> float:
        value = get_field(document.fields, self._table.field) if self._table.field else None
        if value is not None and self._table.rates:  # as `drop` compares
            words = value if isinstance(value, str) else json.dumps(value, default=str)
            if words in self._table.rates:
                return self._table.rates[words]
        if isinstance(value, (int, float)):
            for floor, rate in self._table.scores:
                if value >= floor:
                    return rate
        return self._table.rate
