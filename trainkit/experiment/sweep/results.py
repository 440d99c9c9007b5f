"""What the runs of a sweep have come to, and what is left to be done of them."""

from __future__ import annotations

from collections.abc import Sequence

from trainkit.experiment.follow import GOING
from trainkit.experiment.sweep.record import Member, SweepRecord
from trainkit.launch.scheduler_registry import current_all
from trainkit.reports.sweep import MemberResult, MemberState, SweepResults
from trainkit.runs.metrics import read_thinned
from trainkit.runs.record import RunRecord, read_run_record
from trainkit.runs.summary import RunSummary

LOSS = ": lm loss "  # of a trainer's last words where a loss ended it (train/update/loss_policy.py)


def results_of(record: SweepRecord) -> SweepResults:
    """Read the runs of a sweep."""
    runs = {each.number: run for each in record.members if (run := record.folder_of(each))}
    records = current_all([read_run_record(run) for run in runs.values()])
    by_number = dict(zip(runs, records, strict=True))
    members = [_result(record, each, by_number.get(each.number)) for each in record.members]
    return SweepResults(record.id, record.job, record.folder, members, record.rungs)


def _result(sweep: SweepRecord, member: Member, record: RunRecord | None) -> MemberResult:
    if record is None:
        return MemberResult(member.number, member.values, "", "waiting")
    rows = read_thinned(record.run.metrics)
    summary = RunSummary(record.run, rows.rows, rows.regular)
    training = summary.training_loss()
    evaluations = summary.evaluations()
    message = str((record.root_cause or {}).get("message") or "")
    return MemberResult(
        member.number,
        member.values,
        record.run.id,
        _state(sweep, member, record, message),
        record.step,
        training and training[1],
        evaluations[-1]["lm_loss"] if evaluations else None,
        summary.tokens_per_second,
        message.partition(";")[0].partition("\n")[0],  # `invoke why` has all of it
        record.failure_class == "user",
    )


def _state(sweep: SweepRecord, member: Member, record: RunRecord, message: str) -> MemberState:
    if record.state == "failed" and record.failure_class == "user" and LOSS in message:
        return "diverged"
    if record.state != "succeeded" or sweep.rung is None or record.step >= sweep.rungs[-1].step:
        return record.state
    if member.number not in sweep.active:
        return "stopped"
    return "paused" if record.step >= sweep.rung.step else "promoted"


def unfinished(members: Sequence[MemberResult], *, failed: bool) -> list[MemberResult]:
    """Those that have no run, one that a rung lets go on, or one that something else has ended.
    `failed`: also those that ended by their own fault."""
    ended = ("waiting", "promoted", "failed", "diverged", "cancelled", "preempted")
    return [each for each in members if each.state in ended and (failed or not each.own_fault)]


def work_of(record: SweepRecord, *, failed: bool) -> tuple[list[MemberResult], list[MemberResult]]:
    """(members to be started or gone on with, members that go on), of those that no rung has
    stopped; `failed`: see `unfinished`."""
    members = [each for each in results_of(record).members if each.number in record.active]
    going = [each for each in members if each.state in GOING]
    return unfinished(members, failed=failed), going
