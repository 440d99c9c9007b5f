"""Datasets of files that servers of this machine have, and how tests make their units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import TrainkitError
from trainkit.data.fetch.worker import work
from trainkit.data.sources import SOURCES, Shard, fetch_units
from trainkit.jobs.schema import Dataset, Tokenizer

TOKENIZER = Tokenizer(name="t", vocab_size=300)


WEB = SOURCES["web"]


def web(*urls: str, **words: Any) -> Dataset:
    return Dataset(**{"name": "d", "source": "web", "urls": urls, "tokenizer": TOKENIZER, **words})


def refused(dataset: Dataset, corpus: Path) -> TrainkitError:
    with pytest.raises(TrainkitError) as error:
        SOURCES[dataset.source].shards(dataset, corpus)
    assert error.value.exit == 6 and not corpus.exists()
    return error.value


def run(dataset: Dataset, corpus: Path) -> list[Shard]:
    """The units, as the stage runs them; in this process."""
    shards = SOURCES[dataset.source].shards(dataset, corpus)
    for unit in fetch_units(dataset, corpus, shards):
        work(json.loads(json.dumps(unit.spec)), lambda done, total: None)
        assert all(path.is_file() for path in unit.outputs)
    return shards
