"""The clock of a drill: where the time of a run went, found out without trainkit/reports and
without what the run writes of its times.

Each boundary between two bins is known as (not before, not after): between two things that the
drill saw, of which one came before it and one after it whatever the machine does. So each bin is
known within two numbers, whose distance is the resolution of this clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

WORK = ("training", "compile", "evaluation", "checkpoint")
STAMP = 0.001  # events and origin.json have whole milliseconds
BEAT = 0.5  # seconds: of an attempt whose supervisor was killed too nothing finer is known


@dataclass(frozen=True)
class Mark:
    """From here on the time belongs to another bin.

    Args:
        earliest: by time.monotonic().
        latest: as well.
        bin: to which.
        step: optimizer steps done by then, where rank 0 worked.
        kind: "step", "result" (an evaluation or a save), "back" (to a checkpoint), "" for no work.
        anew: rank 0 goes on from this step, in a new attempt or after it went back.
        waits: (bin, at least, at most) seconds within it that belong elsewhere.
    """

    earliest: float
    latest: float
    bin: str
    step: int = -1
    kind: str = ""
    anew: bool = False
    waits: Sequence[tuple[str, float, float]] = field(default=())


def seconds_of_bins(marks: Iterable[Mark]) -> dict[str, tuple[float, float]]:
    """(at least, at most) by bin; the last mark is the end."""
    found = _with_lost(sorted(marks, key=lambda mark: mark.earliest))
    least: dict[str, float] = {}
    most: dict[str, float] = {}

    def add(bin: str, low: float, high: float) -> None:
        least[bin] = least.get(bin, 0.0) + low
        most[bin] = most.get(bin, 0.0) + high

    begin = found[0]
    found[-1] = replace(found[-1], bin="")  # what comes after it is not part of the run
    for mark in found[1:]:
        if mark.bin == begin.bin:
            continue
        add(begin.bin, max(0.0, mark.earliest - begin.latest), mark.latest - begin.earliest)
        begin = mark
    for mark in found:
        if mark.bin == "training":
            for bin, low, high in mark.waits:
                add(bin, low, high)
                add("training", -high, -low)
    return {bin: (least[bin], most[bin]) for bin in least}


def _with_lost(marks: Sequence[Mark]) -> list[Mark]:
    """Whenever training goes on from a step, what was done beyond it before is lost."""
    found: list[Mark] = []
    for mark in marks:
        if mark.anew:
            found = [
                replace(each, bin="lost")
                if (each.kind == "step" and each.step >= mark.step)
                or (each.kind == "result" and each.step > mark.step)
                else each
                for each in found
            ]
        found.append(mark)
    return found


class Watch:
    """Looks at files from outside: when one was not there for the last time, and when it was
    for the first time.

    Args:
        looks: what is looked for, by name.
    """

    def __init__(self, looks: dict[str, Callable[[], bool]]) -> None:
        self.absent = dict.fromkeys(looks, time.monotonic())
        self.seen: dict[str, float] = {}
        self._looks = looks
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            for name in [name for name in self._looks if name not in self.seen]:
                before = time.monotonic()
                if self._looks[name]():
                    self.seen[name] = time.monotonic()
                else:
                    self.absent[name] = before

    def close(self) -> None:
        self._over.set()
        self._thread.join()


def traces(folder: Path) -> list[list[dict[str, Any]]]:
    """What each process has written down, the oldest first."""
    found = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        lines = path.read_bytes().split(b"\n")[:-1]
        found.append([json.loads(line) for line in lines])
    return [lines for lines in found if lines]


def marks_of_supervisor(lines: Iterable[dict[str, Any]]) -> list[Mark]:
    """Begins and ends of attempts."""
    found: list[Mark] = []
    entered = 0.0
    for line in lines:
        what = line["what"]
        if what in ("enter started", "enter ended"):
            entered = line["at"] - STAMP
        elif what == "leave started":
            found.append(Mark(entered, line["at"], "start"))
        elif what == "leave ended":
            found.append(Mark(entered, line["at"], "idle"))
    return found


def marks_of_rank(lines: Sequence[dict[str, Any]], late: float, *, compiled: bool) -> list[Mark]:
    """What rank 0 did.

    Args:
        lines: its trace, of one attempt.
        late: seconds by which the run takes its clock to be behind, which it is not.
        compiled: its first step compiles the model, and so does its first evaluation.
    """
    begins = {
        "enter train_step": ("work", "training", "step"),
        "enter evaluate": ("enter measure", "evaluation", "result"),
        "enter save": ("enter write", "checkpoint", "result"),
        "enter _roll_back": ("enter _load_newest", "checkpoint", "back"),
        "leave train": ("enter done", "idle", ""),
    }
    found: list[Mark] = []
    anew = True
    compiled_before: set[str] = set()
    for number, line in enumerate(lines):
        if line["what"] not in begins:
            continue
        until, bin, kind = begins[line["what"]]
        rest = lines[number + 1 :]
        after = next((each["at"] for each in rest if each["what"] == until), line["at"])
        mark = Mark(line["at"], after + late, bin, line["step"], kind)
        if kind == "step":
            mark = replace(mark, waits=_waits(rest))
        if compiled and bin in ("training", "evaluation") and line["what"] not in compiled_before:
            mark = replace(mark, bin="compile")
        compiled_before.add(line["what"])
        if kind in ("step", "result"):
            mark = replace(mark, anew=anew)
            anew = False
        found.append(mark)
        anew = anew or kind == "back"
    return found


def _waits(rest: Sequence[dict[str, Any]]) -> list[tuple[str, float, float]]:
    """What a step waited for: measured from within and from without."""
    total: dict[str, float] = {}
    for line in rest:
        if line["what"] == "leave train_step":
            break
        total[line["what"]] = total.get(line["what"], 0.0) + line["seconds"]
    return [
        ("data", total.get("inner data", 0.0), total.get("outer data", 0.0)),
        ("checkpoint", total.get("leave inner wait", 0.0), total.get("leave outer wait", 0.0)),
    ]
