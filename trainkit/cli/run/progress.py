"""What a person sees while things run: stage verdicts, unit bars, the training bar."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from trainkit.cli.tables import Listing
from trainkit.launch.stage_lines import LINE_SECONDS, StageLines
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import MetricsTail
from trainkit.stages.contract import Need, Unit
from trainkit.stages.stamps import Freshness


class TerminalStageReporter(StageLines):
    """Prints verdicts; draws one bar over the units of a stage, or writes a line now and then
    where there is no terminal."""

    def __init__(self, console: Console) -> None:
        super().__init__(lambda text: console.print(escape(text)))
        self.console = console
        self.bar: Progress | None = None
        self._said: set[tuple[str, str, str]] = set()

    def verdict(self, verdict: Freshness) -> None:
        known = (verdict.stage, verdict.name, verdict.because)
        if known in self._said:  # of another run of a sweep
            return
        self._said.add(known)
        mark = "[green]fresh[/]" if verdict.fresh else "[yellow]stale[/]"
        self.console.print(
            f"{verdict.stage} [bold]{verdict.name}[/] is {mark} because {escape(verdict.because)}"
        )

    def waiting(self, need: Need, holder: str) -> None:
        self.console.print(
            f"{need.stage} [bold]{need.name}[/]: waiting for {escape(holder)}, which is making it"
        )

    def started(self, need: Need, units: Sequence[Unit]) -> None:
        super().started(need, units)
        columns = (
            TextColumn("  {task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.bar.add_task(need.stage, total=max(1, self.total))
        if self.console.is_terminal:
            self.bar.start()

    def progress(self, unit: Unit, fraction: float) -> None:
        if self.bar is not None:
            super().progress(unit, fraction)

    def show_progress(self, unit: Unit, now: float) -> None:
        if self.bar is None or not self.console.is_terminal:
            super().show_progress(unit, now)
            return
        self.bar.update(
            self.bar.task_ids[0], completed=self.completed, description=self.speed(unit, now)
        )

    def finished(self, need: Need) -> None:
        if self.bar is not None and self.bar.live.is_started:
            self.bar.stop()
        self.bar = None
        super().finished(need)


def dataset_table(rows: Sequence[Mapping[str, Any]]) -> Listing:
    """What prepared datasets hold.

    Args:
        rows: the counts of dataset.json with "name" and, of those made just now, "seconds" and
            "mb_per_second".
    """
    numbers = ("documents", "tokens", "text MB", "rejects", "seconds", "MB/s")
    table = Listing(
        "dataset",
        "documents",
        "tokens",
        "text MB",
        "left out",
        "rejects",
        "seconds",
        "MB/s",
        right=numbers,
        drop=("seconds", "MB/s", "text MB"),
    )
    for row in rows:
        reasons = {
            **row.get("left_out", {}),
            **({"empty": row["empty_documents"]} if row.get("empty_documents") else {}),
        }
        detail = (
            ", ".join(f"{count:,} {reason}" for reason, count in reasons.items() if count) or "none"
        )
        size = f"{row['text_bytes'] / 1e6:,.1f}" if "text_bytes" in row else ""
        speed = [f"{row[key]:,.1f}" if key in row else "" for key in ("seconds", "mb_per_second")]
        counts = [f"{row[key]:,}" if key in row else "" for key in ("documents", "tokens")]
        table.add_row(
            escape(row["name"]), *counts, size, escape(detail), f"{row.get('rejects', 0):,}", *speed
        )
    return table


def _shown(loss: float | None) -> str:
    """A loss for people; metrics hold null where it is not finite."""
    return "not finite" if loss is None else f"{loss:.4f}"


class TrainingView:
    """Follows metrics.jsonl of a run: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self, console: Console, train_iters: int) -> None:
        self.console = console
        self.train_iters = train_iters
        self.tail: MetricsTail | None = None
        self.bar: Progress | None = None
        self.last_line = 0.0
        self.last_look = 0.0

    def begin(self, run: RunFolder) -> None:
        """Start following; called before the ranks start. What an earlier attempt has logged is
        not said again."""
        self.tail = MetricsTail(run.metrics)
        self.tail.new_rows()
        self.console.print(f"run [bold]{run.id}[/] in {escape(str(run.path))}")
        columns = (
            TextColumn("[bold]train[/]"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=self.console)
        self.bar.add_task("starting the ranks", total=self.train_iters)
        if self.console.is_terminal:
            self.bar.start()

    def tick(self) -> None:
        """Take in new rows, at most some times a second."""
        now = time.monotonic()
        if self.tail is None or self.bar is None or now - self.last_look < 0.2:
            return
        self.last_look = now
        for row in self.tail.new_rows():
            if "eval" in row:
                self.console.print(
                    f"  step {row['step']}: {row['eval']} loss {_shown(row['lm_loss'])}"
                )
                continue
            text = f"loss {_shown(row['lm_loss'])}"
            # other engines say how fast an iteration was only after the one before it
            if row.get("tokens_per_second") is not None:
                text += f"  {row['tokens_per_second']:,.0f} tokens/s"
            self.bar.update(self.bar.task_ids[0], completed=row["step"], description=text)
            if not self.console.is_terminal and (
                now - self.last_line > LINE_SECONDS or row["step"] == self.train_iters
            ):
                self.last_line = now
                self.console.print(f"  step {row['step']}/{self.train_iters}  {text}")

    def notice(self, text: str) -> None:
        """A line that must not be lost in the bar."""
        self.console.print(f"[yellow]{escape(text)}[/]")

    def end(self) -> None:
        """Take in the last rows and take the bar away."""
        self.last_look = 0.0
        with contextlib.suppress(OSError, SystemExit):  # the terminal may be gone
            self.tick()
            if self.bar is not None and self.bar.live.is_started:
                self.bar.stop()
