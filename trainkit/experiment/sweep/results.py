"""Reads what the runs of a sweep have come to."""

from __future__ import annotations

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
    members = [_result(each, by_number.get(each.number)) for each in record.members]
    return SweepResults(record.id, record.job, record.folder, members)


def _result(member: Member, record: RunRecord | None) -> MemberResult:
    if record is None:
        return MemberResult(member.number, member.values, "", "waiting")
    rows = read_thinned(record.run.metrics)
    summary = RunSummary(record.run, rows.rows, rows.regular)
    training = summary.training_loss()
    validation = summary.validation_loss()
    message = str((record.root_cause or {}).get("message") or "")
    return MemberResult(
        member.number,
        member.values,
        record.run.id,
        _state(record, message),
        record.step,
        training and training[1],
        validation and validation[1],
        summary.tokens_per_second,
        message.partition(";")[0].partition("\n")[0],  # `invoke why` has all of it
        record.failure_class == "user",
    )


def _state(record: RunRecord, message: str) -> MemberState:
    if record.state == "failed" and record.failure_class == "user" and LOSS in message:
        return "diverged"
    return record.state
