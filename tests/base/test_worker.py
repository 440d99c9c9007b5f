"""A unit's words: what its error becomes where it was started."""

from __future__ import annotations

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation
from trainkit.base.worker import error_from_report


def test_an_error_comes_with_who_said_it_where_and_the_way_out() -> None:
    problems = [
        {"message": "is not JSON", "file": "a.jsonl", "line": 2},
        {"message": "the disk is full", "hint": "make room"},
    ]
    error = error_from_report({"problems": problems, "exit": 6}, "tokens-0 on node1: ")
    assert isinstance(error, ConfigError) and error.exit is Exit.STAGE_FAILED
    assert error.list == [
        Problem("tokens-0 on node1: is not JSON", SourceLocation("a.jsonl", 2)),
        Problem("tokens-0 on node1: the disk is full", None, "make room"),
    ]
