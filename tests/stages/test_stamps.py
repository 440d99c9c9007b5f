"""Stamps of before a module moved still hold."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainkit.base.documents import canonical_json
from trainkit.stages.stamps import FORMER_MODULES, spec_digest


@pytest.mark.parametrize("module", FORMER_MODULES)
def test_a_program_that_moved_makes_nothing_stale(module: str) -> None:
    need: Any = SimpleNamespace(version=3)
    unit: Any = SimpleNamespace(argv=("python", "-m", module), spec={"shard": "a"})
    assert find_spec(module) is not None and Path(module.replace(".", "/")).name.endswith("worker")
    before = canonical_json([3, ["-m", FORMER_MODULES[module]], {"shard": "a"}])
    assert spec_digest(need, unit) == hashlib.sha256(before.encode()).hexdigest()
