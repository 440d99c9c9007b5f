"""Suspected hosts are left out for a while."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.launch.hosts.quarantine import end_quarantine, quarantine_host, read_quarantine


def test_a_suspected_host_is_out_for_a_while(tmp_path: Path) -> None:
    assert read_quarantine(tmp_path) == {}
    entry = quarantine_host(tmp_path, "Node3", "Xid 79 on GPU 2", "20260101-000000-aaaa", 3600)
    quarantine_host(tmp_path, "fd00::1%eth0", "it fell silent", "20260101-000000-aaaa", 60)
    assert read_quarantine(tmp_path)["node3"] == entry and (entry.host, entry.why) == (
        "node3",
        "Xid 79 on GPU 2",
    )
    now = datetime.datetime.now(datetime.UTC)
    assert list(read_quarantine(tmp_path, now + datetime.timedelta(minutes=5))) == ["node3"]
    assert read_quarantine(tmp_path, now + datetime.timedelta(hours=2)) == {}
    assert end_quarantine(tmp_path, "NODE3") and not end_quarantine(tmp_path, "node3")
    assert list(read_quarantine(tmp_path)) == ["fd00::1%eth0"]


def test_suspected_again_it_stays_out_longer(tmp_path: Path) -> None:
    first, second = (
        quarantine_host(tmp_path, "a", why, "r", seconds)
        for why, seconds in (("one", 10), ("two", 1000))
    )
    assert read_quarantine(tmp_path)["a"] == second != first


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        '{"schema": "quarantine/1"}',
        '{"schema": "quarantine/1", "host": "a", "since": "x", "until": "y", "why": "", "run": ""}',
    ],
)
def test_a_file_of_another_kind_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "quarantine").mkdir()
    (tmp_path / "quarantine/a.json").write_text(text)
    with pytest.raises(ConfigError, match=r"quarantine/a\.json"):
        read_quarantine(tmp_path)
