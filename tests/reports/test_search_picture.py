"""The picture of a search, and the points that it is drawn from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.plan.example import gpu, job_of, shape
from trainkit.base.errors import ConfigError
from trainkit.base.extras import MissingExtra
from trainkit.engines.registry import ENGINES
from trainkit.plan.cloud import Point, best_by_nodes, cloud, pareto, thinned
from trainkit.plan.search import Searcher
from trainkit.reports.search_picture import GROUPS, SearchPicture, draw_search

VOCAB = 1024
GIB = 2**30


def a_search(nodes: list[int], room: int = 80 * GIB) -> SearchPicture:
    model = shape("llama", 4, 256, 4, 128, vocab_size=VOCAB)
    keys = {"launcher": "slurm", "network_gb_per_second": 50.0}
    job = job_of(model, 2, device=gpu(room), cluster=keys, global_batch_size=16)
    searcher = Searcher(job, ENGINES["native"].rules, VOCAB)
    found = searcher.search(nodes)
    points = cloud(searcher.candidates, searcher.rules, VOCAB)
    return SearchPicture("demo $x$", found.ranked, points, {1: 1000.0}, found.known)


def test_the_front() -> None:
    best, light, beaten, same = (
        Point("best", 1, 30.0, 9),
        Point("light", 1, 20.0, 5),
        Point("beaten", 2, 15.0, 6),
        Point("same speed, more memory", 2, 20.0, 8),
    )
    points = [best, light, same, beaten]
    assert pareto(points) == [best, light]
    assert best_by_nodes(points) == {1: 30.0, 2: 20.0}
    assert thinned(points, 2) == [best, light, same]


def test_a_point_is_a_kind_of_layout_that_fits() -> None:
    found = a_search([1])
    assert found.points[0].tokens_per_second == found.ranked[0].tokens_per_second
    plan = found.ranked[0].plan
    assert plan and plan.memory
    assert found.points[0].bytes == plan.memory.fullest.total_bytes
    kinds = [point.layout.replace(f"micro-batch {n}", "") for point in found.points for n in [16]]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("part", [0.6, 0.9, 1.02, 1.5])
def test_the_fastest_that_fits_is_drawn(part: float) -> None:
    """However many faster layouts do not fit: scaling is that of what a search would choose."""
    leaf = min(point.bytes for point in a_search([1, 2, 4]).points)
    room = int(leaf / part)
    best = best_by_nodes(a_search([1, 2, 4], room).points)
    for nodes in (1, 2, 4):
        chosen = a_search([nodes], room).ranked
        assert best.get(nodes) == (chosen[0].tokens_per_second if chosen else None)


def test_groups_name_terms_that_there_are_once() -> None:
    named = [term for group in GROUPS for term in group[3]]
    assert len(set(named)) == len(named)
    assert set(named) <= set(a_search([1]).ranked[0].terms)


@pytest.mark.parametrize("nodes", [[1], [1, 2, 4]])
def test_the_picture_says_what_it_shows(tmp_path: Path, nodes: list[int]) -> None:
    pytest.importorskip("matplotlib")
    found = a_search(nodes)
    drawn = tmp_path / "s.svg"
    draw_search(found, drawn)
    text = drawn.read_text()
    for words in ("memory and speed", "where a step's time goes", "demo $x$"):
        assert words in text.replace("&#x27;", "'").replace("&apos;", "'")
    assert ("ideal" in text) == ("measured runs" in text) == (len(nodes) > 1)
    again = tmp_path / "again.svg"
    draw_search(found, again)
    assert again.read_text() == text


def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = a_search([1])
    with pytest.raises(ConfigError, match=r"s\.jpg does not end in \.svg or \.png"):
        draw_search(found, tmp_path / "s.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtra, match="matplotlib"):
        draw_search(found, tmp_path / "s.svg")
