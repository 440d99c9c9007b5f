"""What `cancel` says of a host, with and without a proof that nothing is left there."""

from __future__ import annotations

from typing import Any

import pytest

from trainkit.cli.run.attach import leftovers_line
from trainkit.experiment.cancel import HostLeftovers

ASKED: dict[str, Any] = {"host": "n1", "answered": True, "error": None, "left": [], "killed": 0}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({}, "nothing"),  # the agents' own word at the end of an attempt
        ({"proof": "cgroup"}, "nothing"),
        ({"proof": "cgroup", "killed": 2}, "nothing (2 ended just now)"),
        ({"proof": None}, "nothing that can be seen (no cgroup there: see `doctor`)"),
        (
            {"proof": None, "killed": 1},
            "nothing that can be seen (no cgroup there: see `doctor`) (1 ended just now)",
        ),
        ({"proof": None, "left": [{"pid": 7, "argv0": "python"}]}, "pid 7 python"),
        ({"answered": False}, "did not answer; what is left there is not known"),
        ({"answered": False, "error": "timed out"}, "did not answer: timed out"),
    ],
)
def test_nothing_is_said_only_as_far_as_it_is_proved(row: dict[str, Any], said: str) -> None:
    assert leftovers_line(HostLeftovers(**{**ASKED, **row})) == said
