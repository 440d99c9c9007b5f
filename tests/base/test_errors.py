"""Exit codes are a promise to scripts: none changes its number. An error says all that is wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainkit.base.errors import (
    ConfigError,
    Exit,
    Problem,
    SourceLocation,
    TrainkitError,
    raise_problems,
)

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


def test_what_checks_find_is_raised_together() -> None:
    raise_problems(iter(()))
    found = [Problem("a is 1", SourceLocation("jobs.toml", 3), "set a"), Problem("b is missing")]
    with pytest.raises(ConfigError) as caught:
        raise_problems(iter(found), Exit.PLAN)
    assert caught.value.list == found and caught.value.exit == Exit.PLAN
    assert str(caught.value) == "jobs.toml:3: a is 1\n  set a\nb is missing"


def test_one_problem_reads_as_one_of_several() -> None:
    place = SourceLocation("jobs.toml")
    one = TrainkitError("no room", exit=Exit.START, hint="make some", place=place)
    several = ConfigError([Problem("no room", place, "make some")], exit=Exit.START)
    assert str(one) == str(several) == "jobs.toml: no room\n  make some"
    written = {"message": "no room", "hint": "make some", "file": "jobs.toml", "line": None}
    assert one.problems() == several.problems() == [written]
