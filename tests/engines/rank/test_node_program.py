"""A program that starts its node's ranks itself: its words, its environment, what is set on the
node before, and graphs that are compiled instead of a training."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.rank.test_run import error_of, run
from trainkit.engines.rank import node_setup
from trainkit.engines.rank.node_setup import NodeSetup, device_problems, prepare_node
from trainkit.engines.rank.run import GraphCounts, filled

# neuronx-nemo-megatron-gpt-job.md, "Precompile", and the tool's own report of 2025
PUBLISHED = """\
2023-06-11 23:04:08.000738: INFO ||PARALLEL_COMPILE||: Total graphs: 22
2023-06-11 23:04:08.000738: INFO ||PARALLEL_COMPILE||: Total successful compilations: 22
2023-06-11 23:04:08.000738: INFO ||PARALLEL_COMPILE||: Total failed compilations: 0
"""
FAILED = """\
2025-01-17 01:16:07.000981:  32201  INFO ||NEURON_PARALLEL_COMPILE||: {
    "compilation_summary": {
        "true": 1,
        "false": 1
    },
    "compilation_report": {
        "/fsx/cache/neuronxcc-2.16.372.0+4a9b2326/MODULE_9993940051196728623+3cc9a3cb/model.pb": {
            "status": true,
            "retry": 0
        },
        "/fsx/cache/neuronxcc-2.16.372.0+4a9b2326/MODULE_7470829644182149778+3cc9a3cb/model.pb": {
            "status": false,
            "retry": 1
        }
    }
}
2025-01-17 01:16:07.000981:  32201  INFO ||NEURON_PARALLEL_COMPILE||: Total graphs: 2
2025-01-17 01:16:07.000981:  32201  INFO ||NEURON_PARALLEL_COMPILE||: Total successful compilations: 1
2025-01-17 01:16:07.000981:  32201  INFO ||NEURON_PARALLEL_COMPILE||: Total failed compilations: 1
"""  # noqa: E501  as it is printed


def read(text: str) -> GraphCounts:
    counts = GraphCounts()
    for line in text.splitlines():
        counts.read_line(line)
    return counts


def test_the_published_words_of_success() -> None:
    counts = read(PUBLISHED)
    assert (counts.graphs, counts.compiled, counts.failed) == (22, 22, 0)
    assert counts.problem() == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            FAILED,
            "1 of 2 graphs could not be compiled: MODULE_7470829644182149778+3cc9a3cb",
            id="named by the report",
        ),
        pytest.param(
            "E ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile',"
            " '/tmp/model.MODULE_12338+00875417.hlo_module.pb', '--verbose=35']: [TEN404]\n"
            + PUBLISHED.replace("failed compilations: 0", "failed compilations: 1"),
            "1 of 22 graphs could not be compiled: MODULE_12338+00875417",
            id="named by the compiler",
        ),
        pytest.param(
            PUBLISHED.replace("successful compilations: 22", "successful compilations: 21"),
            "21 of 22 graphs were compiled",
            id="one is neither",
        ),
        pytest.param("Compiler status PASS\n", "never said `Total graphs`", id="cut off"),
        pytest.param(
            PUBLISHED.partition("Total failed")[0], "never said `Total graphs`", id="half of it"
        ),
        pytest.param(
            PUBLISHED + "Total graphs: 3\n", "never said `Total graphs`", id="a second one cut off"
        ),
    ],
)
def test_graphs_that_are_not_compiled(text: str, said: str) -> None:
    assert said in read(text).problem()


def compiling(tmp_path: Path, printed: str, code: int = 0, **changes: Any) -> int:
    body = f"sys.stdout.write({printed!r})\nsys.exit({code})\n"
    values = {
        "engine": "megatron-lm",
        "python": sys.executable,
        "starts_ranks": True,
        "compiled": str(tmp_path / "compiled" / "node-${NODE_RANK}.json"),
        "compiled_for": "abc",
        **changes,
    }
    return run(tmp_path, body, **values).returncode


def test_compiled_graphs_are_a_success_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GROUP_RANK", "3")
    assert compiling(tmp_path, PUBLISHED) == 0
    said = json.loads((tmp_path / "compiled" / "node-3.json").read_text())
    assert (said["graphs"], said["compiled_for"]) == (22, "abc")


@pytest.mark.parametrize(("printed", "code"), [(FAILED, 0), ("", 0), (PUBLISHED, 1)])
def test_what_is_not_compiled_is_no_success(tmp_path: Path, printed: str, code: int) -> None:
    assert compiling(tmp_path, printed, code) == 9
    assert not (tmp_path / "compiled").exists()
    if printed == FAILED:
        assert error_of(tmp_path)["type"] == "CompilationFailed"
        assert "MODULE_7470829644182149778" in error_of(tmp_path)["message"]


def test_a_program_on_path_with_the_words_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is found beside the interpreter, and has no variable of one rank: it sets them itself."""
    tools = tmp_path / "venv" / "bin"
    tools.mkdir(parents=True)
    (tools / "python").symlink_to(sys.executable)
    (tools / "torchrun").write_text(
        f"#!{sys.executable}\nimport json, os, sys\n"
        f"json.dump([sys.argv[1:], dict(os.environ)], open({str(tmp_path / 'said')!r}, 'w'))\n"
    )
    (tools / "torchrun").chmod(0o755)
    monkeypatch.setenv("GROUP_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "41000")
    words = ("--node_rank", "${NODE_RANK}", "${MASTER_ADDR}", "${MASTER_PORT}", "a=${b}")
    values: dict[str, Any] = {"python": str(tools / "python"), "starts_ranks": True}
    run(tmp_path, "", argv=("torchrun", *words), node=NodeSetup(open_files=256), **values)
    argv, variables = json.loads((tmp_path / "said").read_text())
    assert argv == ["--node_rank", "1", "10.0.0.1", "41000", "a=${b}"]
    assert variables["MASTER_PORT"] == "41000"
    gone = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_ERROR_FILE"}
    assert not gone & set(variables)
    assert variables["PATH"].startswith(str(tools))


# torch 2.13, a rank of two that was killed; ranks that its end has ended are named before
KILLED = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
===================================================
megatron_gpt_pretraining.py FAILED
---------------------------------------------------
Failures:
[1]:
  time      : 2026-11-23_00:22:33
  host      : node2
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 69)
  error_file: <N/A>
---------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-23_00:22:32
  host      : node2
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 68)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 68
===================================================
"""


# Slurm 22.05 and 24.05, --kill-on-bad-exit=1; the bar of progress stands before the second line
ENDED_TASKS = """\
srun: error: node1: task 0: Exited with exit code 137
srun: launch/slurm: _step_signal: Terminating StepId=1.1
         \x1b[Asrun: error: node2: task 1: Terminated
srun: Force Terminated StepId=1.1
"""


@pytest.mark.parametrize(
    ("printed", "code", "expected"),
    [
        pytest.param(KILLED, 1, -signal.SIGKILL, id="killed from outside, not its own fault"),
        pytest.param(KILLED.replace("-9", "3"), 1, 9, id="its own error"),
        pytest.param("ValueError: no\n", 1, 9, id="no rank is named"),
        pytest.param(ENDED_TASKS, 143, -signal.SIGKILL, id="a task of srun was killed"),
        pytest.param(ENDED_TASKS.replace("137", "1"), 143, 9, id="a task of srun failed"),
        pytest.param(
            "srun: error: node2: task 1: Killed\n",
            137,
            -signal.SIGKILL,
            id="killed without a shell",
        ),
        pytest.param(KILLED, 0, 9, id="an end without an error"),
    ],
)
def test_the_rank_of_torchrun_that_failed_first_says_how_it_ended(
    tmp_path: Path, printed: str, code: int, expected: int
) -> None:
    body = f"sys.stdout.write({printed!r})\nsys.exit({code})\n"
    done = run(tmp_path, body, python=sys.executable, starts_ranks=True)
    assert done.returncode == expected


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = run(tmp_path, "", argv=("no-such-torchrun",), python=sys.executable)
    assert done.returncode == 7
    assert "no-such-torchrun is not on PATH" in error_of(tmp_path)["message"]


def test_only_these_names_are_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert filled("x=${LOCAL_RANK}:${model.seq}:$HOME") == "x=2:${model.seq}:$HOME"


def test_open_files_are_limited_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (256, 4096)}

    def change(kind: int, pair: tuple[int, int]) -> None:
        if pair[1] > 4096:
            raise ValueError("not allowed to raise maximum limit")
        limits["now"] = pair

    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", change)
    assert node_setup.raise_open_files(1024) == ""
    assert limits["now"] == (1024, 4096)
    said = node_setup.raise_open_files(65535)
    assert "ulimit -n 65535: the hard limit on" in said and "is 4096" in said
    assert limits["now"] == (4096, 4096)


@pytest.mark.parametrize(
    ("there", "asked"),
    [
        ("", ["net.ipv4.ip_local_reserved_ports=41000"]),
        ("8080,9000-9100", ["net.ipv4.ip_local_reserved_ports=8080,9000-9100,41000"]),
        ("41000", []),
        ("40000-42000", []),
    ],
)
def test_the_port_is_reserved_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: str, asked: list[str]
) -> None:
    """`sudo sysctl -w` of the scripts, which ask no password: an agent has no terminal."""
    ports = tmp_path / "ports"
    ports.write_text(f"{there}\n")
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sudo", "lctl"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {tmp_path}/calls\n')
        (tools / name).chmod(0o755)
    monkeypatch.setattr(node_setup, "RESERVED_FILE", ports)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tools), prepend=":")
    setup = NodeSetup(reserve_port=True, max_dirty_mb=64)
    assert prepare_node(setup, "41000") == []
    calls = (tmp_path / "calls").read_text().splitlines()
    expected = [f"sudo -n sysctl -w {each}" for each in asked]
    assert calls == [*expected, "sudo -n lctl set_param osc.*.max_dirty_mb=64"]


def test_what_could_not_be_set_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_setup, "RESERVED_FILE", tmp_path / "none")
    (note,) = prepare_node(NodeSetup(reserve_port=True), "41000")
    assert "cannot be read" in note
    (tmp_path / "sudo").write_text("#!/bin/sh\necho a password is required >&2\nexit 1\n")
    (tmp_path / "sudo").chmod(0o755)
    (tmp_path / "ports").write_text("")
    monkeypatch.setattr(node_setup, "RESERVED_FILE", tmp_path / "ports")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (note,) = prepare_node(NodeSetup(reserve_port=True), "41000")
    assert "ended with 1" in note and note.endswith("a password is required")


def test_a_node_without_devices_is_named(tmp_path: Path) -> None:
    setup = NodeSetup(devices=str(tmp_path / "neuron[0-9]*"), mend="install aws-neuronx-dkms")
    (problem,) = device_problems(setup)
    assert "has no" in problem and problem.endswith("install aws-neuronx-dkms")
    (tmp_path / "neuron0").touch()
    assert device_problems(setup) == []
