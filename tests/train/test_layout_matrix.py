"""Losses, gradient norms and every gradient in every layout against a plain loop over one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.train.layout_cases import LONG, SHORT, limit
from tests.train.layouts import Apart, Case, StepFound, apart, compare


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Apart]:
    """SHORT, trained; a world of two, one of four and one of eight ranks."""
    return compare(SHORT, tmp_path_factory.mktemp("short"))


@pytest.mark.parametrize("name", [name for name, case in SHORT.items() if not case.sabotage])
def test_a_layout_equals_the_plain_loop(found: dict[str, Apart], name: str) -> None:
    close(SHORT[name], found[name])


@pytest.mark.parametrize("name", [name for name, case in SHORT.items() if case.sabotage])
def test_a_mistake_would_be_seen(found: dict[str, Apart], name: str) -> None:
    """The same comparison, of a trainer that leaves out one sum."""
    assert found[name].loss > 1e5 * limit(SHORT[name]) and found[name].gradient > 1e-3


def close(case: Case, a: Apart) -> None:
    assert a.loss <= limit(case) and a.norm <= limit(case), a
    assert a.gradient <= limit(case), a


def test_the_comparison_sees_one_element() -> None:
    gradients = {"large": np.array([1.0, -2.0]), "small": np.array([1e-9, 0.0]), "middle": np.array([[0.5, 0.25]])}
    expected = [StepFound(2.0, 3.0, gradients)]
    for name, at, change in (("large", 1, 1e-9), ("middle", (0, 1), 1e-9), ("small", 0, 1e-10)):
        changed = {key: value.copy() for key, value in gradients.items()}
        changed[name][at] += change
        a = apart([StepFound(2.0, 3.0, changed)], expected, 0.0)
        assert a.gradient > 1e-10 and a.worst == name and a.loss == a.norm == 0
    assert apart([StepFound(2.0 + 1e-9, 3.0, gradients)], expected, 0.0).loss > 1e-10
    for nowhere in (np.nan, np.inf):
        broken = {**gradients, "middle": np.array([[0.5, nowhere]])}
        assert not apart([StepFound(2.0, 3.0, broken)], expected, 0.0).gradient <= 1e-10


@pytest.mark.slow
def test_every_layout_equals_the_plain_loop(tmp_path: Path) -> None:
    for name, a in compare(LONG, tmp_path).items():
        print(name, a)
        close(LONG[name], a)
