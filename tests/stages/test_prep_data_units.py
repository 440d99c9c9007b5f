"""How units are handed out, what a stage is made of, and what it does when something is not as
it was a moment ago."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.cli.run import stages as prepare
from trainkit.cli.wrapper import TaskContext
from trainkit.data.sources import DownloadNotice
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork, stamps_folder, update_stage
from trainkit.stages.stamps import Freshness, unit_folder
from trainkit.stages.unit_process import SMALL, TINY, UnitQueue, execute_locally


class Silent:
    """A reporter that keeps the order in which units ended, and what they have written."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.counts: list[Mapping[str, int]] = []

    def verdict(self, verdict: Freshness) -> None: ...
    def waiting(self, need: Need, holder: str) -> None: ...
    def started(self, need: Need, units: Sequence[Unit]) -> None: ...
    def finished(self, need: Need) -> None: ...

    def counted(self, unit: Unit, counts: Mapping[str, int]) -> None:
        self.counts.append(dict(counts))

    def progress(self, unit: Unit, fraction: float) -> None:
        if fraction == 1 and unit.name not in self.ended:
            self.ended.append(unit.name)


PROGRAM = """
import json, os, sys, time
for path in sys.argv[1:]:
    spec = json.load(open(path))
    print(json.dumps({"progress": 1, "total": 4, "tokens": 7, "text_bytes": 9}), flush=True)
    with open(spec["log"], "a") as log:
        log.write(f"{spec['name']} begins {os.getpid()}\\n")
    time.sleep(spec["seconds"])
    if spec["kill"]:
        os.kill(os.getpid(), 9)
    with open(spec["log"], "a") as log:
        log.write(f"{spec['name']} ends {os.getpid()}\\n")
    print(json.dumps({"result": {"tokens": 70, "text_bytes": 90}}), flush=True)
"""


def unit(
    folder: Path,
    name: str,
    size: int = 1,
    after: tuple[str, ...] = (),
    *,
    seconds: float = 0.0,
    kill: bool = False,
    network: bool = False,
    several: bool = False,
) -> Unit:
    spec = {"log": str(folder / "log"), "name": name, "seconds": seconds, "kill": kill}
    argv = (sys.executable, "-I", "-S", "-c", PROGRAM)
    return Unit(name, argv, spec, (), after, size, network=network, several=several)


def need(
    units: Sequence[Unit],
    scratch: tuple[Path, ...] = (),
    announcement: DownloadNotice | None = None,
) -> Need:
    return Need("stage", "thing", "thing", 1, {}, (), (), tuple(units), scratch, announcement)


def run(
    folder: Path, units: Sequence[Unit], workers: int, reporter: Silent | None = None
) -> list[str]:
    """Lines of the log: who began and ended, in order."""
    unit_folder(folder, "thing").mkdir(parents=True)
    execute_locally(StageWork(need(units), units, folder, reporter or Silent(), workers))
    return [line.rpartition(" ")[0] for line in (folder / "log").read_text().splitlines()]


def test_the_largest_first(tmp_path: Path) -> None:
    lines = run(
        tmp_path,
        [unit(tmp_path, name, size) for name, size in (("a", 3), ("b", 9), ("c", 1), ("d", 9))],
        workers=1,
    )
    assert [line.split()[0] for line in lines if "begins" in line] == ["b", "d", "a", "c"]


def test_one_worker_computes_one_unit_at_a_time_while_others_fetch(tmp_path: Path) -> None:
    fetching = [unit(tmp_path, f"fetch-{i}", network=True, seconds=0.6) for i in range(4)]
    lines = run(
        tmp_path,
        [*fetching, unit(tmp_path, "a", seconds=0.2), unit(tmp_path, "b", seconds=0.2)],
        workers=1,
    )
    computing = [line for line in lines if not line.startswith("fetch")]
    assert computing in (
        ["a begins", "a ends", "b begins", "b ends"],
        ["b begins", "b ends", "a begins", "a ends"],
    )
    first_end = next(
        i for i, line in enumerate(lines) if line.startswith("fetch") and line.endswith("ends")
    )
    # all were under way together
    assert sum(line.startswith("fetch") for line in lines[:first_end]) == 4


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sets(st.integers(0, 12)), st.integers(1, 5), st.booleans()), max_size=12),
    st.integers(1, 3),
    st.randoms(),
)
def test_every_unit_begins_once_and_after_those_before_it(
    rows: list[tuple[set[int], int, bool]], slots: int, dice: Any
) -> None:
    """Whatever the order in which units end; a name in `after` that is not to be run is not
    waited for."""
    units = [
        Unit(str(i), (), {}, (), tuple(str(a) for a in after if a < i or a == 12), size, network)
        for i, (after, size, network) in enumerate(rows)
    ]
    queue, under_way, ended = UnitQueue(units), list[Unit](), set[str]()
    while True:
        busy = sum(u.network for u in under_way)
        for begun in [
            u
            for batch in queue.take(
                {False: slots - len(under_way) + busy, True: slots - busy},
                {False: slots, True: slots},
            )
            for u in batch
        ]:
            assert {a for a in begun.after if a != "12"} <= ended
            under_way.append(begun)
        assert (
            sum(u.network for u in under_way) <= slots
            and sum(not u.network for u in under_way) <= slots
        )
        if not under_way:
            break
        last = under_way.pop(dice.randrange(len(under_way)))
        ended.add(last.name)
        queue.done(last)
    assert ended == {u.name for u in units} and not queue and not queue.waiting()


def test_small_units_share_processes(tmp_path: Path) -> None:
    """Many small ones: few processes, each unit once with a stamp and a log of its own; large
    ones, and the last, have a process each."""
    units = [unit(tmp_path, f"u{i:02d}", (40 - i) * TINY + 1, several=True) for i in range(40)]
    large = [unit(tmp_path, f"large-{i}", SMALL + 1, several=True) for i in range(3)]
    lines = run(tmp_path, [*units, *large], workers=1)
    assert [line.split()[0] for line in lines if "begins" in line] == [
        "large-0",
        "large-1",
        "large-2",
        *(u.name for u in units),
    ]
    pids: dict[str, set[str]] = {}
    for line in (tmp_path / "log").read_text().splitlines():
        pids.setdefault(line.split()[2], set()).add(line.split()[0])
    assert len(pids) < 25 and max(map(len, pids.values())) > 5
    assert all(
        pids_of == {name}
        for pids_of in pids.values()
        for name in pids_of
        if name.startswith("large") or name == "u39"
    )
    stamped = {
        p.name
        for p in unit_folder(tmp_path, "thing").glob("*.json")
        if not p.name.endswith(".spec.json")
    }
    assert stamped == {f"{u.name}.json" for u in (*units, *large)}


def test_tiny_units_need_no_turns(tmp_path: Path) -> None:
    """They take less time than the start of a process."""
    units = [unit(tmp_path, f"u{i:02d}", several=True) for i in range(30)]
    run(tmp_path, units, workers=2)
    pids = {line.split()[2] for line in (tmp_path / "log").read_text().splitlines()}
    assert 2 <= len(pids) < 8


def test_one_that_fails_among_others_of_its_process(tmp_path: Path) -> None:
    """It is named; those before it are stamped, those after it are not."""
    units = [unit(tmp_path, f"u{i:02d}", 40 - i, several=True, kill=i == 4) for i in range(40)]
    with pytest.raises(TrainkitError, match="u04 was ended by signal 9"):
        run(tmp_path, units, workers=1)
    stamped = {
        p.name
        for p in unit_folder(tmp_path, "thing").glob("*.json")
        if not p.name.endswith(".spec.json")
    }
    assert stamped == {f"u{i:02d}.json" for i in range(4)}


def test_each_of_several_units_has_a_log(tmp_path: Path) -> None:
    """What a library writes to stderr, in C too, stands in the log of the unit at hand."""
    program = """
import os
from trainkit.base.worker import run_unit
run_unit(lambda spec, progress: os.write(2, spec["name"].encode()) and {})
"""
    units = [
        Unit(f"u{i}", (sys.executable, "-I", "-c", program), {"name": f"said by {i}"}, several=True)
        for i in range(20)
    ]
    folder = unit_folder(tmp_path, "thing")
    folder.mkdir(parents=True)
    execute_locally(StageWork(need(units), units, tmp_path, Silent(), workers=1))
    assert {p.name: p.read_text() for p in folder.glob("*.log")} == {
        f"u{i}.log": f"said by {i}" for i in range(20)
    }


def test_units_that_wait_for_each_other_are_a_bug_and_not_success(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="wait for each other"):
        run(tmp_path, [unit(tmp_path, "a", after=("b",)), unit(tmp_path, "b", after=("a",))], 1)


def test_a_hundred_thousand_units_are_sorted_quickly() -> None:
    """SlimPajama: 59,166 files to fetch and to tokenize, and a merge behind all of them."""
    fetch = [Unit(f"f{i}", (), {}, network=True, size=i) for i in range(60_000)]
    tokens = [Unit(f"t{i}", (), {}, after=(f"f{i}",), size=i) for i in range(60_000)]
    queue = UnitQueue([*fetch, *tokens, Unit("merge", (), {}, after=tuple(u.name for u in tokens))])
    under_way = [u for batch in queue.take({False: 4, True: 4}, {False: 4, True: 4}) for u in batch]
    seen = 0
    while under_way:
        queue.done(under_way.pop())
        seen += 1
        under_way += [
            u for batch in queue.take({False: 1, True: 1}, {False: 4, True: 4}) for u in batch
        ]
    # a scan of all for each would take hours: the limit of every test ends it
    assert seen == 120_001


def test_counts_reach_the_reporter(tmp_path: Path) -> None:
    reporter = Silent()
    run(tmp_path, [unit(tmp_path, "a", seconds=0.3)], 1, reporter)
    assert reporter.counts[0] == {"tokens": 7, "text_bytes": 9}
    assert reporter.counts[-1] == {"tokens": 70, "text_bytes": 90}


def test_a_worker_killed_by_the_kernel_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(
        TrainkitError, match="a was ended by signal 9, as the kernel does when memory runs out"
    ) as failed:
        run(tmp_path, [unit(tmp_path, "a", kill=True)], workers=1)
    assert failed.value.exit == 6


def test_scratch_that_a_killed_task_left_is_swept(tmp_path: Path) -> None:
    """Killed after the stage's stamp was written and before the shards were deleted."""
    scratch = tmp_path / "shards" / "00000.bin"
    made = need([unit(tmp_path, "a")], (scratch,))
    update_stage(made, tmp_path, execute_locally, Silent())
    scratch.parent.mkdir()
    scratch.write_bytes(b"left")
    assert update_stage(made, tmp_path, execute_locally, Silent()).fresh
    assert not scratch.parent.exists()


def test_leftovers_of_killed_writers_are_found_in_one_look(tmp_path: Path) -> None:
    outputs = [tmp_path / "out" / name for name in ("a.bin", "b.bin")]
    (tmp_path / "out").mkdir()
    left = [tmp_path / "out" / name for name in ("a.bin.tmp-12-ab", "b.bin.tmp-99-cd")]
    others = tmp_path / "out" / "c.bin.tmp-12-ab"  # somebody else's
    for path in (*left, others):
        path.write_bytes(b"")
    units = [
        Unit(f"u{i}", unit(tmp_path, "x").argv, dict(unit(tmp_path, f"u{i}").spec), (path,))
        for i, path in enumerate(outputs)
    ]
    for path in outputs:
        path.write_bytes(b"1")
    update_stage(need(units), tmp_path, execute_locally, Silent())
    assert not any(path.exists() for path in left) and others.exists()


def test_what_was_fresh_and_is_not_any_more(tmp_path: Path) -> None:
    """A need that was given without its units because it was fresh must not be stamped as made."""
    with pytest.raises(TrainkitError, match="was fresh a moment ago"):
        update_stage(need([]), tmp_path, execute_locally, Silent())
    assert not (stamps_folder(tmp_path, "stage") / "thing.json").exists()


@pytest.mark.parametrize(("accepted", "free"), [(False, 10**15), (True, 5)])
def test_a_large_download_needs_a_yes_and_room(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], accepted: bool, free: int
) -> None:
    large = DownloadNotice(
        "pile", 30, 457_000_000_000, "mixed", "https://pile.eleuther.ai", accepted, free
    )
    task = TaskContext(json=False, dry_run=False, folder=tmp_path)
    with pytest.raises(ConfigError) as refused:
        prepare.bring_up_to_date(task, [need([unit(tmp_path, "a")], announcement=large)], tmp_path)
    assert ("does not fit" if accepted else "nobody has agreed") in str(
        refused.value
    ) and refused.value.exit == 6
    assert (
        "pile: 30 files, 457 GB are to be fetched" in capsys.readouterr().out
        and not (tmp_path / "log").exists()
    )


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("answer", "starts"),
    [("y\n", True), ("Yes\n", True), ("\n", False), ("no\n", False), ("", False)],
)
def test_a_terminal_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, starts: bool
) -> None:
    large = DownloadNotice("pile", 30, 457_000_000_000, "mixed", None, False, 10**15)
    screen = Terminal()
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    monkeypatch.setattr(sys, "stderr", screen)
    task = TaskContext(json=False, dry_run=False, folder=tmp_path)
    with (
        contextlib.nullcontext()
        if starts
        else pytest.raises(ConfigError, match="nobody has agreed")
    ):
        prepare.bring_up_to_date(task, [need([unit(tmp_path, "a")], announcement=large)], tmp_path)
    assert screen.getvalue() == "fetch it? [y/N] " and (tmp_path / "log").exists() == starts


def test_one_that_was_agreed_to_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = DownloadNotice("pile", 30, 457_000_000_000, "mixed", None, True, 10**15)
    task = TaskContext(json=False, dry_run=False, folder=tmp_path)
    for _ in range(2):  # said once: the second time it is fresh
        prepare.bring_up_to_date(task, [need([unit(tmp_path, "a")], announcement=large)], tmp_path)
    assert capsys.readouterr().out.count("licence: mixed") == 1
    assert [line.rpartition(" ")[0] for line in (tmp_path / "log").read_text().splitlines()] == [
        "a begins",
        "a ends",
    ]
