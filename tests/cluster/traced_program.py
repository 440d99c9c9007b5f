"""Runs a supervisor, or rank 0, as it is, and writes down by a clock of the test's own when it
enters and leaves what a ledger is about: traced_program.py FOLDER -I PROGRAM WORDS...

A line of FOLDER/NUMBER.jsonl is {"at": seconds of CLOCK_MONOTONIC, which all processes of a machine
share, "what", "step", "seconds"}. FOLDER/does.json says at which step of an attempt rank 0 stands
still ("stand"), or finds its weights spoilt ("spoil").
"""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DATA_SECONDS = 0.02  # that a micro-batch takes longer
COPY_SECONDS = 0.2  # and what a checkpoint is written from
EVALUATION_SECONDS = 0.2


class Trace:
    """The file of this process."""

    def __init__(self, folder: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._handle = os.open(folder / f"{time.monotonic_ns()}.jsonl", flags, 0o666)

    def note(self, what: str, step: int = -1, seconds: float = 0.0, **more: object) -> None:
        line = {"at": time.monotonic(), "what": what, "step": step, "seconds": seconds, **more}
        os.write(self._handle, json.dumps(line).encode() + b"\n")

    def around(self, owner: Any, name: str, what: str) -> None:
        """Write down when a method is entered and left."""
        original = getattr(owner, name)

        def traced(self_: Any, *args: Any, **kwargs: Any) -> Any:
            step = getattr(self_, "step", -1)
            self.note(f"enter {what}", step)
            began = time.monotonic()
            try:
                return original(self_, *args, **kwargs)
            finally:
                self.note(f"leave {what}", step, time.monotonic() - began)

        setattr(owner, name, traced)


def trace_supervisor(trace: Trace) -> None:
    from trainkit.runs.events import Event, EventLog

    write = EventLog.write_soon

    def traced(self: EventLog, event: Event) -> None:
        rank = getattr(event, "rank", -1)
        trace.note(f"enter {event.name}", rank=rank)
        write(self, event)
        trace.note(f"leave {event.name}", rank=rank)

    EventLog.write_soon = traced  # type: ignore[method-assign]


def trace_rank(trace: Trace, does: dict[str, int]) -> None:
    """Rank 0; it is also made slower where there would be too little to measure."""
    # as the trainer does before torch begins threads, which inherit it
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
    from trainkit.train.checkpoint import manager
    from trainkit.train.checkpoint.manager import CheckpointManager
    from trainkit.train.metrics.heartbeat import Heartbeat
    from trainkit.train.trainer import Trainer
    from trainkit.train.validation import Validator

    for name in ("train_step", "evaluate", "save", "_roll_back", "_load_newest", "train"):
        trace.around(Trainer, name, name)
    trace.around(Trainer, "_before_update", "outer wait")
    trace.around(CheckpointManager, "wait_for_staging", "inner wait")
    trace.around(CheckpointManager, "save", "write")
    trace.around(Heartbeat, "_say_done", "done")
    slower(manager, "_copy", COPY_SECONDS)
    slower(Validator, "measure", EVALUATION_SECONDS)
    trace.around(Validator, "measure", "measure")
    trace_data(trace)
    trace_steps(trace, does)


def slower(owner: Any, name: str, seconds: float) -> None:
    original = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return original(*args, **kwargs)

    setattr(owner, name, slow)


def trace_data(trace: Trace) -> None:
    """What a step waits for its micro-batches, from within and from without."""
    from trainkit.train.batches import Feed
    from trainkit.train.metrics.timers import Timers

    read = Feed.read

    def traced(self: Feed, consumed: int, global_batch: int) -> Iterator[Any]:
        batches = read(self, consumed, global_batch)
        while True:
            began = time.monotonic()
            time.sleep(DATA_SECONDS)
            with contextlib.suppress(StopIteration):
                batch = next(batches)
                if self.split == "train":
                    trace.note("inner data", seconds=time.monotonic() - began)
                yield batch
                continue
            return

    Feed.read = traced  # type: ignore[method-assign]
    begin = Timers.begin
    end = Timers.end
    since = [0.0]

    def traced_begin(self: Timers, phase: Any) -> None:
        since[0] = time.monotonic()
        begin(self, phase)

    def traced_end(self: Timers) -> None:
        phase = self._open and self._open.phase
        end(self)
        if phase == "data":
            trace.note("outer data", seconds=time.monotonic() - since[0])

    Timers.begin = traced_begin  # type: ignore[method-assign]
    Timers.end = traced_end  # type: ignore[method-assign]


def trace_steps(trace: Trace, does: dict[str, int]) -> None:
    """A step's work begins; where it is to stand, it beats like one that takes long."""
    from trainkit.train.trainer import Trainer
    from trainkit.train.update.step import Step

    trainers: list[Trainer] = []
    begin = Trainer._train
    run = Step.run

    def begun(self: Trainer) -> None:
        trainers.append(self)
        begin(self)

    def traced(self: Step, *args: Any, **kwargs: Any) -> Any:
        (trainer,) = trainers
        trace.note("work", trainer.step)
        while trainer.step == does.get("stand"):
            trace.note("stands", trainer.step)
            trainer.heartbeat.beat("train", trainer.step)
            time.sleep(0.02)
        if trainer.step == does.get("spoil"):
            del does["spoil"]
            spoil(self)
        return run(self, *args, **kwargs)

    Trainer._train = begun  # type: ignore[method-assign]
    Step.run = traced  # type: ignore[method-assign]


def spoil(step: Any) -> None:
    import torch

    with torch.no_grad():
        next(iter(step.parameters.values())).fill_(float("nan"))


def main() -> None:
    folder = Path(sys.argv[1])
    program = Path(sys.argv[3])
    sys.argv[:] = sys.argv[3:]
    package = next(each for each in program.parents if each.name == "trainkit")
    sys.path.insert(0, str(package.parent))
    if package / "launch" in program.parents:
        trace = Trace(folder)
        trace_supervisor(trace)
    elif os.environ.get("RANK") == "0":
        does = json.loads((folder / "does.json").read_text())
        trace = Trace(folder)
        trace.note("attempt", int(sys.argv[-1]))
        trace_rank(trace, does.get(sys.argv[-1], {}))
    runpy.run_path(str(program), run_name="__main__")


if __name__ == "__main__":
    main()
