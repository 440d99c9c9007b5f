"""Every page in a real browser: it asks nobody, complains of nothing, and can be read on a screen
and on a phone."""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.reports.browser import Browser, Visit, needs_chromium
from tests.reports.drill import three_kills
from tests.reports.test_compare import make, reports
from tests.reports.test_page import HOSTILE, with_rows
from trainkit.reports.board import Board, serve
from trainkit.reports.compare import compare_runs, comparison_page
from trainkit.reports.graph import JobGraph, StageNode
from trainkit.reports.page import report_page
from trainkit.reports.read import read_report
from trainkit.reports.sweep import MemberResult, SweepResults
from trainkit.reports.sweep_page import sweep_page

pytestmark = needs_chromium
SMALLEST = 11.0  # pixels of a letter that people read
TOKEN = "a-token"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = Browser()
    yield found
    found.close()


def pages(folder: Path) -> dict[str, str]:
    """One of each kind, with texts that want to be markup."""
    report = read_report(with_rows(three_kills(folder)))
    one = make(folder, "a", [3.0, 2.0, 1.0])
    two = make(folder, "b", [3.0, 2.5, 2.0], **{"training.lr": HOSTILE})
    nodes = [
        StageNode("build index", "fresh", "nothing changed", units=1),
        StageNode(f"prep-data {HOSTILE}", "stale", HOSTILE, [HOSTILE] * 5, (), 9, 4),
        StageNode("train job", "waits", "x comes first", (), ["build index"]),
    ]
    members = [
        MemberResult(number, {"training.lr": lr, "x": HOSTILE}, "a", "succeeded", 3, lr, lr, 9.0)
        for number, lr in enumerate((1e-2, 1e-3, 1e-4), start=1)
    ]
    rows = dict.fromkeys((1, 2, 3), report.rows.rows)
    return {
        "report.html": report_page(report),
        "comparison.html": comparison_page(compare_runs(reports(one, two))),
        "sweep.html": sweep_page(SweepResults("id", "job", folder, members), rows),
        "graph.svg": JobGraph("job", nodes).to_svg(),
    }


def refuse_unreadable(seen: Visit, name: str, width: int) -> None:
    """Letters are large enough, nothing has to be moved sideways (a picture of stages may), and no
    text of a drawing covers another."""
    assert len(seen.texts) > 5
    small = [each for each in seen.texts if each.size < SMALLEST]
    assert not small, (name, width, small)
    if name.endswith(".svg"):
        return
    assert seen.width <= width, (name, width, seen.width)
    drawn = [each for each in seen.texts if each.drawn]
    for one, other in itertools.combinations(drawn, 2):
        if one.picture == other.picture:
            assert not one.overlaps(other), (name, width, one, other)


def test_pages_from_files(browser: Browser, tmp_path: Path) -> None:
    for name, text in pages(tmp_path).items():
        path = tmp_path / name
        path.write_text(text)
        for width in (1280, 400):
            seen = browser.visit(path.as_uri(), width)
            assert seen.console == [] and seen.asked == [], name
            assert "<title>owned" not in seen.dom
            refuse_unreadable(seen, name, width)
    report = (tmp_path / "report.html").read_text()
    assert 'class="cursor"' in browser.visit((tmp_path / "report.html").as_uri()).dom, "its script"
    # where something got into the page, its policy would keep it from asking
    inside = report.replace("<h1>", f"{HOSTILE}<h1>", 1)
    (tmp_path / "inside.html").write_text(inside)
    refused = browser.visit((tmp_path / "inside.html").as_uri())
    assert "<title>owned" not in refused.dom
    assert any("Content Security Policy" in line for line in refused.console)
    (tmp_path / "open.html").write_text(re.sub(r'<meta http-equiv="Content[^>]*>', "", inside))
    control = browser.visit((tmp_path / "open.html").as_uri())
    assert "http://127.0.0.1:9/x" in control.asked and "<title>owned" in control.dom


def test_the_board_over_loopback(browser: Browser, tmp_path: Path) -> None:
    with_rows(three_kills(tmp_path))
    with serve(Board([tmp_path], TOKEN), 0) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        origin = f"http://localhost:{server.server_port}"
        for width in (1280, 400):
            board = browser.visit(f"{origin}/{TOKEN}/", width)
            assert board.console == [] and all(url.startswith(origin) for url in board.asked)
            refuse_unreadable(board, "board", width)
            (link,) = re.findall(r'href="(/[^"]+)"', board.dom)
            report = browser.visit(f"{origin}{link}", width)
            assert report.console == [] and report.asked == [] and "lost and redone" in report.dom
            refuse_unreadable(report, "report of the board", width)
        server.shutdown()
        thread.join()
