"""metrics.jsonl survives torn lines, being cut and being followed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainkit.runs.metrics import MetricsTail, read_rows, truncate_metrics


def rows(*steps: int) -> str:
    return "".join(json.dumps({"step": step, "lm_loss": 1 / (step + 1)}) + "\n" for step in steps)


@pytest.mark.parametrize(
    "torn",
    [
        "",
        "{",
        '{"step": 3',
        '{"step": 3, "lm_loss": 0.25}',
        "\0\0\0\n",
        "[1]\n",
        '"step"\n',
        '{"lm_loss": 1}\n',
    ],
)
def test_a_torn_end_does_not_count_and_is_cut(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(rows(0, 1, 2) + torn)
    assert [row["step"] for row in read_rows(path)] == [0, 1, 2]
    truncate_metrics(path, 2)
    assert path.read_text() == rows(0, 1, 2)
    truncate_metrics(path, 1)
    assert path.read_text() == rows(0, 1)
    truncate_metrics(path, -1)
    assert path.read_text() == ""


def test_a_row_with_a_number_that_json_lacks_stays(tmp_path: Path) -> None:
    """As older ranks of other engines wrote them."""
    path = tmp_path / "metrics.jsonl"
    text = rows(0) + '{"step": 1, "lm_loss": NaN, "loss_scale": Infinity}\n' + rows(2)
    path.write_text(text)
    assert read_rows(path)[1] == {"step": 1, "lm_loss": None, "loss_scale": None}
    truncate_metrics(path, 2)
    assert path.read_text() == text


def test_no_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_metrics(path, 5)
    assert not path.exists() and read_rows(path) == [] and MetricsTail(path).new_rows() == []


def test_a_tail_sees_every_row_once_and_outlives_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_text(rows(0, 1) + '{"step": 2')
    assert [row["step"] for row in tail.new_rows()] == [0, 1]
    assert tail.new_rows() == []
    path.write_text(rows(0, 1, 2, 3))
    assert [row["step"] for row in tail.new_rows()] == [2, 3]
    truncate_metrics(path, 1)
    assert tail.new_rows() == []
    with open(path, "a") as file:
        file.write(rows(2, 3, 4))
    assert [row["step"] for row in tail.new_rows()] == [2, 3, 4]


def test_a_tail_tells_anew_what_was_written_anew(tmp_path: Path) -> None:
    """A rollback and more rows than before it, all between two looks: the file is longer than
    what was read of it."""
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    path.write_text(rows(*range(1, 7)))
    assert len(tail.new_rows()) == 6
    for times in (2, 3):
        truncate_metrics(path, 4)
        assert path.read_text() == rows(1, 2, 3, 4)
        with open(path, "a") as file:
            file.write(
                "".join(
                    json.dumps({"step": step, "lm_loss": times / 8}) + "\n" for step in (5, 6, 7, 8)
                )
            )
        assert [(row["step"], row["lm_loss"]) for row in tail.new_rows()] == [
            (step, times / 8) for step in (5, 6, 7, 8)
        ]
        assert tail.new_rows() == []
