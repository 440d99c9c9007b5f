"""The tasks `report` and `compare`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.inspect.runs import status_page
from trainkit.cli.run.summary import faults_table, phases_table
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.launch.scheduler_registry import current
from trainkit.reports.compare import (
    Comparison,
    compare_runs,
    comparison_page,
    names_of,
    numbers_of,
)
from trainkit.reports.ledger import Ledger
from trainkit.reports.page import clip, draw_report, report_page
from trainkit.reports.read import read_report
from trainkit.reports.words import duration
from trainkit.runs.checkpoints import published_folders, step_of
from trainkit.runs.devices import DeviceUsage
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.samples import SampleText, add_samples, read_samples
from trainkit.runs.summary import (
    RunSummary,
    convention_tflops,
    draw_losses,
    planned_speed,
    refuse_unknown_convention,
    summarize_run,
)


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
        rows = ((escape(each.key), *map(escape, map(clip, each.values))) for each in found)
        yield Listing(title, *names, rows=rows) if found else f"{title}: the same"
    for part in comparison.losses:
        if part.bitwise is None:
            yield f"{part.run}: all {part.common} common losses are equal, bit for bit"
        else:
            late = part.beyond_noise
            noise = "never" if late is None else f"from step {late}"
            yield f"{part.run}: losses differ from step {part.bitwise}, beyond noise {noise}"
    yield from comparison.notes


@dataclass(frozen=True)
class ReportFiles:
    """Files that `report` draws; "" for those it does not.

    Args:
        picture: the loss curve.
        html: the whole report as a page.
        png: the whole report as a picture.
        samples: first have the checkpoints write text, where they have not.
    """

    picture: str = ""
    html: str = ""
    png: str = ""
    samples: bool = False


def report(task: TaskContext, run_name: str, files: ReportFiles, flops: str) -> TaskResult:
    """The task `report`.

    Args:
        task: how it was called.
        run_name: which run.
        files: what it draws.
        flops: a convention to count TFLOP/s by as well; "": none.
    """
    refuse_unknown_convention(flops)
    run = find_run(load_jobs(task).roots(), run_name)
    if files.samples:
        _write_samples(task, run)
    if files.html or files.png:
        return _draw(task, run, files)
    picture = files.picture
    if picture:
        draw_losses(run, Path(picture))
        task.say(f"wrote {picture}")
    summary = summarize_run(run)
    by_convention = convention_tflops(summary, flops)
    planned = planned_speed(run)
    record = current(read_run_record(run))
    whole = read_report(run, record)
    counted: dict[str, object] = {}
    lines = [
        *_speed(summary),
        *_planned(summary.tokens_per_second, planned),
        *_times(whole.ledger),
    ]
    if flops:
        counted = {"flops_convention": flops, "convention_tflops": by_convention}
    if by_convention is not None:
        lines.append(f"{by_convention:.3g} TFLOP/s per device as {flops} counts them")
    found = summary.to_json() | {"planned_tokens_per_second": planned}
    return TaskResult(
        found | whole.to_json() | counted,
        page=chain(
            status_page(task, record, DeviceUsage([])),
            lines,
            [phases_table(whole.phases)] if whole.phases else [],
            [faults_table(whole.faults)] if whole.faults else [],
        ),
    )


def _write_samples(task: TaskContext, run: RunFolder) -> None:
    """Have each checkpoint that is there go on from the job's prompts, but those that have."""
    from trainkit.train.decoding.sampling import Sampling
    from trainkit.train.inference.generate import generate  # torch comes with it

    job = read_job(run.job)
    prompts = job.generate.prompts or (job.generate.prompt,)
    known = {(sample.step, sample.prompt) for sample in read_samples(run)}
    for step in sorted(map(step_of, published_folders(run.checkpoints))):
        missing = [prompt for prompt in prompts if (step, prompt) not in known]
        if not missing:
            continue
        _, found = generate(
            run,
            missing,
            Sampling(temperature=0.0),
            max_new_tokens=job.generate.max_new_tokens,
            step=step,
        )
        add_samples(run, [SampleText(step, each.prompt, each.text, each.tokens) for each in found])
        task.say(f"the checkpoint of step {step} has written {len(found)} texts")


def _draw(task: TaskContext, run: RunFolder, files: ReportFiles) -> TaskResult:
    """The files of a report: rows of metrics are thinned, so this is quick for any run."""
    if files.html and Path(files.html).suffix not in (".html", ".htm"):
        raise ConfigError(f"{files.html} does not end in .html")
    found = read_report(run, current(read_run_record(run)))
    written = []
    if files.html:
        write_text(Path(files.html), report_page(found))
        written.append(files.html)
    if files.png:
        draw_report(found, Path(files.png))
        written.append(files.png)
    if files.picture:
        draw_losses(run, Path(files.picture))
        written.append(files.picture)
    for name in written:
        task.say(f"wrote {name}")
    values = {**found.record.row(), **found.to_json()}
    return TaskResult(document("report/1", **values, files=written))


def _speed(summary: RunSummary) -> Iterator[str]:
    tflops = summary.median("model_tflops")
    mfu = summary.median("mfu")
    if tflops is not None:
        share = "n/a" if mfu is None else f"{100 * mfu:.1f}% of {summary.peak}"
        yield f"{tflops:.3g} model TFLOP/s per device (median step), MFU {share}"


def _planned(measured: float | None, planned: float | None) -> Iterator[str]:
    """The plan's speed beside the run's; nothing where one of them is not known."""
    if measured and planned:
        yield f"{measured:,.0f} tokens/s, {measured / planned:.2f} times the plan's {planned:,.0f}"


def _times(ledger: Ledger) -> Iterator[str]:
    """Where the run's time went, the most first; bins below a tenth of a percent are left out."""
    wall = ledger.wall_seconds
    if not wall:
        return
    by_size = sorted(ledger.seconds.items(), key=lambda item: item[1], reverse=True)
    parts = [f"{bin} {seconds / wall:.1%}" for bin, seconds in by_size if seconds >= wall / 1000]
    yield f"{duration(wall)} since submission: {', '.join(parts)}"
