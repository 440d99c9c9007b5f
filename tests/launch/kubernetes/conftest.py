"""Fixtures of the tests of trainkit.launch.kubernetes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.kubernetes.api_stub import ApiStub, serve, write_kubeconfig


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiStub]:
    """A server that kubectl asks here."""
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    made = ApiStub()
    server = serve(made)
    write_kubeconfig(tmp_path / "kubeconfig", server.server_address[1])
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    yield made
    server.shutdown()
    server.server_close()
