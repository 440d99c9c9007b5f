"""Weights & Biases gets the metrics under the run's id and no secret, and can break without
breaking training."""

from __future__ import annotations

import importlib.util
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.train.support import new_run, tiny_job
from trainkit.base.errors import ConfigError
from trainkit.base.extras import install_command
from trainkit.jobs.schema import Cluster, Job, WandbSettings
from trainkit.runs.folder import RunFolder
from trainkit.train.metrics import wandb as wandb_log
from trainkit.train.metrics.wandb import KEY, WandbLog, open_wandb, wandb_problems

SECRET = "e5f0c2a94b7d"
ROW = {
    "step": 3,
    "lm_loss": 2.5,
    "mfu": None,
    "peak": "n/a",
    "times_ms": {"forward": 1.5},
    "memory_bytes": {"parameters": 400},
}


class Double:
    """Stands for the package and its run: keeps what it is told; `breaks` names the call that
    raises."""

    __spec__ = importlib.util.find_spec("json")  # a package that is there

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks
        self.began: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.axes: list[tuple[str, dict[str, Any]]] = []
        self.calls: list[str] = []
        self.Settings = SimpleNamespace

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks:
            raise ConnectionError(f"{name} is down")

    def init(self, **words: Any) -> Double:
        self._called("init")
        self.began = words
        return self

    def define_metric(self, name: str, **words: Any) -> None:
        self.axes.append((name, words))

    def log(self, values: dict[str, Any]) -> None:
        self._called("log")
        self.rows.append(values)

    def finish(self) -> None:
        self._called("finish")


def job(root: Path, **wandb: Any) -> Job:
    secrets = {
        "secrets": (KEY, "OTHER_NAME?", "ABSENT?"),
        "env": {"NCCL_DEBUG": "INFO", "MY_TOKEN": "abcdefgh", "OTHER_NAME": "zyxwvuts"},
    }
    cluster = Cluster(name="here", root=str(root), **secrets)  # type: ignore[arg-type]
    asked = WandbSettings(**{"project": "papers", "mode": "offline", **wandb})
    return tiny_job(1, root).model_copy(
        update={"cluster": cluster, "wandb": asked, "description": f"by mistake: {SECRET}"}
    )


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setenv(KEY, SECRET)
    return new_run(tiny_job(1, tmp_path))


def test_a_job_that_asks_for_none(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert open_wandb(tiny_job(1, tmp_path), run) is None


def test_what_is_missing_is_named_all_at_once(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delenv(KEY)
    with pytest.raises(ConfigError) as caught:
        open_wandb(job(tmp_path, mode="online"), run)
    package, key = caught.value.list
    assert "wandb is not installed" in package.message and package.hint.startswith(
        install_command("wandb")
    )
    assert f"have no {KEY}" in key.message and f'clusters.here.secrets = ["{KEY}"]' in key.hint
    monkeypatch.setitem(sys.modules, "wandb", Double())
    assert [problem.message for problem in wandb_problems(job(tmp_path, mode="online"))] == [
        key.message
    ]
    assert wandb_problems(job(tmp_path, mode="online"), {KEY: SECRET}) == []
    assert open_wandb(job(tmp_path), run) is not None  # offline needs no key


@pytest.mark.parametrize(("mode", "resume"), [("online", "allow"), ("offline", None)])
def test_what_it_is_sent(run: RunFolder, tmp_path: Path, mode: str, resume: str | None) -> None:
    double = Double()
    log = WandbLog(double, job(tmp_path, mode=mode, entity="us", group="g"), run)
    log.step(ROW)
    log.evaluation(3, 24, "books", 2.0)
    log.close()
    log.close()
    began = double.began
    assert (began["id"], began["resume"], began["mode"], began["dir"]) == (
        run.id,
        resume,
        mode,
        str(run.path),
    )
    assert (began["project"], began["entity"], began["group"]) == ("papers", "us", "g")
    assert began["config"]["training"]["lr"] == 1e-2
    assert began["config"]["cluster"]["env"] == {
        "NCCL_DEBUG": "INFO",
        "MY_TOKEN": None,
        "OTHER_NAME": None,
    }
    assert began["config"]["description"] == "by mistake: ***" and SECRET not in str(began)
    assert double.axes == [("step", {}), ("*", {"step_metric": "step"})]
    assert double.rows == [
        {"step": 3, "lm_loss": 2.5, "times_ms/forward": 1.5, "memory_bytes/parameters": 400},
        {"step": 3, "consumed_samples": 24, "validation/books/lm_loss": 2.0},
    ]
    assert double.calls == ["init", "log", "log", "finish"]


@pytest.mark.parametrize(
    ("breaks", "calls"),
    [
        ("init", ["init"]),
        ("log", ["init", "log", "finish"]),
        ("finish", ["init", "log", "log", "finish"]),
    ],
)
def test_it_breaks_and_training_goes_on(
    run: RunFolder,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    breaks: str,
    calls: list[str],
) -> None:
    double = Double(breaks)
    log = WandbLog(double, job(tmp_path), run)
    log.step(ROW)
    log.step(ROW)
    log.close()
    assert double.calls == calls
    warnings = capsys.readouterr().err.splitlines()
    assert (
        len(warnings) == 1 and f"ConnectionError: {breaks} is down; training goes on" in warnings[0]
    )


def test_it_is_not_waited_for_for_ever(
    run: RunFolder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(wandb_log, "FINISH_SECONDS", 0.02)
    over = threading.Event()
    double = Double()
    monkeypatch.setattr(double, "finish", over.wait)
    log = WandbLog(double, job(tmp_path), run)
    log.close()
    over.set()
    assert "not all was sent" in capsys.readouterr().err


def _holds(path: Path, word: bytes) -> bool:
    return word in path.read_bytes()


def test_the_real_package_without_a_network(
    run: RunFolder, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Twice, as after a crash: the same id, the same steps again. Nothing but the job and the
    metrics is in its files."""
    pytest.importorskip("wandb")
    for _ in range(2):
        log = open_wandb(job(tmp_path), run)
        assert log is not None
        log.step(ROW)
        log.evaluation(3, 24, "valid", 2.0)
        log.close()
        assert not log.failed
    assert capfd.readouterr() == ("", "")
    folders = sorted((run.path / "wandb").glob(f"offline-run-*-{run.id}*"))
    assert len(folders) == 2
    for folder in folders:
        (journal,) = folder.glob("*.wandb")
        wait_for(
            partial(_holds, journal, b"validation/valid/lm_loss"), "W&B's own process to write"
        )
        content = journal.read_bytes()
        for word in ("papers", "times_ms/forward", "validation/valid/lm_loss", "NCCL_DEBUG"):
            assert word.encode() in content, word
        files = [path for path in folder.rglob("*") if path.is_file()]
        for word in (SECRET, "abcdefgh", "zyxwvuts"):
            assert not [path for path in files if word.encode() in path.read_bytes()], word
        assert {path.suffix for path in files} == {".wandb", ".log"}  # no code, packages, metadata
