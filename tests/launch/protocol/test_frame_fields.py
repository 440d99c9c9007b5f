"""Frames on the wire: their names and fields are those that agents of older runs know."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any

import pytest

from tests.launch.stub_agents import read_command
from trainkit.launch.protocol import frames
from trainkit.launch.protocol.frames import (
    Frame,
    HostFacts,
    LeftProcess,
    ProcessSpec,
    ReportedProcess,
    read_report,
)
from trainkit.launch.protocol.framing import BadFrame

COMMANDS: list[tuple[Frame, dict[str, Any]]] = [
    (frames.Ping(), {"type": "ping"}),
    (
        frames.ReserveSlots("r", 2, ("gpu0",), share=True, mark="r/2/0"),
        {
            "type": "reserve",
            "run": "r",
            "attempt": 2,
            "slots": ["gpu0"],
            "share": True,
            "mark": "r/2/0",
        },
    ),
    (frames.Listen((1, 2)), {"type": "listen", "ports": [1, 2]}),
    (frames.StopListening(), {"type": "unlisten"}),
    (
        frames.ConnectToPort("10.0.0.1", 5),
        {"type": "connect", "address": "10.0.0.1", "port": 5},
    ),
    (
        frames.StartProcesses((ProcessSpec("0", ("a", "b"), {"X": "1"}, "/"),), ("KEY",)),
        {
            "type": "go",
            "processes": [
                {
                    "key": "0",
                    "argv": ["a", "b"],
                    "env": {"X": "1"},
                    "cwd": "/",
                    "log": None,
                    "error": None,
                    "heartbeat": False,
                    "whole": False,
                    "output": True,
                    "forked": False,
                    "memory": False,
                }
            ],
            "secret_names": ["KEY"],
        },
    ),
    (
        frames.StartParent(("a",), {"X": "1"}, "/", ("RANK",), 2.5),
        {
            "type": "parent",
            "argv": ["a"],
            "env": {"X": "1"},
            "cwd": "/",
            "late": ["RANK"],
            "seconds": 2.5,
        },
    ),
    (frames.SignalProcesses("USR1"), {"type": "signal", "signal": "USR1", "keys": None}),
    (
        frames.StopProcesses(1.5, ("0",)),
        {"type": "stop", "grace": 1.5, "keys": ["0"], "keep_parent": False},
    ),
    (frames.DumpStacks(py_spy=True), {"type": "stacks", "py_spy": True}),
    (
        frames.SweepRun("r", kill=True),
        {"type": "sweep", "run": "r", "kill": True, "forget": False},
    ),
    (frames.Goodbye(), {"type": "bye", "run_ends": False}),
]
REPORTS: list[tuple[Frame, dict[str, Any]]] = [
    (frames.SlotsReserved(({"run": "x"},)), {"type": "reserved", "cleared": [{"run": "x"}]}),
    (
        frames.SlotsBusy("cpu", {"run": "x"}),
        {"type": "busy", "slot": "cpu", "holder": {"run": "x"}},
    ),
    (frames.Listening(5), {"type": "listening", "port": 5}),
    (frames.Listening(None, "no"), {"type": "listening", "port": None, "error": "no"}),
    (frames.ListeningStopped(), {"type": "unlistened"}),
    (frames.PortChecked("no"), {"type": "connected", "error": "no"}),
    (frames.ProcessStarted("0", 7), {"type": "started", "key": "0", "pid": 7}),
    (frames.StartFailed("0", "no"), {"type": "start_failed", "key": "0", "error": "no"}),
    (
        frames.HeartbeatReport({"0": {"step": 1}}, 2.5),
        {"type": "heartbeat", "beats": {"0": {"step": 1}}, "clock": 2.5},
    ),
    (
        frames.ProcessOutput("0", "out", "x", 3),
        {"type": "output", "key": "0", "stream": "out", "text": "x", "dropped": 3},
    ),
    (
        frames.ProcessEnded("0", -9, 1.5, True, True, {"message": "m"}, ("l",), True),
        {
            "type": "ended",
            "key": "0",
            "code": -9,
            "time": 1.5,
            "done": True,
            "stopped": True,
            "error": {"message": "m"},
            "last": ["l"],
            "oom": True,
        },
    ),
    (
        frames.ProcessesStopped((LeftProcess(1, "a"),), None),
        {"type": "stopped", "left": [{"pid": 1, "argv0": "a"}], "proof": None},
    ),
    (
        frames.StackReport({"0": "s"}, ("1",), {"0": "S"}, {"0": "{}"}),
        {
            "type": "stacks",
            "stacks": {"0": "s"},
            "silent": ["1"],
            "states": {"0": "S"},
            "waits": {"0": "{}"},
        },
    ),
    (
        frames.SweepDone((ReportedProcess(1, "r", "a"),), (), "cgroup"),
        {
            "type": "swept",
            "left": [{"pid": 1, "mark": "r", "argv0": "a"}],
            "killed": [],
            "proof": "cgroup",
        },
    ),
    (frames.CommandRefused("go", "no"), {"type": "refused", "frame": "go", "error": "no"}),
]
HELLO = (
    "node host pid identity address address_error interface versions executable snapshot extension"
    " nonce writable gpus cpus disk_free shared_memory open_files locked_memory slots errors clock"
    " proof"
)


@pytest.mark.parametrize(("frame", "wire"), [*COMMANDS, *REPORTS])
def test_what_is_written_is_what_is_read(frame: Frame, wire: dict[str, Any]) -> None:
    read = read_command if (frame, wire) in COMMANDS else read_report
    assert json.loads(json.dumps(frame.to_json())) == wire and list(frame.to_json()) == list(wire)
    assert read(wire) == frame == read(wire | {"of a newer version": 1})


def test_facts_of_a_host_have_their_names() -> None:
    assert [field.name for field in fields(HostFacts)] == HELLO.split()
    assert "proof" not in HostFacts(node=0).to_json()
    assert read_report(HostFacts(node=0, gpus=("a",), proof="cgroup").to_json()) == HostFacts(
        node=0, gpus=("a",), proof="cgroup"
    )


def test_an_older_agent_may_say_less() -> None:
    assert read_report({"type": "hello", "node": 1, "host": "h"}) == HostFacts(node=1, host="h")
    assert read_report({"type": "swept", "left": [], "killed": []}) == frames.SweepDone()
    assert read_report({"type": "ended", "key": "0", "code": 0, "time": 1}) == frames.ProcessEnded(
        "0", 0, 1
    )
    assert read_report({"type": "of a newer version"}) is None


@pytest.mark.parametrize(
    ("wire", "why"),
    [
        ({"type": "go"}, "frame 'go': processes is missing"),
        ({"type": "go", "processes": [{"key": "0"}]}, "processes[0]: argv is missing"),
        ({"type": "go", "processes": 1}, "frame 'go': processes: expected a list, got 1"),
        ({"type": "stop", "grace": "x"}, "grace: expected a number, got 'x'"),
        ({"type": "stop", "grace": True}, "grace: expected a number, got True"),
        ({"type": "connect", "address": 1, "port": 2}, "address: expected text, got 1"),
        ({"type": "connect", "address": "a", "port": 2.5}, "port: expected a whole number"),
        ({"type": "sweep", "run": "r", "kill": 1}, "kill: expected true or false, got 1"),
        ({"type": "signal", "signal": "INT", "keys": [1]}, "keys[0]: expected text, got 1"),
    ],
)
def test_a_wrong_field_is_named_with_its_place(wire: dict[str, Any], why: str) -> None:
    with pytest.raises(BadFrame) as error:
        read_command(wire)
    assert why in str(error.value)
