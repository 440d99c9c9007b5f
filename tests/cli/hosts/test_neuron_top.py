"""`nodes --top` of Trainium: neuron-ls, and one report of neuron-monitor."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TASKS, Project
from trainkit.cli.hosts.nodes import monitor_lines


def report(cores: dict[str, float], memory: int, **errors: int) -> dict[str, Any]:
    """One program's part, as the Neuron Monitor User Guide has it."""
    return {
        "pid": 20843,
        "neuron_runtime_tag": "1",
        "error": "",
        "report": {
            "execution_stats": {"period": 5.0, "error_summary": {"generic": 0, **errors}},
            "memory_used": {"neuron_runtime_used_bytes": {"host": 2**30, "neuron_device": memory}},
            "neuroncore_counters": {
                "period": 5.0,
                "neuroncores_in_use": {
                    core: {"neuroncore_utilization": share} for core, share in cores.items()
                },
            },
        },
    }


def said(*programs: dict[str, Any]) -> str:
    return json.dumps({"neuron_runtime_data": list(programs), "system_data": {}}) + "\n"


def test_the_newest_whole_report_counts() -> None:
    first = said(report({"0": 1.0}, 0))
    second = said(report({"0": 90.0, "1": 70.0}, 3 * 2**30), report({"2": 20.0}, 2**30, hardware=2))
    assert monitor_lines(first + second + second[:40]) == [
        "2 programs use 3 NeuronCores: 4.0 GiB on devices, 2.0 on the host",
        "utilization 60 % in the mean, the lowest of cores 2: 20 %, 1: 70 %, 0: 90 %",
        "errors of executions: 2 hardware",
    ]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "said nothing"),
        ("{}\n[1]\nno JSON\n", "said nothing"),
        (said(), "no program uses its NeuronCores"),
        ('{"neuron_runtime_data": null}\n', "no program uses its NeuronCores"),
        ('{"neuron_runtime_data": [{"report": {"memory_used": 3}}]}\n', "use 0 NeuronCores"),
    ],
)
def test_what_is_no_report(text: str, words: str) -> None:
    (line,) = monitor_lines(text)
    assert words in line


@pytest.fixture
def trainium(tmp_path: Path) -> Project:
    """A cluster of this machine, with programs in the place of Neuron's tools."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "neuron-ls").write_text('#!/bin/sh\necho "neuron-ls $@: 16 devices"\n')
    lines = said(report({"0": 50.0}, 2**30))
    (tools / "neuron-monitor").write_text(f"#!/bin/sh\ncat <<END\n{lines}END\n")
    for path in tools.iterdir():
        path.chmod(0o755)
    (tmp_path / "jobs.toml").write_text(
        f'[clusters.trn]\ndevice = "trn1-core"\ngpus_per_node = 32\n'
        f'env = {{ PATH = "{tools}:{os.environ["PATH"]}" }}\n'
    )
    (tmp_path / "tasks.py").write_text(TASKS)
    return Project(tmp_path)


def test_both_tools_are_asked_on_each_host(trainium: Project) -> None:
    (row,) = trainium.document("nodes", "--cluster", "trn", "--top")["hosts"]
    assert row["error"] is None
    assert row["text"].splitlines() == [
        "neuron-ls --wide: 16 devices",
        "1 programs use 1 NeuronCores: 1.0 GiB on devices, 1.0 on the host",
        "utilization 50 % in the mean, the lowest of cores 0: 50 %",
    ]
    shown = trainium.invoke("nodes", "--cluster", "trn", "--top").stdout
    assert "to follow it: ssh -t HOST neuron-top" in shown


def test_a_host_without_the_tools_says_so(trainium: Project) -> None:
    (trainium.path / "tools" / "neuron-monitor").unlink()
    (row,) = trainium.document("nodes", "--cluster", "trn", "--top", exit=7)["hosts"]
    assert "neuron-monitor" in row["error"]
