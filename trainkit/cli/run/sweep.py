"""The task `sweep`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import write_text
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import SweepTaskOptions
from trainkit.cli.run.stages import stage_ui
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.follow import GOING
from trainkit.experiment.sweep.halving import rungs_of, steps_of
from trainkit.experiment.sweep.opened import opened_sweep
from trainkit.experiment.sweep.record import (
    SweepRecord,
    read_newest,
    resolve_members,
    table_of,
)
from trainkit.experiment.sweep.results import results_of, unfinished
from trainkit.experiment.sweep.run import SweepOptions, run_sweep
from trainkit.jobs.layers import LOCAL_FILE, parse_overrides
from trainkit.jobs.load import Jobs
from trainkit.jobs.local_jobs import add_job, refuse_name
from trainkit.jobs.sweeps import draws
from trainkit.reports.parallel import parallel_svg
from trainkit.reports.sweep import (
    OVER_SEEDS,
    WORDS,
    Key,
    SweepResults,
    headings,
    known_key,
    member_row,
    point_headings,
    point_rows,
)
from trainkit.reports.sweep_page import sweep_page
from trainkit.runs.metrics import read_thinned

COLOURS = {
    "succeeded": "green",
    "failed": "red",
    "diverged": "red",
    "waiting": "blue",
    "stopped": "bright_black",
}


def sweep(task: TaskContext, name: str, options: SweepTaskOptions) -> TaskResult:
    """The task `sweep`.

    Args:
        task: how it was called.
        name: of the job.
        options: of the command line.

    Raises:
        ConfigError: as `opened_sweep`, and for files and names that cannot be written.
        TrainkitError: as `run_sweep`.
    """
    jobs = load_jobs(task)
    written = options.write or f"{name}-best"
    best = known_key(options.best) if options.best else None
    if best:
        refuse_name(jobs, written, "--write")
    if options.html and Path(options.html).suffix not in (".html", ".htm"):
        raise ConfigError(f"{options.html} does not end in .html")
    if options.svg and Path(options.svg).suffix != ".svg":
        raise ConfigError(f"--svg {options.svg} does not end in .svg")
    if task.dry_run:
        return _members(jobs, name, options.set)
    if options.show:
        results = results_of(_newest(jobs, name, options))
    else:
        with opened_sweep(jobs, name, options.set, new=options.new) as found:
            runs = len(found.record.members) or found.table.samples
            task.say(f"sweep {found.record.id} of {name}: {runs} runs")
            how = SweepOptions(options.failed, options.detach)
            results = results_of(run_sweep(found, stage_ui(task), how))
    _print(task, results)
    if options.html:
        _draw(task, results, options.html)
    if options.svg:
        write_text(Path(options.svg), parallel_svg(results))
        task.say(f"wrote {options.svg}")
    if best:
        _write_best(task, jobs, results, best, written)
    return TaskResult(document("sweep/1", **results.to_json()), _exit_of(results))


def _newest(jobs: Jobs, name: str, options: SweepTaskOptions) -> SweepRecord:
    job = jobs.resolve(name, options.set).job
    record = read_newest(job.cluster.root_folder.absolute(), name)
    if record is None:
        raise ConfigError(f"job {name} has no sweep yet", hint=f"invoke sweep {name} begins one")
    return record


def _members(jobs: Jobs, name: str, sets: Sequence[str]) -> TaskResult:
    """Under a dry run: which runs there would be, and where they stop."""
    members, resolved = resolve_members(jobs, name, sets)
    rungs = rungs_of(name, resolved)
    table = table_of(resolved)
    lines = [f"{each.number}: {' '.join(each.overrides)}" for each in members]
    if table.sampler == "tpe":
        lines = [f"{table.samples} settings that are proposed by what those before have come to:"]
        lines += [f"{key}: {json.dumps(draw)}" for key, draw in draws(table.random)]
        members = []
    if table.halving is not None:
        settings = len(members) // max(1, len(table.seeds))
        part = steps_of(rungs, settings, table.halving.factor) / (settings * rungs[-1])
        lines.append(f"stop and are compared at steps {', '.join(map(str, rungs[:-1]))}:")
        lines.append(f"{part:.0%} of the steps of all {rungs[-1]}, where none fails")
    return TaskResult(
        document(
            "sweep-members/1",
            job=name,
            members=[{"number": each.number, "values": each.values} for each in members],
            rungs=rungs,
        ),
        page=lines,
    )


def _print(task: TaskContext, results: SweepResults) -> None:
    if task.json:
        return
    names = headings(results)
    numbers = len(results.keys) + 3
    listing = Listing(*names, right=WORDS)
    for member in results.members:
        cells = [escape(cell) for cell in member_row(results, member)]
        colour = COLOURS.get(member.state, "cyan")
        cells[numbers - 1] = f"[{colour}]{member.state}[/]"
        listing.add_row(*cells)
    task.console.print(listing)
    before = len(results.members)
    for rung in results.rungs[:-1]:
        said = "not decided yet" if rung.kept is None else f"{len(rung.kept)} of {before}"
        task.say(f"runs that went on from step {rung.step}: {said}")
        before = len(rung.kept or ())
    if len(results.points()) < len(results.members):
        over_seeds = Listing(*point_headings(results), right=(*WORDS, "seeds"))
        for row in point_rows(results):
            over_seeds.add_row(*map(escape, row))
        task.console.print(over_seeds)
        task.say(OVER_SEEDS)
    for each in unfinished(results.members, failed=True):
        if each.why:
            task.say(f"{each.number}: {each.why}")


def _draw(task: TaskContext, results: SweepResults, path: str) -> None:
    rows = {}
    for member in results.members:
        if member.run:
            run = results.folder.parents[2] / "runs" / results.job / member.run
            rows[member.number] = list(read_thinned(run / "metrics.jsonl").rows)
    write_text(Path(path), sweep_page(results, rows))
    task.say(f"wrote {path}")


def _write_best(task: TaskContext, jobs: Jobs, results: SweepResults, key: Key, name: str) -> None:
    best = results.best(key)
    record = read_newest(results.folder.parents[2], results.job)
    sets = parse_overrides(record.sets if record is not None else ())
    values = {".".join(each.path): each.value for each in sets} | best.values
    comment = f"the best {key} of sweep {results.id}: members {best.members}"
    add_job(jobs, name, results.job, values, comment)
    said = ", ".join(f"{key} = {value}" for key, value in best.values.items())
    task.say(f"the best {key.replace('_', ' ')}: {said}; written to {LOCAL_FILE} as {name}")


def _exit_of(results: SweepResults) -> Exit:
    """0 once at least one has succeeded and the others have ended by their own fault, or where
    some still go on; else what the first of the others says."""
    states = [member.state for member in results.members]
    left = unfinished(results.members, failed=False)
    if any(state in GOING for state in states) or ("succeeded" in states and not left):
        return Exit.DONE
    if left or "paused" in states:
        return Exit.RANK_INFRA
    return Exit.RANK_USER
