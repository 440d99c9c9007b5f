from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.fetch_server import QUICK, Site, serve
from trainkit.data.fetch.retry import DEFAULT_RETRY
from trainkit.data.sources import SOURCES


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of these tests answer at once, or never."""
    for name in ("web", "indexed"):  # those that ask servers
        words = type(SOURCES[name]).shards.__kwdefaults__ or {}
        assert words["retry"] is DEFAULT_RETRY
        monkeypatch.setitem(words, "retry", QUICK)


@pytest.fixture
def site() -> Iterator[Site]:
    with serve({f"/train/{i:02d}.jsonl.zst": bytes([i]) * (i + 1) for i in range(30)}) as site:
        yield site
