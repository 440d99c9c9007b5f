"""The rows that rank 0 writes are the rows that `runs.metrics` reads: each lists the keys, since a
reader needs no engine."""

from dataclasses import fields
from typing import Required, get_origin, get_type_hints

from trainkit.runs.metrics import MetricsRow
from trainkit.train.metrics.records import EvaluationRecord, Throughput, TrainingRecord


def names(record: type) -> set[str]:
    return {field.name for field in fields(record)}


def test_the_reader_knows_every_key_that_is_written_and_no_other() -> None:
    training = names(TrainingRecord) - {"throughput"} | names(Throughput)
    evaluation = EvaluationRecord(1, 2, "valid", 3.0).to_json().keys()
    assert training | evaluation == get_type_hints(MetricsRow).keys()
    hints = get_type_hints(MetricsRow, include_extras=True)
    in_each = {key for key, hint in hints.items() if get_origin(hint) is Required}
    assert training & evaluation == in_each


def kind(hint: object) -> str:
    """A type as both sides see it: a table is read as a dict, and null for a number that is not
    finite."""
    text = hint.__name__ if isinstance(hint, type) else str(hint)
    return text.replace("collections.abc.Mapping", "dict").removesuffix(" | None")


def test_keys_have_the_same_type_on_both_sides() -> None:
    hints = get_type_hints(TrainingRecord) | get_type_hints(Throughput)
    written = {name: hints[name] for name in names(TrainingRecord) | names(Throughput)}
    del written["throughput"]
    read = get_type_hints(MetricsRow)
    assert {key: kind(hint) for key, hint in written.items()} == {
        key: kind(read[key]) for key in written
    }
