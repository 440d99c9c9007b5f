"""How an engine ended: success is the last iteration and a whole checkpoint of it, never an exit
code."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass
from trainkit.engines.rank.readings import EngineReader, FoundCheckpoint
from trainkit.engines.rank.spec import RankSpec

# torch/distributed/elastic/multiprocessing/errors: how torchrun tells of the rank that failed first
ROOT_CAUSE = re.compile(
    r"Root Cause \(first observed failure\):.*?^\s*exitcode\s*: (-?\d+) ", re.DOTALL | re.MULTILINE
)
# how srun does of a task: slurm/src/srun/libsrun/launch.c, task_state
FIRST_TASK = re.compile(
    r"^.*\bsrun: error: \S+: tasks? [\d,-]+: (?:Exited with exit code (\d+)|Killed)", re.MULTILINE
)
USER = 9
PREEMPTED = 12
POLL_SECONDS = 0.2
TAIL = 64 << 10  # bytes of metrics.jsonl that are looked at
ERROR_LINE = re.compile(
    r"(?:^|[\s:\]])((?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)): ?(.*)$"
)


@dataclass(frozen=True)
class EngineEnd:
    """What is known of an engine's process that has ended.

    Args:
        code: its exit code, negative for a signal.
        began_at: the iteration of the checkpoint that it began from; 0: none.
        asked_to_save: it was asked to save and leave.
        last_iteration: that it printed here; None: this rank prints none, or it made none.
        last_lines: what it printed last.
    """

    code: int
    began_at: int
    asked_to_save: bool
    last_iteration: int | None
    last_lines: list[str]


@dataclass(frozen=True)
class Verdict:
    """Why a rank has not succeeded.

    Args:
        exit: the rank's exit code.
        type: the kind of error; "" where it is none.
        message: what happened, in words; "" where there is nothing to say.
    """

    exit: int
    type: str
    message: str


def script_name(spec: RankSpec) -> str:
    """The engine's program, as people know it."""
    return next((Path(word).name for word in spec.argv if word.endswith(".py")), spec.argv[0])


def judge_end(spec: RankSpec, reader: EngineReader, end: EngineEnd) -> Verdict | None:
    """None for success, else why it is none."""
    script = script_name(spec)
    if end.asked_to_save:
        return _judge_stop(spec, reader, end)
    if end.code != 0:
        return judge_failure(script, end)
    return _judge_zero(spec, reader, end, script)


def _judge_stop(spec: RankSpec, reader: EngineReader, end: EngineEnd) -> Verdict | None:
    """It was asked to save and leave: 12 only where a checkpoint of now is there."""
    if not spec.saves and end.code == 0 and last_iteration(spec, end) >= spec.train_iters:
        return None
    tracked = _tracked(spec, reader, end.began_at + 1)
    if tracked == spec.train_iters and not _problems(spec, reader, tracked):
        return None
    if end.code == 0 and _has_saved(spec, reader, end, tracked):
        return Verdict(PREEMPTED, "", "")
    return Verdict(0, "", "")


def _has_saved(spec: RankSpec, reader: EngineReader, end: EngineEnd, tracked: int | None) -> bool:
    """Whether there is a whole checkpoint of where it left."""
    reached = max(end.last_iteration or 0, end.began_at + 1)
    return tracked is not None and tracked >= reached and not _problems(spec, reader, tracked)


def judge_failure(script: str, end: EngineEnd) -> Verdict:
    """It ended with another code than 0."""
    kind, message = last_error(end.last_lines)
    if end.code < 0:
        return Verdict(USER, kind, "")
    if not message:
        message = f"{script} ended with {end.code} and said no error"
    return Verdict(USER, kind or "EngineError", message)


def first_code(lines: list[str], code: int) -> int:
    """The exit code of the rank that failed first of those that torchrun or srun started, negative
    for a signal: torchrun itself ends with 1 whatever happened to them, srun with the code of one
    of those that it ended for it.

    Args:
        lines: what it printed last.
        code: its own exit code, which stands where it names no rank.
    """
    text = "\n".join(lines)
    found = ROOT_CAUSE.search(text) or FIRST_TASK.search(text)
    if code <= 0 or found is None:
        return code
    if not found[1]:
        return -signal.SIGKILL
    first = int(found[1])
    # the task is a shell, which says so of a signal that ended its program
    if found.re is FIRST_TASK and 128 < first < 128 + signal.NSIG:
        return 128 - first
    return first


def _judge_zero(
    spec: RankSpec, reader: EngineReader, end: EngineEnd, script: str
) -> Verdict | None:
    """It ended with 0 by itself."""
    if not spec.saves:
        return _judge_unsaved(spec, end, script)
    if end.last_iteration is not None and end.last_iteration < spec.train_iters:
        # a line is printed every log_interval iterations only
        behind = spec.train_iters - end.last_iteration >= spec.log_interval
    else:
        behind = False
    tracked = _tracked(spec, reader, spec.train_iters)
    if tracked == spec.train_iters and not behind:
        problems = _problems(spec, reader, tracked)
        if not problems:
            return None
        return Verdict(
            USER,
            "DamagedCheckpoint",
            f"{script} ended with 0, but its last checkpoint is not whole: {'; '.join(problems)}",
        )
    if spec.ends_in_time and _has_saved(spec, reader, end, tracked):
        return Verdict(PREEMPTED, "", "")
    reached = f"after iteration {max(end.last_iteration or 0, end.began_at)} of {spec.train_iters}"
    if tracked is None:
        saved = f"no checkpoint in {spec.checkpoints}"
    else:
        saved = f"its last checkpoint is of iteration {tracked}"
    return Verdict(
        USER,
        "EngineEndedEarly",
        f"{script} ended with 0 {reached}, and {saved}: training is not done",
    )


def _judge_unsaved(spec: RankSpec, end: EngineEnd, script: str) -> Verdict | None:
    """A run without checkpoints: its last iteration must have been printed, by any rank."""
    deadline = time.monotonic() + spec.seen_seconds
    while True:
        reached = last_iteration(spec, end)
        if reached >= spec.train_iters:
            return None
        if time.monotonic() > deadline:
            break
        time.sleep(POLL_SECONDS)
    message = f"{script} ended with 0 after iteration {reached} of {spec.train_iters}"
    return Verdict(USER, "EngineEndedEarly", f"{message}: training is not done")


def last_iteration(spec: RankSpec, end: EngineEnd) -> int:
    """The last iteration that this rank printed, or the one that did, by the rows it wrote."""
    last = max(end.last_iteration or 0, end.began_at)
    try:
        with open(spec.metrics, "rb") as file:
            file.seek(max(0, os.path.getsize(spec.metrics) - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return last
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:  # the first may begin in its middle
            continue
        if isinstance(row, dict) and "eval" not in row:
            last = max(last, int(row.get("step") or 0))
    return last


def _tracked(spec: RankSpec, reader: EngineReader, wanted: int) -> int | None:
    """The iteration of the newest checkpoint, waiting a little for one of `wanted` or later."""
    deadline = time.monotonic() + spec.seen_seconds
    while True:
        tracked = reader.tracked_step(Path(spec.checkpoints))
        if tracked is not None and tracked >= wanted:
            return tracked
        if time.monotonic() > deadline:
            return tracked
        time.sleep(POLL_SECONDS)


def _problems(spec: RankSpec, reader: EngineReader, step: int) -> list[str]:
    """What is wrong with the checkpoint of an iteration."""
    found: list[FoundCheckpoint] = reader.found_checkpoints(Path(spec.checkpoints))
    for checkpoint in found:
        if checkpoint.step == step:
            return list(checkpoint.problems)
    return [f"no checkpoint of iteration {step}"]


def last_error(lines: list[str]) -> tuple[str, str]:
    """(type, message) of the last exception in a program's output; ("", "") where there is none."""
    for line in reversed(lines):
        match = ERROR_LINE.search(line)
        if match:
            return match[1].rpartition(".")[2], match[2].strip() or match[1]
        if line.startswith("AssertionError"):
            return "AssertionError", line
    return "", ""
