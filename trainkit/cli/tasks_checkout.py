"""The tasks of trainkit's own checkout: test, bench, docs."""

from __future__ import annotations

from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    help={
        "path": "only this file, folder or test; `test PATH` is the same",
        "slow": "run the slow tests too, with more examples of each property",
        "gpu": "only the tests that need a GPU",
        "k": "pytest's -k: only tests whose names match",
        "last-failed": "only tests that failed the last time",
        "torch": "run tests/train, tests/ops or PATH with this release of torch, as 2.15, in"
        " .venv-torch-2.15",
        "no-lint": "skip ruff and mypy (skipped anyway if only some tests run)",
    },
)
def test(
    task: TaskContext,
    path: tuple[str, ...] = (),
    slow: bool = False,
    gpu: bool = False,
    k: str = "",
    last_failed: bool = False,
    torch: str = "",
    no_lint: bool = False,
) -> None:
    """Run ruff, mypy and the tests of this checkout."""
    from trainkit.cli.checkout.test import test as run

    lint = not no_lint
    run(path, slow=slow, gpu=gpu, k=k, last_failed=last_failed, torch=torch, lint=lint)


@make_task(
    help={
        "name": "only benchmarks/NAME.py",
        "list": "list the benchmarks and what they claim",
        "quick": "only what takes a minute",
        "device": "device for benchmarks that support several: cpu or cuda",
    },
    takes_json=True,
)
def bench(
    task: TaskContext, name: str = "", list: bool = False, quick: bool = False, device: str = ""
) -> TaskResult:
    """Run the benchmarks of this checkout, trainkit beside its peers.

    The peers are installed into .venv-bench at the first use. Exit 6 if a benchmark fails.
    """
    from trainkit.cli.checkout.bench import bench as run

    return run(task, name, list_only=list, quick=quick, device=device)


@make_task(
    help={"output": "folder to write (default: site/ of the checkout)"},
    takes_json=True,
)
def docs(task: TaskContext, output: str = "") -> TaskResult:
    """Build the documentation of this checkout as a website (needs the extra `docs`)."""
    from trainkit.cli.checkout.docs import docs as run

    return run(task, output)
