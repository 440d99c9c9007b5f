"""What the ranks get to see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.redact import Redactor
from trainkit.engines.contract import Command
from trainkit.launch.supervise.rank_environment import (
    passed_environment,
    port_candidates,
    rank_environment,
    secret_values,
)
from trainkit.runs.folder import AttemptFolder
from trainkit.runs.world import RunWorld, WorldNode

HOSTILE = {"A": 'it\'s "quoted" `id` $HOME $(id) %h %n %%', "B": 'a\nb\t{"a": 1} ü 漢字', "C": ""}


def world_of(
    run: Path, nodes: tuple[WorldNode, ...], address: str, *, network: bool = False
) -> RunWorld:
    command = Command(("python", "x"), HOSTILE, ("KEY",), run, ranks_per_node=3)
    return RunWorld(run.name, 2, address, 20001, network, nodes, command.to_json())


def test_environment_is_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SURPRISE", "must not travel")
    world = world_of(
        tmp_path / "runs/j/id", (WorldNode("h", "127.0.0.1", 0, (0, 1, 2)),), "127.0.0.1"
    )
    environment = rank_environment(world, 0, 2, AttemptFolder(tmp_path / "attempts/2"))
    assert environment == {
        **HOSTILE,
        "GLOO_SOCKET_IFNAME": "lo",
        "RANK": "2",
        "LOCAL_RANK": "2",
        "WORLD_SIZE": "3",
        "LOCAL_WORLD_SIZE": "3",
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "20001",
        "TORCHELASTIC_ERROR_FILE": str(tmp_path / "attempts/2/errors/2.json"),
    }
    passed = passed_environment()
    assert "SURPRISE" not in passed and passed["PATH"] == os.environ["PATH"]


def test_several_nodes_talk_over_the_interface_of_their_address(tmp_path: Path) -> None:
    nodes = (
        WorldNode("a", "10.0.0.1", 0, (0, 1, 2), "eth1", "4,5,6"),
        WorldNode("b", "10.0.0.2", 1, (3, 4, 5), "ens3"),
    )
    first = rank_environment(
        world_of(tmp_path, nodes, "10.0.0.1"), 0, 0, AttemptFolder(tmp_path / "1")
    )
    assert (
        first["GLOO_SOCKET_IFNAME"],
        first["CUDA_VISIBLE_DEVICES"],
        "NCCL_SOCKET_IFNAME" in first,
    ) == ("eth1", "4,5,6", False)
    second = rank_environment(
        world_of(tmp_path, nodes, "10.0.0.1", network=True), 1, 2, AttemptFolder(tmp_path / "1")
    )
    wanted = {
        "RANK": "5",
        "LOCAL_RANK": "2",
        "GROUP_RANK": "1",
        "WORLD_SIZE": "6",
        "GLOO_SOCKET_IFNAME": "ens3",
        "NCCL_SOCKET_IFNAME": "=ens3",
    }
    assert {key: second[key] for key in wanted} == wanted and "CUDA_VISIBLE_DEVICES" not in second


def test_ports_to_try_are_the_runs_own() -> None:
    first = port_candidates("run/1")
    assert first == port_candidates("run/1") != port_candidates("run/2")
    assert len(set(first)) == len(first) == 64 and all(20000 <= port < 32000 for port in first)


def test_secrets_are_all_named_at_once() -> None:
    assert secret_values(("A", "B?", "C?"), {"A": "123456", "B": "", "C": "345678", "D": "4"}) == {
        "A": "123456",
        "C": "345678",
    }
    with pytest.raises(ConfigError, match="fewer than 6 characters"):
        secret_values(("A",), {"A": "12345"})
    with pytest.raises(ConfigError, match="A, B") as caught:
        secret_values(("A", "B", "C?"), {})
    assert caught.value.exit == Exit.CONFIG


def test_redaction_takes_the_longest_value_first() -> None:
    redactor = Redactor(["secret", "secret-and-more", "abc"])
    assert redactor.text("abc secret secret-and-more \udcff") == "abc *** *** \udcff"
