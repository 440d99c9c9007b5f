"""Random kills beside daemons that gave up their environment (drill.py has the rules)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.cluster.conftest import bring_up
from tests.cluster.drill import kills
from tests.cluster.on_head import make_project


@pytest.mark.slow
@pytest.mark.parametrize("unified", [True, False], ids=["with-cgroup", "bare"])
def test_nothing_is_left_of_a_run_after_the_next_command(
    tmp_path: Path, request: pytest.FixtureRequest, unified: bool
) -> None:
    cluster = bring_up(request, "cluster of namespaces", 2, unified=unified)
    try:
        rows = list(kills(make_project(tmp_path / "project", cluster), 10, random.Random(7)))
    finally:
        cluster.close()
    assert not [row for row in rows if row.left or not row.named], rows
