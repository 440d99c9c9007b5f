"""Ranks of one task: their result, their progress, their failures, and that none is left behind."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import alive, wait_for
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.launch.local_ranks import run_local_ranks

PROGRAM = """
import json, os, signal, sys, time
from pathlib import Path
from trainkit.base.errors import ConfigError
from trainkit.base.worker import run_unit

def work(spec, progress):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(spec["pids"], str(rank)).write_text(str(os.getpid()))
    if rank == spec.get("refuses"):
        raise ConfigError("no such thing", hint="another")
    if rank == spec.get("killed"):
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == spec.get("raises"):
        raise RuntimeError("a bug")
    if "refuses" in spec or "killed" in spec or "raises" in spec or spec.get("stays"):
        time.sleep(10_000)
    while len(list(Path(spec["pids"]).iterdir())) < size:
        time.sleep(0.01)
    print("a library's word")
    for done in range(1, 4):
        progress(done, 3)
        time.sleep(0.2)
    env = os.environ
    cores = {"threads": env.get("OMP_NUM_THREADS"), "waits": env.get("OMP_WAIT_POLICY")}
    return {"rank": rank, "size": size, **cores, "port": env["MASTER_PORT"], "given": spec["given"]}

run_unit(work)
"""


def together(
    folder: Path, progress: list[tuple[int, int]] | None = None, **spec: Any
) -> dict[str, Any]:
    seen = progress if progress is not None else []
    return run_local_ranks(
        [sys.executable, "-c", PROGRAM],
        {"pids": str(folder), "given": "ö", **spec},
        2,
        "cpu",
        lambda *line: seen.append(line),
    )


def test_the_result_is_rank_0s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    progress: list[tuple[int, int]] = []
    found = together(tmp_path, progress)
    cores = len(os.sched_getaffinity(0))
    assert found.pop("port").isdigit()
    assert found == {
        "rank": 0,
        "size": 2,
        "threads": str(max(1, cores // 2)),
        "waits": "PASSIVE",
        "given": "ö",
    }
    assert progress == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("spec", "exit", "said"),
    [
        ({"refuses": 1}, Exit.CONFIG, "^no such thing\n  another$"),
        (
            {"killed": 1},
            Exit.RANK_INFRA,
            "^rank 1 of 2 was ended by signal 9, as the kernel does when memory runs out",
        ),
        ({"raises": 0}, Exit.RANK_USER, "(?s)^rank 0 of 2 exited with 1\n .*RuntimeError: a bug$"),
    ],
)
def test_a_failure_ends_all_and_says_why(
    tmp_path: Path, spec: dict[str, Any], exit: Exit, said: str
) -> None:
    with pytest.raises(TrainkitError, match=said) as error:
        together(tmp_path, **spec)
    assert error.value.exit == exit and isinstance(error.value, ConfigError) == ("refuses" in spec)
    assert not any(alive(int(path.read_text())) for path in tmp_path.iterdir())


def test_an_interrupt_leaves_none_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_local_ranks(
            [sys.executable, "-c", PROGRAM],
            {"pids": str(tmp_path), "given": ""},
            2,
            "cpu",
            interrupt,
        )
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(alive(pid) for pid in pids)


def test_it_dies_with_its_starter(tmp_path: Path) -> None:
    starter = os.fork()
    if not starter:
        os.setsid()
        try:
            together(tmp_path, stays=True)
        finally:
            os._exit(1)
    wait_for(lambda: len([p for p in tmp_path.iterdir() if p.read_text()]) == 2, "both ranks")
    os.kill(starter, signal.SIGKILL)
    os.waitpid(starter, 0)
    pids = [int(path.read_text()) for path in tmp_path.iterdir()]
    wait_for(lambda: not any(alive(pid) for pid in pids), "both to die")
