"""What `train` and `resume` print when an attempt has ended."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.text import Text

from trainkit.base.errors import TrainkitError
from trainkit.base.files import read_json, rotated_log
from trainkit.base.printable import printable
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.launch.local_ranks import run_local_ranks
from trainkit.reports.faults import HEADINGS, STAGES, FaultCost
from trainkit.reports.mixture import HEADINGS as PHASE_HEADINGS, TrainedPhase
from trainkit.runs.evaluations import newest_scores, read_evaluations
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import RunRecord
from trainkit.runs.summary import summarize_run

LOG_LINES = 15


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a text file and, where it has begun again, of the part before it; none
    where there is no file. Reads at most the lines' worth into memory."""
    lines: collections.deque[str] = collections.deque(maxlen=count)
    for part in (rotated_log(path), path):
        with (
            contextlib.suppress(FileNotFoundError),
            open(part, encoding="utf-8", errors="replace") as file,
        ):
            lines.extend(file)
    return [printable(line.rstrip("\n")) for line in lines]


def facts_table(run: RunFolder) -> Listing:
    """Losses, skipped steps, speed, places: two columns."""
    summary = summarize_run(run)
    table = Listing("", "")
    table_of = {
        "training loss": (summary.training, summary.training_loss()),
        "validation loss": (summary.evaluations(), summary.validation_loss()),
    }
    for name, losses in summary.further_validation_losses().items():
        table_of[f"validation loss on {name}"] = summary.evaluations(name), losses
    for what, (rows, both) in table_of.items():
        steps = [row["step"] for row in rows if row["lm_loss"] is not None]
        if both and len(steps) == 1:  # measured once: there is no after yet
            table.add_row(escape(what), f"[bold]{both[0]:.4f}[/] at step {steps[0]}")
        elif both:
            table.add_row(
                escape(what), f"[bold]{both[0]:.4f}[/] before, [bold]{both[1]:.4f}[/] after"
            )
    for what, (step, score) in newest_scores(read_evaluations(run)).items():
        table.add_row(escape(what), f"[bold]{escape(score.in_words())}[/] at step {step}")
    if skipped := summary.skipped_iterations:
        if summary.nan_iterations:
            nan = (
                f", {summary.nan_iterations} of them for a loss or gradient norm that is not finite"
            )
        else:
            nan = ""
        table.add_row("skipped steps", f"[yellow]{skipped}[/]{nan}")
    if summary.tokens_per_second:
        tokens = f"{summary.tokens_per_second:,.0f} tokens/s (median step)"
        table.add_row("speed", tokens)
    table.add_row("run folder", escape(str(run.path)))
    table.add_row("metrics", f"{run.metrics.name}, {run.tensorboard.name}/")
    table.add_row("checkpoints", ", ".join(_checkpoint_names(run)) or "none")
    if attempts := len(run.attempts()):
        table.add_row("logs", f"attempts/{attempts}/logs/")
    return table


def _checkpoint_names(run: RunFolder) -> list[str]:
    """The folders of a run's checkpoints, by their names."""
    # as written: a run of another version has its numbers shown all the same
    job = read_json(run.job).get("job", {}) if run.job.is_file() else {}
    return ENGINES[str(job.get("engine", "native"))].checkpoint_names(run)


def _print_sample(task: TaskContext, run: RunFolder, job: Job) -> None:
    if job.dataset.source == "mock" or not job.is_native:
        return
    # imports torch: not before training has ended
    from trainkit.train.decoding.sampling import Sampling
    from trainkit.train.inference.generate import generate

    try:
        # as the model fitted in training
        how = Sampling(seed=job.training.seed)
        ranks = job.parallelism.tensor_model_parallel_size
        _, (sample,) = generate(
            run,
            [job.generate.prompt],
            how,
            max_new_tokens=job.generate.max_new_tokens,
            split=(ranks, run_local_ranks),
        )
    except TrainkitError as error:
        # a host without the ranks' devices, say: training succeeded all the same
        task.say(f"no sample from the model: {error}")
        return
    task.console.print(_sample_box(sample.text, task.console))


def _sample_box(text: str, console: Console) -> RenderableType:
    """A frame on a terminal; elsewhere the lines as they are, below a heading."""
    title = "a sample from the model"
    if console.is_terminal:
        return Panel(Text(text), title=title, title_align="left")
    return Text(f"{title}:\n{text}")


def _print_failure(task: TaskContext, record: RunRecord) -> None:
    cause = record.root_cause or {}
    where = f" on rank {cause['rank']} ({cause['host']})" if "rank" in cause else ""
    text = Text(
        f"{record.state}, exit {record.exit}, class {record.failure_class}{where}:"
        f" {cause.get('message', 'no reason is recorded')}"
    )
    task.console.print(text, style="red" if record.state == "failed" else "yellow")
    if cause.get("advice") and record.state == "failed":
        task.say(f"advice: {cause['advice']}")
    if cause.get("log") and record.state == "failed":
        lines = last_lines(Path(cause["log"]), LOG_LINES)
    else:
        lines = []
    if lines:
        task.say(f"last lines of {cause['log']}:")
    for line in lines:
        task.say(f"  {line}")


def print_ending(
    task: TaskContext, run: RunFolder, job: Job, record: RunRecord, *, sample: bool = True
) -> None:
    """Success: facts, a sample (which loads the model), what to try next. Otherwise: what failed
    where, and what to do."""
    if record.state == "succeeded" and job.precompile and not job.is_native:
        task.say(f"all graphs of {job.name} are compiled; next: {task.command} train {job.name}")
        return
    if record.state == "succeeded":
        task.console.print(facts_table(run))
        if sample:
            _print_sample(task, run, job)
    else:
        _print_failure(task, record)
    task.show(next_page(task, record))


def faults_table(faults: Sequence[FaultCost]) -> Listing:
    """What each fault of a run cost."""
    rows = (map(escape, fault.cells) for fault in faults)
    drop = (*STAGES, "went on from", "attempt")
    return Listing(*HEADINGS, right=HEADINGS[2:-1], drop=drop, rows=rows)


def phases_table(phases: Sequence[TrainedPhase]) -> Listing:
    """What a run read in which steps."""
    return Listing(
        *PHASE_HEADINGS,
        right=PHASE_HEADINGS[3:],
        rows=(map(escape, phase.cells()) for phase in phases),
    )


def next_page(task: TaskContext, record: RunRecord, without: str = "") -> Page:
    """What is worth trying now, but for the task that says it."""
    yield "next:"
    for command in record.next_tasks():
        if not without or not command.startswith(f"invoke {without} "):
            yield f"  {command.replace('invoke', task.command, 1)}"
