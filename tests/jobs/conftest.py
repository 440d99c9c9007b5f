"""The fixture of the tests of trainkit.jobs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout
from trainkit.jobs.load import Jobs, load


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """Write a jobs.toml (and jobs.local.toml) and load it."""

    def make(text: str = GOOD, local: str = "", environ: Mapping[str, str] | None = None) -> Jobs:
        (tmp_path / "jobs.toml").write_text(text, encoding="utf-8")
        if local:
            (tmp_path / "jobs.local.toml").write_text(local, encoding="utf-8")
        return load(tmp_path, environ or {})

    return make
