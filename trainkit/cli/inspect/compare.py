"""The task `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.scheduler_registry import current
from trainkit.reports.compare import Comparison, Difference, compare_runs, numbers_of
from trainkit.reports.compare_page import comparison_page, names_of
from trainkit.reports.page import clip
from trainkit.reports.read import read_report
from trainkit.runs.find import find_run
from trainkit.runs.record import read_run_record


def compare(task: TaskContext, run_names: list[str], html: str) -> TaskResult:
    """The task `compare`.

    Args:
        task: how it was called.
        run_names: two runs or more; the others are compared with the first.
        html: the file to write the comparison into; "": none.

    Raises:
        ConfigError: fewer than two different runs, no such run, or another ending than .html.
    """
    if html and Path(html).suffix not in (".html", ".htm"):
        raise ConfigError(f"{html} does not end in .html")
    roots = load_jobs(task).roots()
    runs = list({run.path: run for run in (find_run(roots, name) for name in run_names)}.values())
    if len(runs) < 2:
        raise ConfigError(
            f"{' '.join(run_names) or 'nothing'} is not two runs", hint="compare RUN OTHER"
        )
    comparison = compare_runs([read_report(run, current(read_run_record(run))) for run in runs])
    if html:
        write_text(Path(html), comparison_page(comparison))
        task.say(f"wrote {html}")
    return TaskResult(comparison.to_json(), page=_page(comparison))


def _page(comparison: Comparison) -> Page:
    names = [escape(name) for name in names_of(comparison)]
    numbers = numbers_of(comparison.reports)
    yield Listing("", *names, rows=((what, *map(escape, values)) for what, values in numbers))
    for title, found in (
        ("configuration", comparison.configuration),
        ("code and versions", comparison.software),
    ):
        yield _differences(title, found, names) if found else f"{title}: the same"
    for part in comparison.losses:
        if part.bitwise is None:
            yield f"{part.run}: all {part.common} common losses are equal, bit for bit"
        else:
            late = part.beyond_noise
            noise = "never" if late is None else f"from step {late}"
            yield f"{part.run}: losses differ from step {part.bitwise}, beyond noise {noise}"
    yield from comparison.notes


def _differences(title: str, found: Sequence[Difference], names: list[str]) -> Listing:
    rows = ((escape(each.key), *(escape(clip(value)) for value in each.values)) for each in found)
    return Listing(title, *names, rows=rows)
