"""The drill of a job: two short runs of it, of their own, one of which is hurt again and again.
Does it go on by itself, how soon, and are its numbers those of the other one?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.experiment.cancel import cancel_run
from trainkit.experiment.follow import GOING
from trainkit.experiment.options import TrainOptions
from trainkit.experiment.start import plan_new_run, prepare, submit
from trainkit.jobs.load import Jobs
from trainkit.jobs.notify import NotifySettings
from trainkit.launch.preparation import StageUi
from trainkit.launch.scheduler_contract import Start
from trainkit.launch.scheduler_registry import current
from trainkit.rehearse.harm import FAULTS, NOT_MADE, Harm, NotMade, Victim
from trainkit.reports.faults import FaultCost, build_faults
from trainkit.reports.ledger import STEPS
from trainkit.reports.read import read_run_times
from trainkit.runs.checkpoints import published_folders, step_of
from trainkit.runs.events import AttemptEnded, HostSwept, events_of, last_event, read_events
from trainkit.runs.folder import AttemptFolder, RunFolder
from trainkit.runs.metrics import newest_row, read_rows, taken_back_path
from trainkit.runs.phases import read_phases
from trainkit.runs.record import read_run_record

ROOM = 20_000  # steps that are more than any drill makes
SAVE_INTERVAL = 10
# the run goes on however often it is hurt, on the same hosts, which nobody else is kept from
SETTINGS = (
    "retry.infra=1000",
    "retry.hang=1000",
    "retry.same_step=1000",
    "retry.shrink=false",
    "cluster.quarantine_seconds=0",
)
RECOVERY_SECONDS = 300.0  # for a fault that is known to be recovered from
POLL_SECONDS = 0.2
NO_COPIES = "the job keeps none: checkpoint.memory_interval"
AFTER = 3  # steps that are made after the last fault
Say = Callable[[str], None]
Numbers = Mapping[tuple[int, str], set[tuple[object, object]]]


@dataclass(frozen=True)
class Score:
    """How one fault went; times None where it did not come so far.

    Args:
        fault: its name.
        error: why it could not be made, or was not recovered from; "": neither.
        made: it was made.
        at: when, seconds since 1970.
        attempt: that it ended.
        detected: seconds until the supervisor knew of it.
        recovered: seconds until the first step that was made again began.
        steps_lost: that had to be made again.
        source: what training went on from.
        equal: all numbers from there to the next fault are those of the other run.
        left: processes that outlived the attempt, and hosts that could not say.
    """

    fault: str
    error: str = ""
    made: bool = False
    at: float | None = None
    attempt: int = 0
    detected: float | None = None
    recovered: float | None = None
    steps_lost: int | None = None
    source: str = ""
    equal: bool | None = None
    left: Sequence[str] = ()

    @property
    def good(self) -> bool:
        """Nothing is wrong, as far as it was made."""
        return not self.made or not (self.error or self.left or self.equal is False)


@dataclass(frozen=True)
class DrillReport:
    """The score card, the run that was hurt and the one that was not, and what is left of them."""

    scores: Sequence[Score]
    run: RunFolder
    reference: RunFolder | None
    left: Sequence[str]

    @property
    def exit(self) -> Exit:
        """DONE, or HEALTH where any fault that was made went otherwise than it should."""
        good = all(score.good for score in self.scores) and not self.left
        return Exit.DONE if good else Exit.HEALTH

    def to_json(self) -> dict[str, object]:
        return document(
            "drill/1",
            run=self.run.id,
            reference=self.reference and self.reference.id,
            exit=int(self.exit),
            left=list(self.left),
            faults=[{**vars(score), "good": score.good} for score in self.scores],
        )


def plan_drill(jobs: Jobs, name: str, options: TrainOptions) -> Start:
    """Check a job and choose its hosts. Nothing is written.

    Args:
        jobs: those of a jobs.toml.
        name: of the job.
        options: how its runs are started.

    Raises TrainkitError as `plan_new_run`, and ConfigError for a job that no drill can be made of.
    """
    job = jobs.resolve(name, options.overrides()).job
    if not job.is_native:
        raise ConfigError(
            f"job '{name}' has engine {job.engine}: whether its numbers are the same after a fault"
            " is not known",
            hint="a drill is for engine native",
        )
    if not (job.cluster.launcher_traits.hostfile or job.cluster.launcher_traits.one_machine):
        raise ConfigError(
            f"cluster '{job.cluster.name}' has launcher {job.cluster.launcher}: a drill reaches"
            " hosts by itself",
            hint="--cluster with launcher local, ssh or pdsh",
        )
    if job.training.save_interval is None:
        raise ConfigError(
            f"job '{name}' saves only at its end: it would begin again after each fault",
            hint="training.save_interval = STEPS",
        )
    given = {text.split("=")[0].strip() for text in options.set}
    own = [
        *SETTINGS,
        f"training.save_interval={SAVE_INTERVAL}",
        f"training.train_iters={max(ROOM, job.training.train_iters)}",
    ]
    sets = (*(text for text in own if text.split("=")[0] not in given), *options.set)
    options = replace(options, set=sets, detach=True)
    return plan_new_run(jobs, jobs.resolve(name, options.overrides()), options)


def _apart(start: Start) -> Start:
    """The start with a name and a record of its own; it sends no notifications."""
    own = {"name": f"{start.job.name}-drill", "notify": NotifySettings(), "wandb": None}
    job = start.job.model_copy(update=own)
    return replace(start, job=job, document={**start.document, "job": job.model_dump(mode="json")})


class Drill:
    """A drill that is under way.

    Args:
        start: of its runs, as `plan_drill` gives it.
        ui: how a person follows the stages that have to be made.
        say: prints one line.
    """

    def __init__(self, start: Start, ui: StageUi, say: Say) -> None:
        self.start = _apart(prepare(start, ui))
        self.say = say
        self.limit = RECOVERY_SECONDS + start.job.cluster.watch.heartbeat

    def conduct(self) -> DrillReport:
        """All of it; nothing is left running, also where a person interrupts it. Raises
        TrainkitError where the run ended before any fault was made."""
        run = submit(self.start).run
        self.say(f"run {run.id} is the one that is hurt")
        scores: list[Score] = []
        left: list[str] = []
        reference = None
        try:
            for fault in FAULTS:
                scores.append(self._hurt(run, fault))
                if scores[-1].made and scores[-1].error:
                    _refuse_unhurt(run, scores)
                    break
            last = _step(run) + AFTER
            self._until(run, lambda: _step(run) >= last)
        finally:
            left += _end(run, self.say)
        last = _step(run)
        if any(score.made for score in scores):
            reference = submit(self.start).run
            self.say(f"run {reference.id} is left alone, for {last} steps")
            try:
                self._until(reference, lambda: _step(reference) >= last, self.limit + last)
            finally:
                left += _end(reference, self.say)
        judged = _judge(scores, run, reference)
        skipped = [Score(name, why) for name, why in NOT_MADE.items()]
        return DrillReport([*judged, *skipped], run, reference, left)

    def _until(
        self, run: RunFolder, ready: Callable[[], bool], seconds: float | None = None
    ) -> bool:
        """Wait; False where the run has ended, or it lasts too long."""
        deadline = time.monotonic() + (seconds or self.limit)
        while time.monotonic() < deadline:
            if ready():
                return True
            time.sleep(POLL_SECONDS)
            if current(read_run_record(run)).state not in GOING:
                return ready()
        return False

    def _hurt(self, run: RunFolder, fault: Harm) -> Score:
        """Make a fault once the run has saved since the last one, and wait until its steps are
        made again."""
        if fault.of_copies and self.start.job.checkpoint.memory_interval is None:
            return Score(fault.name, NO_COPIES)
        if not self._until(run, lambda: _is_steady(run)):
            return Score(fault.name, "the run did not come so far", made=True)
        attempt = run.attempts()[-1].number
        self.say(f"step {_step(run)}: {fault.words}")
        try:
            at = Victim(run, self.start.job, self.start.hosts.hosts).do(fault.line, fault.seconds)
        except NotMade as error:
            return Score(fault.name, str(error))
        score = Score(fault.name, made=True, at=at, attempt=attempt if fault.ends_attempt else 0)
        if not fault.ends_attempt:
            step = _step(run)
            recovered = self._until(run, lambda: _step(run) > step)
            same = run.attempts()[-1].number == attempt
            return score if recovered and same else replace(score, error="the run was disturbed")
        if not self._until(run, lambda: _goes_on(run.attempts()[-1], attempt)):
            return replace(score, error="the run did not go on")
        return score


def _refuse_unhurt(run: RunFolder, scores: Sequence[Score]) -> None:
    record = read_run_record(run)
    if record.exit and all(score.at is None for score in scores):
        cause = (record.root_cause or {}).get("message", "no reason is recorded")
        raise TrainkitError(
            f"run {run.id} ended before it was hurt: {cause}",
            exit=Exit(record.exit),
            hint=f"invoke why {run.id}",
        )


def _step(run: RunFolder) -> int:
    row = newest_row(run.metrics)
    return row["step"] if row else 0


def _is_steady(run: RunFolder) -> bool:
    """Whether the newest attempt has saved, and made a step since."""
    attempts = run.attempts()
    saves = [each.step for each in read_phases(attempts[-1]) if each.phase == "save"]
    saved = max(map(step_of, published_folders(run.checkpoints)), default=0) if attempts else 0
    return bool(saves) and saved >= saves[0] and _step(run) > saved


def _goes_on(attempt: AttemptFolder, failed: int) -> bool:
    """Whether it comes after the one that failed, and is where that one was."""
    steps = [each.phase for each in read_phases(attempt) if each.phase in STEPS]
    return attempt.number > failed and bool(steps) and steps[-1] == "train"


def _end(run: RunFolder, say: Say) -> list[str]:
    """End a run; what is left of it."""
    ended = cancel_run(run, save=False, force=False, say=say)
    return [
        f"{host.host}: {host.left if host.answered else 'did not answer'}"
        for host in ended.hosts or ()
        if host.left or not host.answered
    ]


def _numbers(run: RunFolder) -> Numbers:
    """Loss and norm of each row, in all their bits; of steps that were lost too."""
    found: dict[tuple[int, str], set[tuple[object, object]]] = {}
    for path in (run.metrics, taken_back_path(run.metrics)):
        for row in read_rows(path):
            key = row["step"], row.get("eval", "")
            found.setdefault(key, set()).add((row["lm_loss"], row.get("grad_norm")))
    return found


def _judge(scores: Sequence[Score], run: RunFolder, reference: RunFolder | None) -> list[Score]:
    """The scores with what the records of both runs say."""
    bills = {bill.attempt: bill for bill in build_faults(read_run_times(read_run_record(run)))}
    hurt = _numbers(run)
    alone = _numbers(reference) if reference else {}
    judged = []
    begin = 0
    for number, score in enumerate(scores):
        bill = bills.get(score.attempt)
        if bill is not None and bill.step is not None:
            begin = bill.step
        later = (bills.get(each.attempt) for each in scores[number + 1 :])
        end = next((each.reached for each in later if each and each.step is not None), None)
        steps = [key for key in hurt.keys() & alone if begin < key[0] <= (end or key[0])]
        equal = all(hurt[key] == alone[key] for key in steps) if score.made and steps else None
        judged.append(replace(_with_bill(score, bill, run) if bill else score, equal=equal))
    return judged


def _with_bill(score: Score, bill: FaultCost, run: RunFolder) -> Score:
    """The score of a fault that ended an attempt, with what that cost and left."""
    assert score.at is not None
    begin = bill.time - score.at  # an agent that is killed was heard before
    events = read_events(run.attempt(score.attempt))
    swept = {each.host for each in events_of(events, HostSwept) if not (each.error or each.left)}
    ended = last_event(events, AttemptEnded) or AttemptEnded(0, None)
    left = [f"{each['host']}: pid {each['pid']}" for each in ended.survivors]
    left += [f"{host} did not say" for host in ended.unanswered if host not in swept]
    recovered = None
    if bill.step is not None:
        recovered = begin + bill.total - bill.seconds["repeat"]
    return replace(
        score,
        detected=max(0.0, begin + bill.seconds["detection"]),  # clocks are known to some 10 ms
        recovered=recovered,
        steps_lost=bill.steps_lost,
        source=bill.source,
        left=left,
    )
