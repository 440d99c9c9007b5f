from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.fake_supervisor import Session


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path, grace=0.5)
    yield session
    session.close()
