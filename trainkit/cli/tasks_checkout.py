"""The tasks of trainkit's own checkout: test, bench."""

from __future__ import annotations

from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    iterable=["path"],
    help={
        "path": "only this file, folder or test of the checkout; `test PATH` is the same",
        "slow": "the slow tests too, and more examples of each property",
        "k": "pytest's -k: only tests whose names match",
        "last-failed": "only what failed the last time",
        "no-lint": "no ruff and no mypy before pytest; nor are they run for a part of the tests",
    },
)
def test(
    task: TaskContext,
    path: list[str] | None = None,
    slow: bool = False,
    k: str = "",
    last_failed: bool = False,
    no_lint: bool = False,
) -> None:
    """Run ruff, the type checker and the tests of this checkout."""
    from trainkit.cli.checkout import test as project

    project.test(path or [], slow=slow, k=k, last_failed=last_failed, lint=not no_lint)


@make_task(
    help={
        "name": "only benchmarks/NAME.py",
        "list": "say which there are and what they claim",
        "quick": "what can be done in a minute",
        "device": "what the benchmarks that know several run on: cpu or cuda",
    },
    takes_json=True,
)
def bench(
    task: TaskContext, name: str = "", list: bool = False, quick: bool = False, device: str = ""
) -> TaskResult:
    """Measure trainkit beside its peers (in .venv-bench, made at the first use)."""
    from trainkit.cli.checkout import bench as runner

    return runner.bench(task, name, listing=list, quick=quick, device=device)
