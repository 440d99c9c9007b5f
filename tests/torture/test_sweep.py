"""A disk that fails at any call that writes: this one is refused, or all from there on for want
of room.

What the log called saved is there, and the run goes on as if nothing had been.
"""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.torture import writes
from tests.torture.conftest import LAYOUTS, Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run
from tests.train.test_resume import facts
from trainkit.runs.checkpoints import newest_valid, published_folders, verify
from trainkit.runs.folder import RunFolder

LAST = 6  # steps of the runs here
SAVED = re.compile(r" saved checkpoint (\d+):")
MADE = re.compile(r" iteration +(\d+)/")
KINDS: dict[str, dict[str, Any]] = {
    "ENOSPC": {"do": errno.ENOSPC},
    "EIO": {"do": errno.EIO},
    "half": {"do": "short"},
    "full, room after 2 steps": {"do": errno.ENOSPC, "steps": 2},
    "full for good": {"do": errno.ENOSPC, "steps": 99},
}
LAST_WORD = f":done@{LAST}"
# who waits for a lock is not told for whom
SILENT = ("ftruncate checkpoints/writer.lock", "pwrite checkpoints/writer.lock")
LEFT_OUT = re.compile(r"step-(\d+).*the next save tries again")
OUTCOMES = ("nothing lost", "a save left out", "ended before step 1", "ended later")
ALL_OF = 12  # calls of one operation for one place; of more the first, the middle and the last
SOME = [  # kind, operation and place, which of them, what comes of it
    ("ENOSPC", "write checkpoints/step-00000004.tmp/rank-00000.bin", 40, "a save left out"),
    ("ENOSPC", "rename checkpoints/step-00000002", 1, "nothing lost"),  # in the thread that deletes
    ("EIO", "unlink checkpoints/step-00000002.tmp/manifest.json", 1, "nothing lost"),
    ("EIO", "rename checkpoints/step-00000006.tmp", 1, "ended later"),
    ("ENOSPC", "pwrite windows.bin", 3, "nothing lost"),
    ("ENOSPC", "create metrics.jsonl", 1, "ended before step 1"),
    ("EIO", "create attempts/1/phases.jsonl", 1, "nothing lost"),
    ("half", "write checkpoints/step-00000002.tmp/rank-00000.bin", 1, "nothing lost"),
    ("full, room after 2 steps", "write metrics.jsonl", 4, "a save left out"),
]


@dataclass(frozen=True)
class Call:
    """One thing that a rank asked of the disk: the n-th of its kind."""

    what: str  # operation and place
    n: int

    @property
    def address(self) -> str:
        return f"{self.what} {self.n}"

    @property
    def operation(self) -> str:
        return self.what.partition(" ")[0]

    @property
    def silent(self) -> bool:
        """Whether nobody need be told that it was refused: the last heartbeat is then written
        where the one before stands."""
        return self.what in SILENT or self.what.endswith(LAST_WORD)


def calls_in(report: Path, *, refused: bool = False) -> list[Call]:
    """All of them, or those that were refused."""
    lines = [
        line.removesuffix(" !").rpartition(" ")
        for line in report.read_text().splitlines()
        if not refused or line.endswith(" !")
    ]
    return [Call(what, int(n)) for what, _, n in lines]


class Sweep:
    """Runs of one kind, each with another call that fails, against one that is left alone."""

    def __init__(
        self, layout: str, root: Path, ranks: Ranks, rank: int = 0, *, save_async: bool = False
    ) -> None:
        self.layout, self.root, self.ranks, self.rank, self.save_async, self.begun = (
            layout,
            root,
            ranks,
            rank,
            save_async,
            0,
        )
        self.size = LAYOUTS[layout].ranks
        whole = self._new_run("whole")
        assert ranks.run(whole, self.size, [self._fault(whole)]) == [0] * self.size, log_of(whole)
        self.expected, self.calls = facts(whole), calls_in(root / "whole/report")
        self.kept = set(whole_steps(whole))

    def _new_run(self, name: str) -> RunFolder:
        keep = {"keep_last": 1, "keep_every": 4, "save_async": self.save_async}
        return new_run(
            job_of(
                self.layout,
                self.root / name,
                keep=keep,
                train_iters=LAST,
                save_interval=2,
                eval_interval=3,
            )
        )

    def _fault(self, run: RunFolder, **fault: Any) -> dict[str, Any]:
        return {
            "at": "writes",
            "root": str(run.path),
            "report": str(run.path.parents[2] / "report"),
            "rank": self.rank,
            **fault,
        }

    def calls_for(self, kind: str) -> list[Call]:
        """Those that this may happen to; of many of one operation for one place only three. Not
        a heartbeat that may come or not, as time passes, nor the folder of several ranks'
        heartbeats, which the fastest of them makes."""
        may = {
            "half": writes.IN_PART,
            "full, room after 2 steps": writes.TAKES_ROOM,
            "full for good": writes.TAKES_ROOM,
        }.get(kind)
        found: dict[str, list[Call]] = {}
        for call in self.calls:
            shared = self.size > 1 and call.what.startswith("mkdir attempts/1/heartbeat")
            by_chance = shared or call.what.endswith(writes.AGAIN)
            if (may is None or call.operation in may) and not by_chance:
                found.setdefault(call.what, []).append(call)
        few = [
            group if len(group) <= ALL_OF else [group[0], group[len(group) // 2], group[-1]]
            for group in found.values()
        ]
        return [call for group in few for call in group]

    def fail(self, call: Call, kind: str) -> str:
        """One run in which this call, and no other before it, meets this, and which is then
        resumed; what came of it, one of OUTCOMES."""
        self.begun += 1
        run = self._new_run(f"broken{self.begun}")
        codes = self.ranks.run(run, self.size, [self._fault(run, call=call.address, **KINDS[kind])])
        refused = calls_in(self.root / f"broken{self.begun}/report", refused=True)
        story = (
            f"{kind} at {call.address!r}: {codes}, {len(refused)} refused\n{log_of(run)[-3000:]}"
        )
        assert refused[:1] == [call] and ("full" in kind or len(refused) == 1), story
        came = self._look(run, codes, kind, refused, story)
        left_out = set(map(int, LEFT_OUT.findall(log_of(run)))) if codes[self.rank] == 0 else set()
        if codes[self.rank] != 0:
            assert self.ranks.run(run, self.size) == [0] * self.size, f"resumed after {story}"
        assert facts(run) == self.expected, story
        # what could not be deleted at first is gone too
        assert self.kept - left_out <= set(whole_steps(run)) <= self.kept, story
        shutil.rmtree(self.root / f"broken{self.begun}")
        return came

    def _look(
        self, run: RunFolder, codes: list[int], kind: str, refused: list[Call], story: str
    ) -> str:
        """What must hold before anything is mended."""
        log, rows = log_of(run), facts(run)
        # by rank 0 for all, by this one for itself
        told = log + run.attempt(1).log(self.rank).read_text()
        newest = newest_valid(run.checkpoints, pytest.fail)
        assert (newest.manifest.step if newest else 0) >= max(
            map(int, SAVED.findall(log)), default=0
        ), story
        assert all(verify(folder) == [] for folder in published_folders(run.checkpoints)), story
        assert rows == self.expected[: len(rows)], story
        assert codes[self.rank] in (0, 10), story
        if codes[self.rank] == 0:
            assert codes == [0] * self.size, story
            assert "WARNING: " in told or kind == "half" or all(call.silent for call in refused), (
                story
            )
            return "a save left out" if LEFT_OUT.search(log) else "nothing lost"
        words = "Input/output error" if kind == "EIO" else "No space left"
        assert words in told, story
        error = run.attempt(1).error(self.rank)
        assert not error.exists() or (
            json.loads(error.read_text())["exit"] == 10
            and words in json.loads(error.read_text())["message"]
        ), story
        reached = max(map(int, MADE.findall(log)), default=0)  # rows on disk may be fewer
        # in between only the second save in a row that fails ends a run
        assert reached in (0, LAST) or LEFT_OUT.search(log), story
        return "ended later" if reached else "ended before step 1"


@pytest.mark.timeout(180)
def test_some_calls(ranks: Ranks, tmp_path: Path) -> None:
    """Some of each kind, where what comes of it is known; the slow tests below try all of them."""
    sweep = Sweep("1", tmp_path, ranks)
    for kind, what, n, came in SOME:
        assert sweep.fail(Call(what, n), kind) == came, f"{kind} at {what}"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("layout", "rank", "save_async"),
    [("1", 0, False), ("1", 0, True), ("DP2", 0, False), ("DP2", 1, False)],
)
def test_every_call(
    layout: str,
    rank: int,
    save_async: bool,
    kind: str,
    ranks: Ranks,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A row of the table of docs/checkpoints.md."""
    sweep = Sweep(layout, tmp_path, ranks, rank, save_async=save_async)
    came = Counter(sweep.fail(call, kind) for call in sweep.calls_for(kind))
    saves = "behind training" if save_async else "in its way"
    with capsys.disabled():
        print(f"\n| layout, rank | saves | the disk | calls | {' | '.join(OUTCOMES)} |")
        print(
            f"| {layout}, {rank} | {saves} | {kind} | {came.total()} |"
            f" {' | '.join(str(came[outcome]) for outcome in OUTCOMES)} |"
        )
