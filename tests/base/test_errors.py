"""Exit codes are a promise to scripts: none changes its number."""

from __future__ import annotations

import re
from pathlib import Path

from trainkit.base.errors import Exit

PROMISED = {
    "DONE": 0,
    "USAGE": 1,
    "BUG": 2,
    "CONFIG": 3,
    "PLAN": 4,
    "STAGE_STALE": 5,
    "STAGE_FAILED": 6,
    "HEALTH": 7,
    "START": 8,
    "RANK_USER": 9,
    "RANK_INFRA": 10,
    "HANG": 11,
    "PREEMPTED": 12,
    "CONTACT_LOST": 13,
    "NO_PROGRESS": 14,
    "CANCELLED": 15,
    "NO_CHECKPOINT": 16,
    "HOSTS_BUSY": 17,
    "NOT_KNOWN": 18,
    "INTERRUPTED": 130,
}


def test_they_are_as_promised() -> None:
    assert {code.name: int(code) for code in Exit} == PROMISED


def test_the_docs_have_each() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "run-folder.md").read_text()
    table = page.partition("## Exit codes")[2].partition("## ")[0]
    assert {int(code) for code in re.findall(r"\| (\d+) \|", table)} == {*Exit}
