"""What the parts of the proof find, and the file in which it is kept as it is found.

Standard library and trainkit.base only: it is there before anything is installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from trainkit.base.files import write_json

# "shown": a figure without a goal; "not shown": it could not be tried, `note` says why
Verdict = Literal["pass", "fail", "shown", "not shown"]
Value = float | str | None


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Args:
        name: what was looked at.
        verdict: how it went.
        value: what was found.
        unit: of the value.
        goal: what it was held against, in words; "" for a figure alone.
        note: what else must be known to read it.
    """

    name: str
    verdict: Verdict
    value: Value = None
    unit: str = ""
    goal: str = ""
    note: str = ""

    def cells(self) -> list[str]:
        """Its cells of the table."""
        return [self.name, written(self.value, self.unit), self.goal, self.verdict, self.note]


def written(value: Value, unit: str) -> str:
    """A value as the table has it: numbers with four figures, thousands apart."""
    if value is None:
        return "n/a"
    if isinstance(value, str):
        return value
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        words = f"{value:.4g}"
    elif abs(value) < 1e-2:
        words = f"{value:.2e}"
    else:
        words = f"{value:,.0f}"
    return f"{words} {unit}".rstrip()


def judged(
    name: str, holds: bool, value: Value = None, *, unit: str = "", goal: str = "", note: str = ""
) -> Finding:
    """A finding that was held against a goal.

    Args:
        name: what was looked at.
        holds: whether the goal is met.
        value, unit, goal, note: as of `Finding`.
    """
    verdict: Verdict = "pass" if holds else "fail"
    return Finding(name, verdict, value, unit, goal, note)


def judged_if(
    judge: bool, name: str, holds: bool, value: Value, *, goal: str, note: str = ""
) -> Finding:
    """A finding that is held against its goal only where the goal is meant for what was run.

    Args:
        judge: it is; else the value is shown alone.
        name, holds, value, goal, note: as of `judged`.
    """
    if judge:
        return judged(name, holds, value, goal=goal, note=note)
    return Finding(name, "shown", value, note=note)


def not_shown(name: str, why: str) -> Finding:
    """What could not be tried here."""
    return Finding(name, "not shown", note=why)


class FindingsFile:
    """The findings of one part, on disk after each: who ends the part finds what there was.

    Args:
        path: a JSON list of findings, whole or absent.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.findings: list[Finding] = []

    def add(self, *findings: Finding) -> None:
        """Take in some, and print them."""
        for finding in findings:
            self.findings.append(finding)
            print("  ".join(cell for cell in finding.cells() if cell), flush=True)
        write_json(self.path, [asdict(finding) for finding in self.findings])


def table(rows: Sequence[Sequence[str]], *, head: Sequence[str]) -> str:
    """Columns as wide as their widest cell; the last is not padded."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
