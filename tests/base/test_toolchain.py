"""A machine without what Triton compiles with is found before the first launch."""

from __future__ import annotations

import sysconfig

import pytest

from trainkit.base.toolchain import triton_objection
from trainkit.ops import kernels


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    monkeypatch.setattr(sysconfig, "get_path", lambda *names: "/no/such")
    why = triton_objection()
    assert "no C compiler is here (looked for /no/such/cc)" in why
    assert "there is no /no/such/Python.h: apt-get install gcc python3-dev" in why


def test_fused_operations_of_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/cc")
    with pytest.raises(kernels.Unavailable, match="no C compiler is here"):
        kernels.load("cuda")
