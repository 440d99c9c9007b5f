"""What the headers of a file's answer say of the whole file."""

from __future__ import annotations

import httpx2
import pytest

from trainkit.data.fetch.http import _seen


@pytest.mark.parametrize(
    ("code", "headers", "size"),
    [
        (200, {"content-length": "12"}, 12),
        (200, {}, None),
        (206, {"content-length": "4", "content-range": "bytes 0-3/12"}, 12),
        (206, {"content-length": "4", "content-range": "bytes 0-3/*"}, None),
        (206, {"content-length": "4"}, None),
        (200, {"content-length": "4", "x-linked-size": "12"}, 12),
    ],
)
def test_the_size_is_the_whole_files(code: int, headers: dict[str, str], size: int | None) -> None:
    assert _seen(httpx2.Response(code, headers=headers)).size == size
