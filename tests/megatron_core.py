"""Single files of megatron-core, as referees. The package costs 6 s of a processor to import, in
each worker of pytest that asks for it."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest


@functools.cache
def megatron_file(name: str) -> Any:
    """A file of megatron/core, without what it logs with; skips where megatron-core is not
    installed."""
    core = importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core")
    if not core or core.origin is None:
        pytest.skip("megatron-core is not installed")
    path = Path(core.origin).parent / name
    spec = importlib.util.spec_from_file_location(f"megatron_core_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    silent = SimpleNamespace(log_single_rank=lambda *words, **named: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core.utils", silent)
        spec.loader.exec_module(module)
    return module
