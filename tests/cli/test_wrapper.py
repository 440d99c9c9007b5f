"""What a task's function is told of how it was called."""

from __future__ import annotations

import pytest
from invoke.config import Config
from invoke.context import Context

from trainkit.cli.wrapper import TaskContext, make_task


@pytest.mark.parametrize(
    ("takes", "typed", "of_invoke", "expected"),
    [
        (False, None, False, False),
        (False, None, True, False),
        (True, False, False, False),
        (True, True, False, True),
        (True, False, True, True),
    ],
)
def test_dry_runs(takes: bool, typed: bool | None, of_invoke: bool, expected: bool) -> None:
    """By the task's own --dry-run or by `invoke --dry`, where the task takes it; else never."""
    told: list[bool] = []

    def body(task: TaskContext) -> None:
        told.append(task.dry_run)

    words = {} if typed is None else {"dry_run": typed}
    make_task(takes_dry_run=takes)(body)(
        Context(Config(overrides={"run": {"dry": of_invoke}})), **words
    )
    assert told == [expected]
