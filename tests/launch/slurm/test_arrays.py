"""Units as Slurm arrays, as text: the graph, the scripts, the lines of sbatch; the real thing is
in tests/cluster/test_slurm_stages.py."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.jobs.clusters import Cluster, StagePlace
from trainkit.launch.array_units import ArrayLevel, ArrayUnit, array_levels, split_units
from trainkit.launch.slurm.array_scripts import ArrayPlace, array_script
from trainkit.launch.slurm.arrays import array_argv, describe_level
from trainkit.stages.array_task import run_once, unit_share
from trainkit.stages.contract import Need, Unit

ARGV = (sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker")


def need(*units: Unit) -> Need:
    return Need("prep-data", "pile--bpe", "lock", 1, {}, (), (), units)


def names(level: ArrayLevel) -> list[list[str]]:
    return [[unit.name for unit in each] for each in level.shares]


FETCH = Unit("fetch", ARGV, {}, network=True)
TOKENIZER = Unit("tokenizer", ARGV, {}, after=("fetch",), size=5)
TOKENS = [Unit(f"tokens-{i}", ARGV, {}, after=("tokenizer",), size=i + 1) for i in range(7)]
MERGE = Unit("merge", ARGV, {}, after=tuple(unit.name for unit in TOKENS))
ALL = [FETCH, TOKENIZER, *TOKENS, MERGE]
PLACE = ArrayPlace(Cluster(name="queue", launcher="slurm"), StagePlace(), Path("/shared"))


def test_the_graph_is_levels_of_what_waits_for_what() -> None:
    here, there = split_units(ALL, in_image=False)
    assert here == [FETCH] and there == ALL[1:]
    first, second, third = array_levels(need(*ALL), there, StagePlace(nodes=2, tasks_per_node=2))
    assert (names(first), names(third)) == ([["tokenizer"]], [["merge"]])
    assert (first.elements, first.tasks, second.elements, second.tasks, third.name) == (
        1,
        1,
        2,
        2,
        "prep-data-pile--bpe-2",
    )
    sizes = [sum(unit.size for unit in each) for each in second.shares]
    assert (
        sorted(name for each in names(second) for name in each) == [unit.name for unit in TOKENS]
        and max(sizes) - min(sizes) <= 2
    )
    assert (
        describe_level(second, "job 7")
        == "prep-data-pile--bpe-1: 7 units in 2 x 2 tasks, after job 7 has gone well"
    )


def test_more_room_than_units_is_not_asked_for() -> None:
    (level,) = array_levels(need(), TOKENS[:3], StagePlace(nodes=32, tasks_per_node=2))
    assert (len(level.shares), level.elements, level.tasks) == (3, 2, 2)


def test_what_is_fetched_after_something_computed_goes_with_it() -> None:
    late = Unit("late", ARGV, {}, after=("tokenizer",), network=True)
    assert split_units([TOKENIZER, late], in_image=False) == ([], [TOKENIZER, late])


def test_the_script_and_its_line() -> None:
    """The options of the published data jobs (NeMo launcher 24.12: --array=0-31, --exclusive,
    --mem=0, --nodes=1, --ntasks-per-node=32, --partition, --time); singleton and aftercorr are
    not theirs to copy: an array here waits for the whole of the one before."""
    slurm: dict[str, Any] = {
        "exclusive": True,
        "mem": 0,
        "gpus-per-node": 8,
        "time": "26-00:00:00",
        "account": "lm",
    }
    cluster = Cluster(
        name="azure",
        launcher="slurm",
        python="/opt/p/python",
        prolog=("module load x",),
        slurm=slurm,
    )
    asked = StagePlace(partition="hpc", nodes=32, tasks_per_node=32, time="24:00:00")
    shards = [Unit(f"tokens-{i}", ARGV, {}) for i in range(2000)]
    (level,) = array_levels(need(), shards, asked)
    text = array_script(
        ArrayPlace(cluster, asked, Path("/shared")),
        level,
        Path("/shared/stamps/prep-data/pile--bpe"),
        Path("/shared/code/SHA"),
    )
    lines = text.splitlines()
    options = {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH ")}
    published = {
        "array=0-31",
        "exclusive",
        "mem=0",
        "nodes=1",
        "ntasks-per-node=32",
        "partition=hpc",
        "time=24:00:00",
    }
    assert published | {
        "account=lm",
        "job-name=prep-data-pile--bpe-0",
        "requeue",
        "open-mode=append",
    } < options and not any("gpus" in option for option in options)
    assert lines[0] == "#!/bin/bash -l" and lines[-2] == "module load x"
    assert lines[-1].startswith(
        "exec srun --kill-on-bad-exit=0 --wait=0 --mpi=none /opt/p/python -I -c "
    )
    assert lines[-1].endswith(
        " /shared/code/SHA trainkit.stages.array_task"
        " /shared/stamps/prep-data/pile--bpe/prep-data-pile--bpe-0.json"
    )
    assert array_argv(Path("/s.sh"), None) == ["sbatch", "--parsable", "/s.sh"]
    assert array_argv(Path("/s.sh"), "12") == [
        "sbatch",
        "--parsable",
        "--dependency=afterok:12",
        "--kill-on-invalid-dep=yes",
        "/s.sh",
    ]


def test_a_stage_has_options_of_its_own() -> None:
    """The cluster's are those of the partition with the GPUs: its qos and constraint may not be
    known on another."""
    slurm: dict[str, Any] = {
        "exclusive": True,
        "mem": 0,
        "qos": "gpu-long",
        "constraint": "v100",
        "account": "lm",
    }
    cluster = Cluster(name="azure", launcher="slurm", slurm=slurm)
    asked = StagePlace(
        partition="cpu",
        slurm={
            "qos": "cpu",
            "constraint": False,
            "mem": "64G",
            "cpus-per-task": 4,
            "no-requeue": True,
        },
    )
    (level,) = array_levels(need(), TOKENS[:1], asked)
    text = array_script(
        ArrayPlace(cluster, asked, Path("/shared")),
        level,
        Path("/shared/stamps"),
        Path("/shared/code/SHA"),
    )
    options = {
        line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH ")
    }
    assert {
        "exclusive",
        "account=lm",
        "qos=cpu",
        "mem=64G",
        "cpus-per-task=4",
        "partition=cpu",
        "no-requeue",
    } < options
    assert not any(option.startswith(("constraint", "qos=gpu", "requeue")) for option in options)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("qoz", "did you mean 'qos'?"),
        ("time", "a key of the stage itself"),
        ("array", "a run is one job"),
        ("output", "trainkit does"),
    ],
)
def test_options_of_a_stage_that_cannot_be_set(option: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"slurm\.") as caught:
        StagePlace(slurm={option: "1"})
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("element", "task", "expected"), [(0, 0, "a"), (0, 1, "b"), (1, 0, "c"), (1, 1, None)]
)
def test_each_task_has_its_share(element: int, task: int, expected: str | None) -> None:
    level = {"tasks": 2, "shares": [[{"name": name}] for name in "abc"]}
    got = unit_share(level, {"SLURM_ARRAY_TASK_ID": str(element), "SLURM_PROCID": str(task)})
    assert [unit["name"] for unit in got] == ([expected] if expected else [])


def test_a_task_that_slurm_starts_anew_goes_on(tmp_path: Path) -> None:
    program = (
        f"import pathlib; pathlib.Path('{tmp_path}/made').open('a').write('x');"
        " print('{\"result\": {}}')"
    )
    files = {name: str(tmp_path / f"u.{name}") for name in ("out", "log", "stamp")}
    unit = {
        "name": "u",
        "argv": [sys.executable, "-c", program],
        "env": {},
        "digest": "abc",
        "outputs": [f"{tmp_path}/made"],
        **files,
    }
    assert [run_once(unit), run_once(unit)] == [0, 0] and (tmp_path / "made").read_text() == "x"
    (tmp_path / "made").write_text("half")  # not as it was stamped
    assert run_once(unit) == 0 and (tmp_path / "made").read_text() == "halfx"


def test_what_a_restarted_task_says_is_read_from_its_beginning(tmp_path: Path) -> None:
    batch = ArrayUnit(Unit("u", ARGV, {}), tmp_path)
    batch.out.write_text('{"progress": 1, "total": 4}\n' * 3 + '{"prog')
    batch.look()
    batch.out.write_text('{"result": {"tokens": 7}}\n{"ended": 0, "host": "b"}\n')
    batch.look()
    assert batch.code == 0 and batch.host == "b" and batch.results[0][1] == {"tokens": 7}


@pytest.mark.parametrize(("code", "stamped"), [(0, True), (3, False)])
def test_a_task_stamps_what_succeeded_and_says_how_it_ended(
    tmp_path: Path, code: int, stamped: bool
) -> None:
    program = (
        "import sys; print('noise'); print('{\"result\": {\"tokens\": 7}}'); print('why',"
        f" file=sys.stderr); sys.exit({code})"
    )
    files = {name: str(tmp_path / f"u.{name}") for name in ("out", "log", "stamp")}
    unit = {
        "name": "u",
        "argv": [sys.executable, "-c", program],
        "env": {},
        "digest": "abc",
        "outputs": [],
        **files,
    }
    assert run_once(unit) == code and (tmp_path / "u.log").read_text() == "why\n"
    assert json.loads((tmp_path / "u.out").read_text().splitlines()[-1]) == {
        "ended": code,
        "host": os.uname().nodename,
    }
    assert (tmp_path / "u.stamp").exists() == stamped
    if stamped:
        stamp = json.loads((tmp_path / "u.stamp").read_text())
        assert (stamp["unit"], stamp["spec"], stamp["result"]) == ("u", "abc", {"tokens": 7})
