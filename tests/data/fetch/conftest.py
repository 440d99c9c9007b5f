from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.data.fetch.served_file import BODY, NAME
from tests.data.fetch_server import Site, serve


@pytest.fixture
def site() -> Iterator[Site]:
    with serve({NAME: BODY}) as site:
        yield site
