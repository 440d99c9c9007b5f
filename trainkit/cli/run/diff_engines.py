"""The task `diff-engines`."""

from __future__ import annotations

import signal
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.base.interrupts import raise_interrupt
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.stages import stage_ui
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.diff_engines import NUMBERS, TENSOR_TOLERANCE, Contest, EnginesDiff
from trainkit.experiment.options import TrainOptions
from trainkit.reports.compare import compare_runs, comparison_page
from trainkit.reports.read import read_report

WORDS = {"lm_loss": "loss", "grad_norm": "gradient norm"}


def diff_engines(
    task: TaskContext,
    name: str,
    options: TrainOptions,
    engines: str,
    steps: int,
    tolerance: float,
    html: str,
) -> TaskResult:
    """The task `diff-engines`.

    Args:
        task: how it was called.
        name: of the job.
        options: how its runs are started.
        engines: two words with a comma between them.
        steps: how many each makes.
        tolerance: how far apart numbers of a step may be, in parts of the first.
        html: the file to write both curves into; "": none.
    """
    if html and Path(html).suffix not in (".html", ".htm"):
        raise ConfigError(f"{html} does not end in .html")
    contest = Contest(load_jobs(task), name, engines.split(","), options, steps)
    if task.dry_run:
        task.say(f"{' and '.join(contest.words)}: {steps} steps each, from the same weights")
        words = list(contest.words)
        return TaskResult(document("engines-diff-plan/1", engines=words, steps=steps))
    for ending in (signal.SIGHUP, signal.SIGTERM):  # as Ctrl-C: no run is left behind
        signal.signal(ending, raise_interrupt)
    found = contest.conduct(stage_ui(task), task.say, tolerance)
    if html:
        write_text(Path(html), comparison_page(compare_runs([read_report(r) for r in found.runs])))
        task.say(f"wrote {html}")
    return TaskResult(found.to_json(), found.exit, page=_page(found))


def _page(found: EnginesDiff) -> Page:
    one, other = (escape(name) for name in found.names)
    numbers = (one, other, "apart")
    table = Listing("step", "", *numbers, right=("step", *numbers))
    for each in found.steps:
        colour = "green" if each.relative <= found.tolerance else "red"
        values = (f"{each.first:.7f}", f"{each.second:.7f}")
        apart = f"[{colour}]{each.relative:.1e}[/]"
        table.add_row(str(each.step), WORDS[each.number], *values, apart)
    yield table
    for number in NUMBERS:
        part = found.first(number)
        said = f"at step {part.step}" if part else "never"
        if not found.compared(number):
            said = "not compared: one of them does not log it"
        yield f"{WORDS[number]} apart by more than {found.tolerance:g}: {said}"
    worst = max(found.tensors, key=lambda each: each.parts)
    first = found.tensor.name if found.tensor else "none"
    yield f"first tensor apart by more than {TENSOR_TOLERANCE:g} of its way: {first}"
    yield f"furthest apart: {worst.name}, {worst.parts:.1e} of its way"
    yield f"runs: {' '.join(run.id for run in found.runs)}"
