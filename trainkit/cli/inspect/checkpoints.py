"""The tasks that look at what a run has kept: checkpoints, replay."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.model.tokenizer_warning import warn_of_changed_tokenizer
from trainkit.cli.tables import Listing
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.resolved import read_job
from trainkit.runs.checkpoint_errors import DamagedCheckpoint, NewerCheckpoint
from trainkit.runs.checkpoints import (
    open_checkpoint,
    published_folders,
    set_aside_in,
    step_of,
    verify,
)
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.runs.retention import pin, retention_reasons, valid_by_size


def _rows(run: RunFolder, *, hashes: bool) -> list[dict[str, Any]]:
    """A row of every folder that was published, oldest first; then of those that were set aside."""
    found = valid_by_size(run.checkpoints)
    if found:
        newest = found[-1].manifest.step
    else:
        newest = 0
    reasons = retention_reasons(found, read_job(run.job).checkpoint, newest)
    rows = []
    for folder in published_folders(run.checkpoints):
        step = step_of(folder)
        row: dict[str, Any] = {
            "step": step,
            "folder": str(folder),
            "bytes": None,
            "layout": {},
            "validation": {},
            "kept": reasons.get(step, []),
        }
        try:
            c = open_checkpoint(folder)
            row |= {
                "bytes": c.bytes,
                "layout": c.manifest.layout,
                "validation": c.manifest.validation,
            }
            if hashes:
                row["problems"] = verify(folder)
            else:
                row["problems"] = []
        except (DamagedCheckpoint, NewerCheckpoint) as damaged:
            row["problems"] = damaged.problem_list
        rows.append(row | {"checked": "full" if hashes else "size"})
    for folder in set_aside_in(run.checkpoints):
        row = {
            "step": step_of(folder),
            "folder": str(folder),
            "bytes": None,
            "layout": {},
            "validation": {},
            "kept": [],
        }
        rows.append(row | {"problems": [f"damaged; set aside as {folder.name}"], "checked": "size"})
    return rows


def _layout_words(layout: dict[str, Any]) -> str:
    """2 ranks: TP 1 x PP 1 x DP 2, ZeRO 1."""
    degrees = {
        "TP": "tensor_model_parallel_size",
        "PP": "pipeline_model_parallel_size",
        "DP": "data_parallel_size",
    }
    words = " x ".join(f"{name} {layout.get(key, '?')}" for name, key in degrees.items())
    if "world_size" in layout:
        return f"{layout['world_size']} ranks: {words}, ZeRO {layout.get('zero_stage', '?')}"
    return ""


def _print(task: TaskContext, run: RunFolder, rows: list[dict[str, Any]]) -> None:
    if not rows:
        task.say(f"run {run.id} has no checkpoint yet")
        return
    table = Listing(
        *("step", "size", "layout", "validation loss", "kept because", "is it whole?"),
        right=("step", "size"),
        drop=("layout", "validation loss", "kept because"),
    )
    for row in rows:
        if row["bytes"] is None:
            size = "?"
        else:
            size = f"{row['bytes'] / 1e9:,.3f} GB"
        if row["problems"]:
            whole = f"[red]{escape('; '.join(row['problems']))}[/]"
        elif row["checked"] == "full":
            whole = "[green]yes[/]"
        else:
            whole = "sizes are right"
        losses = ", ".join(f"{name} {loss:.4f}" for name, loss in row["validation"].items())
        kept = ", ".join(row["kept"]) or (
            "damaged ones stay" if row["problems"] else "until the next save"
        )
        table.add_row(
            str(row["step"]), size, _layout_words(row["layout"]), escape(losses), kept, whole
        )
    task.console.print(table)


def checkpoints(
    task: TaskContext, words: str, *, hashes: bool, pinned: int | None, unpinned: int | None
) -> TaskResult:
    """The task `checkpoints`. Exit 16 where there are checkpoints and none is whole."""
    if pinned is not None and pinned == unpinned:
        raise ConfigError(f"--pin and --unpin both name step {pinned}")
    run = find_run(load_jobs(task).roots(), words)
    for step, stays in ((pinned, True), (unpinned, False)):
        if step is not None:
            pin(run.checkpoints, step, pinned=stays)
    rows = _rows(run, hashes=hashes)
    if not task.json:
        _print(task, run, rows)
    none_whole = bool(rows) and all(row["problems"] for row in rows)
    return TaskResult(
        document("checkpoints/1", run=run.id, checkpoints=rows),
        exit=Exit.NO_CHECKPOINT if none_whole else Exit.DONE,
    )


def replay(task: TaskContext, words: str, step: int, samples: int) -> TaskResult:
    """The task `replay`."""
    from trainkit.train.inference.replay import replay as rebuild

    run = find_run(load_jobs(task).roots(), words)
    warn_of_changed_tokenizer(run)
    batch = rebuild(run, read_job(run.job), step)
    shown = batch.samples[: samples or None]
    same = {
        None: "that step has no row in the metrics to compare with",
        True: "they are those that the step was made with",
        False: "they are NOT those that the step was made with: the data has changed since",
    }
    if not task.json:
        task.say(
            f"step {step} of run {run.id}: samples {batch.window.first} to"
            f" {batch.window.first + batch.window.samples - 1} of the order;"
        )
        task.say(f"checksum {batch.checksum}: {same[batch.same]}")
        for s in shown:
            task.say(
                f"--- position {s.position}: sample {s.number} of {s.dataset}, micro-batch"
                f" {s.micro_batch} of data-parallel rank {s.data_rank}"
            )
            task.say(s.text if s.text is not None else " ".join(map(str, s.tokens)))
        if len(shown) < len(batch.samples):
            task.say(f"--- {len(batch.samples) - len(shown)} more: --samples 0 shows all")
    facts = {
        "step": step,
        "first": batch.window.first,
        "count": batch.window.samples,
        "batch_checksum": batch.checksum,
        "same": batch.same,
    }
    return TaskResult(
        document("replay/1", run=run.id, **facts, samples=[asdict(s) for s in shown]),
        exit=Exit.DONE if batch.same is not False else Exit.STAGE_FAILED,
    )
