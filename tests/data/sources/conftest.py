from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.fetch_server import QUICK, Site, serve
from trainkit.data.sources.listing import list_files


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests answer at once, or never."""
    assert list_files.__defaults__ is not None
    monkeypatch.setattr(list_files, "__defaults__", (QUICK,))


@pytest.fixture
def site() -> Iterator[Site]:
    with serve({f"/train/{i:02d}.jsonl.zst": bytes([i]) * (i + 1) for i in range(30)}) as site:
        yield site
