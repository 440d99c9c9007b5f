from __future__ import annotations

import pytest

from trainkit.runs import checkpoints


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there is asked for again, as on a remote file system, but soon."""
    monkeypatch.setattr(checkpoints, "PAUSES", (0.01, 0.02))
