"""What the ranks get to see."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.redact import Redactor
from trainkit.engines.contract import Command
from trainkit.launch.snapshot import take_snapshot
from trainkit.launch.world import allocate_local, free_port, rank_environment, secret_values, world_document
from trainkit.runs.folder import AttemptFolder, RunFolder

HOSTILE = {"A": 'it\'s "quoted" `id` $HOME $(id) %h %n %%', "B": 'a\nb\t{"a": 1} ü 漢字', "C": ""}


def test_environment_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURPRISE", "must not travel")
    command = Command(("python", "x"), HOSTILE, ("KEY",), tmp_path, ranks_per_node=3)
    allocation = allocate_local(command, "seed")
    world = world_document(RunFolder(tmp_path / "runs/j/id"), 2, command, allocation)
    attempt = AttemptFolder(tmp_path / "attempts/2")
    environment = rank_environment(world, 0, 2, attempt, 77, {"KEY": "value"})
    assert {k: environment[k] for k in HOSTILE} == HOSTILE and environment["KEY"] == "value" and "SURPRISE" not in environment
    torch = {k: environment[k] for k in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR")}
    assert torch == {
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }
    assert environment["TRAINKIT_PARENT_PID"] == "77" and environment["PATH"] == os.environ["PATH"]
    assert "value" not in str(world)


def test_a_taken_port_is_passed_over() -> None:
    first = free_port("run/1", "127.0.0.1")
    assert free_port("run/1", "127.0.0.1") == first
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first))
        taken.listen()
        assert free_port("run/1", "127.0.0.1") != first


def test_secrets_are_all_named_at_once() -> None:
    assert secret_values(("A", "B?", "C?"), {"A": "123456", "B": "", "C": "345678", "D": "4"}) == {"A": "123456", "C": "345678"}
    with pytest.raises(ConfigError, match="fewer than 6 characters"):
        secret_values(("A",), {"A": "12345"})
    with pytest.raises(ConfigError, match="A, B") as caught:
        secret_values(("A", "B", "C?"), {})
    assert caught.value.exit == Exit.CONFIG


def test_redaction_takes_the_longest_value_first() -> None:
    redactor = Redactor(["secret", "secret-and-more", "abc"])
    assert redactor.text("abc secret secret-and-more \udcff") == "abc *** *** \udcff"


def test_snapshot_is_named_by_its_content_and_taken_once(tmp_path: Path) -> None:
    package = tmp_path / "trainkit"
    (package / "sub" / "__pycache__").mkdir(parents=True)
    (package / "a.py").write_text("1")
    (package / "sub" / "b.so").write_bytes(b"\0")
    (package / "sub" / "__pycache__" / "b.pyc").write_bytes(b"\0")
    digest, folder = take_snapshot(package, tmp_path / "code")
    assert sorted(p.name for p in folder.rglob("*") if p.is_file()) == ["a.py", "b.so", "complete"]
    assert take_snapshot(package, tmp_path / "code") == (digest, folder)
    (package / "a.py").write_text("2")
    other, _ = take_snapshot(package, tmp_path / "code")
    assert other != digest and (folder / "trainkit" / "a.py").read_text() == "1"
    assert not list((tmp_path / "code").glob("*.tmp-*"))
