"""The task `logs`: what ranks printed, one or several, of one attempt."""

from __future__ import annotations

import collections
import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from invoke.exceptions import Exit as InvokeExit

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.files import part_before
from trainkit.base.printable import printable
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.run.summary import last_lines
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.launch.slurm.reconcile import output_of
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.record import find_run, read_events, read_record

FAILED = "failed"
MOST = 10**6  # ranks that one word may name
LOOK_SECONDS = 0.2


def logs(
    task: TaskContext, words: str, rank: str, node: str, attempt: int, *, follow: bool, lines: int
) -> TaskResult:
    """The task `logs`."""
    if follow and task.json:
        raise ConfigError(
            "--follow and --json contradict each other",
            hint="one document is printed when all of it is known: leave out --follow",
        )
    if rank in ("", FAILED):
        wanted = None
    else:
        wanted = _numbers(rank)
    run = find_run(load_jobs(task).roots(), words)
    chosen = _attempt(run, attempt)
    events = read_events(chosen)
    hosts = {event["rank"]: event["host"] for event in events if event["event"] == "rank_started"}
    if node and node not in hosts.values():
        said = _transport(run, chosen, node, sorted(set(hosts.values())), lines)
        task.say(f"no rank was started on {node}; its connection said:")
        for line in () if task.json else said:
            task.say(line)
        return _answer(run, chosen, [{"rank": None, "host": node, "lines": said}])
    if rank == FAILED:
        wanted = {
            event["rank"]
            for event in events
            if event["event"] == "rank_ended"
            and not event["stopped"]
            and not event["done"]
            and event["code"] != 0
        }
        if not wanted:
            task.say(f"no rank of attempt {chosen.number} of run {run.id} failed by itself")
            return _answer(run, chosen, [])
    if node:
        wanted = {
            r for r, host in hosts.items() if host == node and (wanted is None or r in wanted)
        }
    ranks = sorted({0} if wanted is None else wanted)
    paths = {r: chosen.log(r) for r in ranks}
    if missing := [r for r, path in paths.items() if not path.is_file()]:
        there = sorted(int(p.stem) for p in chosen.log(0).parent.glob("*.log"))
        raise ConfigError(
            f"run {run.id} has no log of rank {missing[0]}",
            hint=f"ranks with a log: {_spans(there) or 'none'}",
        )
    tails = [_Tail(path, f"[{r}] " if len(paths) > 1 else "") for r, path in paths.items()]
    told = []
    for rank_of, tail in zip(ranks, tails, strict=True):
        last = tail.last(lines or sys.maxsize, torn=not follow)
        told.append({"rank": rank_of, "host": hosts.get(rank_of), "lines": last})
        for line in () if task.json else last:
            task.say(f"{tail.prefix}{line}")
    if follow:
        _follow(run, tails)
    return _answer(run, chosen, told)


def _answer(run: RunFolder, attempt: AttemptFolder, told: list[dict[str, Any]]) -> TaskResult:
    return TaskResult(document("logs/1", run=run.id, attempt=attempt.number, logs=told))


def _numbers(text: str) -> set[int]:
    """Ranks from "0,8-15". Ends the task as a wrong number does elsewhere."""
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part.strip())
        if match:
            first = int(match.group(1))
            last = int(match.group(2) or match.group(1))
        else:
            first = 1
            last = 0
        if last < first or last >= MOST:
            raise InvokeExit(
                f"error: --rank takes ranks such as 3 or 0,8-15, or the word {FAILED}, not"
                f" {text!r}",
                code=Exit.USAGE,
            )
        found |= set(range(first, last + 1))
    return found


def _spans(ranks: list[int]) -> str:
    """0-3, 8."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _attempt(run: RunFolder, number: int) -> AttemptFolder:
    attempts = run.attempts()
    if number:
        chosen = [a for a in attempts if a.number == number]
    else:
        chosen = attempts[-1:]
    if not chosen:
        if (output := output_of(run)) is not None and output.is_file():
            said = f"; what its batch script printed is in {output}"
        else:
            said = ""
        hint = f"attempts: {', '.join(str(a.number) for a in attempts) or 'none'}{said}"
        raise ConfigError(f"run {run.id} has no attempt {number or ''}".rstrip(), hint=hint)
    return chosen[0]


def _transport(
    run: RunFolder, attempt: AttemptFolder, node: str, hosts: list[str], lines: int
) -> list[str]:
    """What ssh or pdsh said of a host on which no rank was started. Raises ConfigError for a
    host that the attempt did not have."""
    path = attempt.transports / f"{node.replace(os.sep, '_')}.log"
    if not path.is_file():
        there = sorted({*hosts, *(p.stem for p in attempt.transports.glob("*.log"))})
        raise ConfigError(
            f"attempt {attempt.number} of run {run.id} had no host '{node}'",
            hint=f"its hosts: {', '.join(there) or 'none'}",
        )
    return last_lines(path, lines or sys.maxsize)


class _Tail:
    """The end of one log, which may begin anew meanwhile (`part_before`). Beside others it is
    told in whole lines."""

    def __init__(self, path: Path, prefix: str) -> None:
        self.path = path
        self.prefix = prefix
        self.offset = 0
        self.file = 0  # the inode that the offset is of

    def last(self, count: int, *, torn: bool) -> list[str]:
        """The last lines; `torn`: with a last one that has no end yet, else `new` gives it
        later."""
        lines: collections.deque[bytes] = collections.deque(maxlen=count)
        with contextlib.suppress(FileNotFoundError), open(part_before(self.path), "rb") as before:
            lines.extend(before)
        with open(self.path, "rb") as file:
            self.file = os.fstat(file.fileno()).st_ino
            for line in file:
                if torn or line.endswith(b"\n"):
                    self.offset += len(line)
                    lines.append(line)
        return [printable(line.decode(errors="replace").rstrip("\n")) for line in lines]

    def new(self, *, torn: bool) -> str:
        """What has come since."""
        with open(self.path, "rb") as file:
            anew = (now := os.fstat(file.fileno()).st_ino) != self.file
            if anew:
                rest = self._rest()
                start = 0
            else:
                rest = b""
                start = self.offset
            file.seek(start)
            data = rest + file.read()
        if self.prefix and not torn:
            data = data[: data.rfind(b"\n") + 1]
        if len(data) < len(rest):
            return ""  # the new part has not a whole line yet
        self.file = now
        self.offset = start + len(data) - len(rest)
        text = printable(data.decode(errors="replace"))
        if self.prefix and text:
            return "".join(f"{self.prefix}{line}\n" for line in text.removesuffix("\n").split("\n"))
        return text

    def _rest(self) -> bytes:
        """What the part that was put aside has beyond what was told; nothing where another has
        taken its place since."""
        with contextlib.suppress(FileNotFoundError), open(part_before(self.path), "rb") as before:
            if os.fstat(before.fileno()).st_ino == self.file:
                before.seek(self.offset)
                return before.read()
        return b""


def _follow(run: RunFolder, tails: list[_Tail]) -> None:
    """Print what is new until the run has ended."""
    while True:
        running = read_record(run).state in ("starting", "running")
        texts = [text for tail in tails if (text := tail.new(torn=not running))]
        sys.stdout.write("".join(texts))
        sys.stdout.flush()
        if not texts and not running:
            return
        time.sleep(LOOK_SECONDS)
