"""What a person sees of a stage's units: speeds over all workers, lines where there is no
terminal, the table at the end."""

from __future__ import annotations

import io
import time
from typing import Any

import pytest
from rich.console import Console

from trainkit.cli.run.progress import TerminalStageReporter, dataset_table
from trainkit.stages.contract import Need, Unit

MB = 1_000_000


def reporter(*, terminal: bool = False) -> tuple[TerminalStageReporter, io.StringIO]:
    out = io.StringIO()
    return (
        TerminalStageReporter(
            Console(file=out, force_terminal=terminal, width=200, highlight=False)
        ),
        out,
    )


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that the test sets."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def units() -> list[Unit]:
    shards = [Unit(f"tokens-{i:05d}", (), {"do": "tokens"}, size=40 * MB) for i in range(2)]
    return [Unit("fetch-00000", (), {"do": "fetch"}, size=20 * MB, network=True), *shards]


def need(given: list[Unit]) -> Need:
    return Need("prep-data", "pile--gpt2", "pile", 1, {}, (), (), tuple(given))


def test_lines_where_there_is_no_terminal(clock: list[float]) -> None:
    """One every ten seconds: part done by size, shards, MB of text and tokens a second since the
    first shard, time left."""
    told, out = reporter()
    fetch, one, two = given = units()
    told.started(need(given), given)
    told.progress(fetch, 1.0)
    clock[0] += 10
    told.progress(one, 0.0)
    assert out.getvalue() == "  20% tokens-00000, about 40 s left\n"
    told.counted(one, {"tokens": 0, "text_bytes": 0})
    clock[0] += 5
    told.counted(one, {"tokens": 10 * MB, "text_bytes": 50 * MB})
    told.counted(two, {"tokens": 2 * MB, "text_bytes": 10 * MB})
    # totals of a unit, not what came since
    told.counted(two, {"tokens": 3 * MB, "text_bytes": 15 * MB})
    told.counted(fetch, {"tokens": 99 * MB, "text_bytes": 99 * MB})
    told.progress(one, 1.0)
    told.progress(two, 0.5)
    assert out.getvalue().count("\n") == 1  # five seconds later: nothing yet
    clock[0] += 5
    told.progress(two, 0.5)
    assert (
        out.getvalue().splitlines()[1]
        == "  80% 1/2 shards, 6.5 MB/s of text, 1.30 million tokens/s, about 5 s left"
    )
    told.progress(two, 1.0)
    told.finished(need(given))
    assert out.getvalue().splitlines()[2] == "  prep-data: 3 units done in 20.0 s"
    assert told.took == {"pile--gpt2": 20.0} and told.wrote == {
        "pile--gpt2": {"tokens": 13 * MB, "text_bytes": 65 * MB}
    }


def test_given_up_says_nothing_of_units_done(clock: list[float]) -> None:
    told, out = reporter()
    given = units()
    told.started(need(given), given)
    told.progress(given[0], 1.0)
    told.finished(need(given))
    assert out.getvalue() == ""


def test_a_bar_on_a_terminal() -> None:
    told, out = reporter(terminal=True)
    given = units()
    told.started(need(given), given)
    told.counted(given[1], {"tokens": 5, "text_bytes": 9})
    for unit in given:
        told.progress(unit, 1.0)
    told.finished(need(given))
    assert "2/2 shards" in out.getvalue() and "100%" in out.getvalue()


def test_many_units_cost_little() -> None:
    """Each change costs the same whatever the number of units."""
    told, _ = reporter()
    given = [Unit(f"tokens-{i}", (), {"do": "tokens"}) for i in range(30_000)]
    told.started(need(given), given)
    for unit in given:
        told.counted(unit, {"tokens": 1, "text_bytes": 2})
        told.progress(unit, 1.0)
    told.finished(need(given))
    assert told.wrote["pile--gpt2"] == {"tokens": 30_000, "text_bytes": 60_000}


def test_the_table() -> None:
    out = io.StringIO()
    made = {
        "name": "pile",
        "documents": 1234,
        "empty_documents": 2,
        "tokens": 5678,
        "text_bytes": 9_100_000,
        "rejects": 3,
        "left_out": {"too short": 7},
    }
    rows: list[dict[str, Any]] = [
        {**made, "seconds": 2.0, "mb_per_second": 4.55},
        {"name": "ready", "documents": 5, "tokens": 6},
        {"name": "a blend"},
    ]
    Console(file=out, width=200).print(dataset_table(rows))
    _, pile, ready, blend = out.getvalue().splitlines()
    assert pile.split() == [
        "pile",
        "1,234",
        "5,678",
        "9.1",
        "7",
        "too",
        "short,",
        "2",
        "empty",
        "3",
        "2.0",
        "4.5",
    ]
    assert ready.split() == ["ready", "5", "6", "none", "0"] and blend.split() == [
        "a",
        "blend",
        "none",
        "0",
    ]
