"""The page of a run: whole, readable, and nothing of the run's executes in it or asks anyone."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project
from tests.reports.drill import Drill, iso, three_kills
from trainkit.reports.chart import Chart, Series
from trainkit.reports.page import report_page
from trainkit.reports.read import read_report
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import WHOLE_ROWS, read_thinned

HOSTILE = "</script><script>document.title='owned'</script><img src=http://127.0.0.1:9/x onerror=1>"


EXTREMES = (
    (0.0, 0.0),
    (0.0, 1e-323),
    (-1e308, 1e308),
    (1.0, 1.0000000000000002),
    (1e15, 1e15 + 0.125),
    (1e18, 1e18),
    (1e300, 1e300),
)


def row(step: int, **more: Any) -> str:
    values = {
        "step": step,
        "consumed_samples": 8 * step,
        "lm_loss": 4.0 - step / 100,
        "grad_norm": 1.0,
        "learning_rate": 0.001,
        "elapsed_ms": 50.0,
        "tokens_per_second": 1000.0 + step,
    }
    return json.dumps({**values, **more}) + "\n"


def with_rows(drill: Drill) -> RunFolder:
    """The drill's run with metrics, ranks' times, and texts that want to be markup."""
    run = drill.run
    rows = [row(step) for step in range(1, 51)]
    rows.insert(10, json.dumps({"step": 10, "consumed_samples": 80, "eval": "valid", "lm_loss": 3}))
    rows[10] += "\n"
    evil = json.dumps({"step": 20, "consumed_samples": 160, "eval": HOSTILE, "lm_loss": 3.2})
    rows.append(evil + "\n" + row(51, lm_loss=None) + '{"step": 52, "lm_lo')
    run.metrics.write_text("".join(rows))
    lost = "".join(row(step, lm_loss=5.0) for step in (*range(11, 18), *range(21, 26)))
    (run.path / "metrics-taken-back.jsonl").write_text(lost)
    times = [{"step": s, "compute_ms": [10.0, 10.5, 20.0, 9.9]} for s in (1, 20, 40)]
    (run.path / "rank-times.jsonl").write_text("".join(json.dumps(t) + "\n" for t in times))
    job = json.loads(run.job.read_text())
    job["origins"]["description"] = {"value": HOSTILE, "place": HOSTILE}
    run.job.write_text(json.dumps(job))
    drill.attempt = 4
    drill.event("host_left_out", host=HOSTILE, why="\x1b[31m" + HOSTILE)
    return run


def test_the_page_says_what_the_run_did(tmp_path: Path) -> None:
    page = report_page(read_report(with_rows(three_kills(tmp_path))))
    for words in ("lost and redone", "waiting in the queue", "it was killed", "went on from step"):
        assert words in page
    assert "rank 2 (1.95)" in page  # the straggler
    assert page.count("<figure") == 7 and "Experts" not in page
    assert HOSTILE not in page and "<img" not in page and "\x1b" not in page
    tags = re.findall(r"<[a-z][^>]*>", page)
    attributes = {name for tag in tags for name in re.findall(r' ([a-z-]+)="', tag)}
    assert not attributes & {"src", "href", "action", "style", "srcdoc", "onload", "onerror"}
    assert page.count("<script>") == 1


def test_a_run_that_never_began_and_one_without_columns(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "runs" / "j<b>" / "20270101-000000-aaaa")
    run.path.mkdir(parents=True)
    run.job.write_text("{}")
    page = report_page(read_report(run))
    assert "It never began." in page and "j&lt;b&gt;" in page and "nothing was logged" in page
    rows = (
        '{"step": 1, "lm_loss": 2.5}\n[]\n{"step": "2"}\n{"step": 3, "lm_loss": "x", "mfu": {}}\n'
    )
    run.metrics.write_text(rows)
    report = read_report(run)
    assert report.rows.damaged == 2 and [r["step"] for r in report.rows.rows] == [1, 3]
    assert "2 damaged lines" in report_page(report)
    run.attempt(1).path.mkdir(parents=True)
    run.attempt(1).events.write_text(
        json.dumps({"time": iso(0), "event": "agent_joined", "clock_offset": "far", "host": 3})
        + "\n"
        + json.dumps({"time": "never", "event": "started", "attempt": {}, "supervisor": {}})
        + "\n"
    )
    assert "agent_joined" in report_page(read_report(run, report.record))


@pytest.mark.parametrize("between", ["", '"z_loss": 0.1, '])
def test_thinning_keeps_spikes_gaps_and_evaluations(tmp_path: Path, between: str) -> None:
    """Of many rows few are read, and those that matter are among them, whichever keys stand
    between the loss and the norm."""
    path = tmp_path / "metrics.jsonl"
    count = 12 * WHOLE_ROWS
    lines = [row(step) for step in range(count)]
    lines[777] = row(777, lm_loss=99.0)
    lines[888] = row(888, grad_norm=500.0)
    lines[999] = row(999, elapsed_ms=60_000.0)
    lines[1111] = row(1111, lm_loss=None)
    lines[2222] = (
        json.dumps({"step": 2222, "consumed_samples": 1, "eval": "v", "lm_loss": 1}) + "\n"
    )
    lines[3333] = '{"step": 3333, torn\n'
    path.write_text("".join(lines).replace('"grad_norm"', between + '"grad_norm"'))
    found = read_thinned(path)
    steps = {each["step"] for each in found.rows}
    assert {0, 777, 888, 999, 1111, 2222} <= steps and found.thinned
    assert found.total == count and len(found.rows) < count / 4
    assert [each["step"] for each in found.rows] == sorted(steps)
    line = Chart("x", "y", [Series("s", [(float(i), float(i == 777)) for i in range(count)])])
    drawn = re.search(r'points="([^"]+)"', line.to_html())
    assert drawn is not None and len(drawn[1].split()) < 7000
    assert min(int(p.split(",")[1]) for p in drawn[1].split()) < 500  # the spike, at the top
    trend = re.search(r'<polyline class="s0" points="([^"]+)"', line.to_html())
    assert trend is not None  # drawn over the noise: what most steps do
    assert {p.split(",")[1] for p in trend[1].split()} == {"10000"}


def test_the_task_writes_files_and_the_document(project: Project) -> None:
    root = project.path
    run = with_rows(three_kills(root))
    done = project.invoke("report", run.id, "--html", "r.html", "--png", "r.png", "--json")
    value = json.loads(done.stdout)
    assert value["schema"] == "report/1" and value["files"] == ["r.html", "r.png"]
    ledger = value["ledger"]
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_seconds"], rel=1e-3)
    assert value["resumed_at"][0] == {"attempt": 2, "step": 10}
    assert (root / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (root / "r.html").read_text().startswith("<!doctype html>")
    wrong = project.invoke("report", run.id, "--html", "r.txt", exit=3)
    assert "r.txt does not end in .html" in wrong.stderr


def test_axes_have_round_numbers() -> None:
    """Whatever is drawn: as many lines as people count at a glance, none between round numbers."""
    dice = random.Random(1)
    for _ in range(300):
        low = dice.choice((-1, 0, 1)) * 10 ** dice.uniform(-9, 9)
        high = low + 10 ** dice.uniform(-9, 9)
        points = [(dice.uniform(0, 1e6), dice.choice((low, high))) for _ in range(4)]
        page = Chart("t", "x", [Series("s", sorted(points))]).to_html()
        assert 2 <= page.count("grid-line") <= 7
    for low, high in EXTREMES:
        for points in ([(0.0, low), (1.0, high)], [(low, 1.0), (high, 2.0)]):
            Chart("t", "x", [Series("s", sorted(points))]).to_html()
    gap = Chart("t", "x", [Series("s", [(7.0, 4.0), (8.0, None), (9.0, 5.0)])]).to_html()
    assert ">0</text>" not in gap, "a gap is not zero"
    page = Chart("t", "x", [Series("s", [(128.0, 5.94), (25_600.0, 0.21)])]).to_html()
    shown = re.findall(r"<text[^>]*>([^<]+)</text>", page)
    assert shown == ["0", "2", "4", "6", "0", "10 k", "20 k", "x"]
