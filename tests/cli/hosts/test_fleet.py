"""fleet: the exact lines of pcluster, recorded by a double on PATH (the real one needs an AWS
account), and how long it waits."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import Project
from trainkit.base.errors import Exit, TrainkitError
from trainkit.jobs.clusters import Fleet
from trainkit.launch.cluster_care import parallelcluster as fleets

FLEET = """
[clusters.aws]
launcher = "slurm"
[clusters.aws.fleet]
name = "benchmarking-megatron"
region = "us-east-1"
"""
# answers one after another from a file, the last for ever; notes what it was asked
DOUBLE = """#!{python} -I
import json, sys
folder = "{folder}"
with open(folder + "/asked", "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
answers = open(folder + "/answers").read().splitlines()
answer = answers[0]
if len(answers) > 1:
    open(folder + "/answers", "w").write("\\n".join(answers[1:]))
if answer.startswith("!"):
    print(answer[1:], file=sys.stderr)
    sys.exit(1)
status = {{"status": answer, "lastStatusUpdatedTime": "2022-03-28T22:27:14.000Z"}}
print(json.dumps(status) if answer.isupper() else answer)
"""
WHERE = ["--cluster-name", "benchmarking-megatron", "--region", "us-east-1"]
DESCRIBE = ["describe-compute-fleet", *WHERE]
START = ["update-compute-fleet", *WHERE, "--status", "START_REQUESTED"]
STOP = ["update-compute-fleet", *WHERE, "--status", "STOP_REQUESTED"]
ASKED = Fleet(name="benchmarking-megatron", region="us-east-1")


@pytest.fixture
def pcluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder: `answers` is what the double will say, `asked` what it was asked."""
    folder = tmp_path / "double"
    folder.mkdir()
    (folder / "pcluster").write_text(DOUBLE.format(python=sys.executable, folder=folder))
    (folder / "pcluster").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def asked(folder: Path) -> list[list[str]]:
    path = folder / "asked"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_start_waits_until_it_is_running(pcluster: Path) -> None:
    (pcluster / "answers").write_text("STOPPED\nSTART_REQUESTED\nSTARTING\nSTARTING\nRUNNING")
    seen: list[str] = []
    reached = fleets.change(
        ASKED, "start", 30, lambda status: seen.append(status.status), poll=0.01
    )
    assert (reached.status, reached.since) == ("RUNNING", "2022-03-28T22:27:14.000Z")
    assert seen == ["STOPPED", "START_REQUESTED", "STARTING", "RUNNING"]
    assert asked(pcluster) == [DESCRIBE, START, DESCRIBE, DESCRIBE, DESCRIBE]


def test_what_is_so_already_or_on_its_way_is_not_asked_for_again(pcluster: Path) -> None:
    (pcluster / "answers").write_text("RUNNING")
    assert fleets.change(ASKED, "start", 30, poll=0.01).status == "RUNNING" and asked(pcluster) == [
        DESCRIBE
    ]
    (pcluster / "answers").write_text("STOPPING\nSTOPPED")
    assert fleets.change(ASKED, "stop", 30, poll=0.01).status == "STOPPED" and STOP not in asked(
        pcluster
    )


def test_it_does_not_wait_for_ever(pcluster: Path) -> None:
    (pcluster / "answers").write_text("STOPPED\nSTARTING")
    with pytest.raises(
        TrainkitError, match=r"is STARTING 0\.2 s after it was asked to start"
    ) as error:
        fleets.change(ASKED, "start", 0.2, poll=0.01)
    assert error.value.exit == Exit.START
    (pcluster / "answers").write_text("STOPPED\nSTART_REQUESTED\nPROTECTED")
    with pytest.raises(TrainkitError, match="asked to start and is PROTECTED") as error:
        fleets.change(ASKED, "start", 30, poll=0.01)
    assert "failed to boot" in error.value.hint


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("!no credentials", "exited with 1: no credentials"),
        ("<html>", "another form: <html>"),
        ("[1]", "another form"),
    ],
)
def test_its_own_words_where_it_fails(pcluster: Path, answer: str, words: str) -> None:
    (pcluster / "answers").write_text(answer)
    with pytest.raises(TrainkitError, match=words):
        fleets.status(ASKED)


def test_the_task(project: Project, pcluster: Path) -> None:
    with open(project.path / "jobs.toml", "a") as file:
        file.write(FLEET)
    (pcluster / "answers").write_text("RUNNING\nSTOP_REQUESTED\nSTOPPED")
    dry = project.invoke("fleet", "stop", "--cluster", "aws", "--dry-run").stdout
    assert (
        "would run: pcluster update-compute-fleet --cluster-name benchmarking-megatron --region"
        " us-east-1 --status STOP_REQUESTED\n" in dry
    )
    assert asked(pcluster) == []
    assert project.document("fleet", "status", "--cluster", "aws")["status"] == "RUNNING" and asked(
        pcluster
    ) == [DESCRIBE]
    assert "no fleet" in project.invoke("fleet", "status", "--cluster", "here", exit=3).stderr
    assert (
        "'restart' is none of start, stop, status"
        in project.invoke("fleet", "restart", "--cluster", "aws", exit=3).stderr
    )
