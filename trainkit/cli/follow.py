"""The tasks that follow runs: runs, status, logs, tensorboard, report."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rich.table import Table

from trainkit.base.errors import ConfigError
from trainkit.base.forms import document
from trainkit.cli.ending import facts_table, last_lines, print_next
from trainkit.cli.jobs import load_jobs
from trainkit.cli.wrapper import Answer, Talk
from trainkit.jobs.resolved import read_job
from trainkit.runs.folder import RunFolder
from trainkit.runs.picture import draw_losses
from trainkit.runs.record import Record, all_runs, find_run, read_record
from trainkit.runs.summary import summarize

COLOURS = {"succeeded": "green", "running": "cyan", "failed": "red", "cancelled": "yellow", "preempted": "yellow"}


def runs(talk: Talk, job: str) -> Answer:
    """The task `runs`."""
    records = [read_record(run) for run in all_runs(load_jobs(talk).roots()) if not job or run.job_name == job]
    table = Table("run", "job", "state", "step", "attempt", box=None, pad_edge=False)
    for record in records:
        colour = COLOURS.get(record.state, "white")
        table.add_row(record.run.id, record.run.job_name, f"[{colour}]{record.state}[/]", str(record.step), str(record.attempt))
    if not talk.json:
        talk.console.print(table if records else "no runs yet; start one: invoke train JOB")
    return Answer(document("runs/1", runs=[r.row() for r in records]))


def status(talk: Talk, words: str) -> Answer:
    """The task `status`."""
    run = find_run(load_jobs(talk).roots(), words)
    record = read_record(run)
    if not talk.json:
        _print_status(talk, run, record)
    return Answer(record.to_json())


def _print_status(talk: Talk, run: RunFolder, record: Record) -> None:
    colour = COLOURS.get(record.state, "white")
    iters = read_job(run.job).training.train_iters
    talk.console.print(f"[bold]{run.id}[/] ({run.job_name}): [{colour}]{record.state}[/], step {record.step} of {iters}, attempt {record.attempt}")
    if record.root_cause:
        talk.say(f"exit {record.exit}, class {record.failure_class}: {record.root_cause.get('message')}")
    for survivor in record.survivors:
        talk.say(f"left behind: rank {survivor['rank']}, pid {survivor['pid']} on {survivor['host']}")
    talk.console.print(facts_table(run))
    print_next(talk, record)


def logs(talk: Talk, words: str, rank: int, attempt: int, *, follow: bool, lines: int) -> None:
    """The task `logs`."""
    run = find_run(load_jobs(talk).roots(), words)
    attempts = run.attempts()
    chosen = [a for a in attempts if a.number == attempt] if attempt else attempts[-1:]
    if not chosen:
        raise ConfigError(f"run {run.id} has no attempt {attempt or ''}".rstrip(), hint=f"attempts: {', '.join(str(a.number) for a in attempts) or 'none'}")
    path = chosen[0].log(rank)
    if not path.is_file():
        there = sorted(int(p.stem) for p in path.parent.glob("*.log"))
        raise ConfigError(f"run {run.id} has no log of rank {rank}", hint=f"ranks with a log: {', '.join(map(str, there)) or 'none'}")
    for line in last_lines(path, lines or sys.maxsize):
        talk.say(line)
    if follow:
        _follow(talk, run, path)


def _follow(talk: Talk, run: RunFolder, path: Path) -> None:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        while True:
            running = read_record(run).state == "running"
            data = file.read()
            if data:
                sys.stdout.write(data.decode(errors="replace"))
                sys.stdout.flush()
            elif not running:
                return
            time.sleep(0.2)


def tensorboard(talk: Talk, words: str, port: int) -> None:
    """The task `tensorboard`: becomes TensorBoard."""
    roots = load_jobs(talk).roots()
    where = ["--logdir", str(find_run(roots, words).tensorboard if words else roots[0] / "runs")]
    if not words and len(roots) > 1:
        where = ["--logdir_spec", ",".join(f"{root.name}:{root / 'runs'}" for root in roots)]
    argv = [sys.executable, "-m", "tensorboard.main", *where, "--port", str(port), "--host", "localhost"]
    if talk.dry_run:
        talk.say(" ".join(argv))
        return
    os.execv(sys.executable, argv)


def report(talk: Talk, words: str, picture: str) -> Answer:
    """The task `report`."""
    run = find_run(load_jobs(talk).roots(), words)
    if picture:
        draw_losses(run, Path(picture))
        talk.say(f"drew {picture}")
    if not talk.json:
        _print_status(talk, run, read_record(run))
    return Answer(summarize(run).to_json())
