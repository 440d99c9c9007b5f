"""One file that a server of this machine has, and how tests ask for it."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest

from tests.data.fetch_server import QUICK, Site
from trainkit.base.errors import TrainkitError
from trainkit.data.fetch.recipe import FetchRecipe
from trainkit.data.fetch.retry import RemoteFileInfo
from trainkit.data.fetch.worker import fetch

BODY = random.Random(5).randbytes(300_000)


SUM = hashlib.sha256(BODY).hexdigest()


NAME = "/train/00.jsonl.zst"


def quiet(done: int, total: int) -> None: ...


def of(
    site: Site, tmp_path: Path, known: RemoteFileInfo | None = None, **words: Any
) -> FetchRecipe:
    return FetchRecipe(f"{site.url}{NAME}", tmp_path / "corpus/00.jsonl.zst", known, **words)


def seen(site: Site) -> RemoteFileInfo:
    return RemoteFileInfo(len(BODY), site.etags.get(NAME, f'"{hashlib.md5(BODY).hexdigest()}"'))


def refused(asked: FetchRecipe, code: int = 6) -> TrainkitError:
    with pytest.raises(TrainkitError) as error:
        fetch(asked, quiet, QUICK)
    assert error.value.exit == code and not asked.path.exists()
    return error.value
