"""Models of fastText that nobody trained: damaged ones, and those of other sizes than usual."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from trainkit import _index
from trainkit.base.errors import ConfigError
from trainkit.data.curate.steps import STEPS
from trainkit.jobs.curation import ScoreStep

HIERARCHICAL, SOFTMAX = 1, 3


def write_model(
    path: Path, labels: Sequence[bytes], counts: Sequence[int], *, loss: int, rows: float = 0.5
) -> Path:
    """A supervised model of one word, "a", and one dimension."""
    entries = [(b"a", 5, 0), *((*each, 1) for each in zip(labels, counts, strict=True))]
    n = len(labels)
    path.write_bytes(
        struct.pack("<14id", 793712314, 12, 1, 5, 1, 1, 5, 1, loss, 3, 0, 0, 0, 100, 1e-4)
        + struct.pack("<3i2q", 1 + n, 1, n, 100, -1)
        + b"".join(name + b"\0" + struct.pack("<qb", *rest) for name, *rest in entries)
        + struct.pack("<b2qf", 0, 1, 1, 1.0)
        + struct.pack(f"<b2q{n}f", 0, n, 1, *[rows * (i + 1) / n for i in range(n)])
    )
    return path


def test_a_small_model(tmp_path: Path) -> None:
    for loss in (HIERARCHICAL, SOFTMAX):
        path = write_model(tmp_path / "m.bin", [b"__label__x", b"__label__y"], [7, 5], loss=loss)
        model = _index.FastTextModel(str(path))
        assert model.labels == ["__label__x", "__label__y"]
        scores = [model.score("a a", label) for label in (0, 1)]
        assert sum(scores) == pytest.approx(1, abs=1e-4) and scores[0] != scores[1]


@pytest.mark.parametrize("count", [-1, 10**15, 2**62, -(2**63)])
def test_counts_that_make_no_tree(tmp_path: Path, count: int) -> None:
    """The tree would be built of nodes that are not there."""
    path = write_model(
        tmp_path / "m.bin", [b"__label__x", b"__label__y", b"z"], [count] * 3, loss=HIERARCHICAL
    )
    with pytest.raises(ConfigError, match="its labels' counts are damaged"):
        STEPS["score"](ScoreStep(step="score", model=str(path), label="__label__x"), "en")


def test_a_tree_as_deep_as_it_has_labels(tmp_path: Path) -> None:
    n = 200_000
    labels = [b"%d" % i for i in range(n)]
    path = write_model(tmp_path / "m.bin", labels, [0] * n, loss=HIERARCHICAL)
    model = _index.FastTextModel(str(path))
    assert 0 <= model.score("a", n - 1) <= 1


def test_labels_that_are_no_text(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.bin", [b"\xff", b"y"], [1, 1], loss=SOFTMAX)
    with pytest.raises(ConfigError, match="cannot be read as a fastText model"):
        STEPS["score"](ScoreStep(step="score", model=str(path), label="y"), "en")


def test_arguments_that_no_step_gives() -> None:
    with pytest.raises(ValueError, match="n-gram"):
        _index.MinHash(0, [1], [1])
    with pytest.raises(ValueError, match="one entry a hash"):
        _index.MinHash(5, [1, 2], [1])
    with pytest.raises(ValueError, match="n-gram"):
        _index.BenchmarkIndex(0)
