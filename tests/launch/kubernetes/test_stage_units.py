"""Units of stages as Indexed Jobs, as documents and files: shares, what a pod gets, what is refused
before anything is made. The real thing is in tests/kubernetes/test_units.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.launch.kubernetes.pod_jobs import pod_job
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.jobs.clusters import StagePlace
from trainkit.jobs.schema import Job
from trainkit.launch.kubernetes.units import PodUnits, parse_indexes, pod_units
from trainkit.launch.preparation import LocalUnits
from trainkit.launch.stage_lines import StageLines
from trainkit.stages.array_task import run_once, unit_share
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork
from trainkit.stages.in_flight import ArraysInFlight, read_in_flight, write_in_flight

ARGV = (sys.executable, "-I", "-m", "trainkit.data.tokenize.shard_worker")
FETCH = Unit("fetch", ARGV, {}, network=True)
OWN = Unit("own", ARGV, {}, here=True)
TOKENS = tuple(Unit(f"tokens-{i}", ARGV, {}, after=("fetch",), size=i + 1) for i in range(7))
MERGE = Unit("merge", ARGV, {}, after=tuple(unit.name for unit in TOKENS))
NEED = Need("prep-data", "pile--bpe", "lock", 1, {}, (), (), (FETCH, OWN, *TOKENS, MERGE))
FOLDER = Path("/shared/me/stamps/prep-data/pile--bpe.units")


def stage_job(folder: Path, which: str, **changed: Any) -> Job:
    job = pod_job(folder, which)
    return job.model_copy(update={"cluster": job.cluster.model_copy(update=changed)})


def described(job: Job, stage: str = "prep-data") -> tuple[list[str], list[dict[str, Any]]]:
    """(the lines for people, the manifests)"""
    runner = pod_units(job, stage, lambda text: None)
    lines = runner.describe(NEED, NEED.units, FOLDER)
    text = "\n".join(line for line in lines if line.startswith("  "))
    found, decoder = [], json.JSONDecoder()
    while text := text.strip():
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:]
    return [line for line in lines if not line.startswith("  ")], found


def test_a_level_is_a_job(tmp_path: Path) -> None:
    """A pod has its part of a node, by the cores and bytes of the whole; devices are the ranks'."""
    asked = StagePlace(nodes=2, tasks_per_node=2, time="1:30:00")
    job = stage_job(tmp_path, "gpus", stages={"prep-data": asked}, prolog=("module load x",))
    lines, (tokens, merge) = described(job)
    assert lines == [
        "would run here, for the network: fetch",
        "would run here, with this Python: own",
        "would create, for 7 units in 4 pods:",
        "would create, for 1 unit in 1 pod when the one before has gone well:",
    ]
    assert tokens["metadata"]["name"] == "prep-data-pile-bpe-0-XXXXXXXX"
    assert merge["metadata"]["name"] == "prep-data-pile-bpe-1-XXXXXXXX"
    spec = tokens["spec"]
    assert (spec["completions"], spec["parallelism"], merge["spec"]["completions"]) == (4, 4, 1)
    pod = spec["template"]["spec"]
    assert pod["activeDeadlineSeconds"] == 5400
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "48000m", "memory": str(3 * 2**38)}
    bash, login, lines_of_prolog, *words = container["command"]
    assert (bash, login) == ("/bin/bash", "-lc")
    assert lines_of_prolog == 'set -e\nmodule load x\nexec "$$@"'
    assert words[:3] == ["prolog", "/opt/py/bin/python", "-I"] and words[-2:] == [
        "trainkit.stages.array_task",
        f"{FOLDER}/prep-data-pile--bpe-0.json",
    ]
    names = {each["name"]: each for each in container["env"]}
    assert names["HF_TOKEN"]["valueFrom"]["secretKeyRef"]["name"] == "hub"


def test_graphs_are_compiled_on_devices(tmp_path: Path) -> None:
    job = stage_job(tmp_path, "gpus", stages={"precompile": StagePlace()})
    _, (tokens, _) = described(job, "precompile")
    limits = tokens["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "8" and "activeDeadlineSeconds" not in tokens["spec"]


def test_a_stage_without_a_table_runs_here(tmp_path: Path) -> None:
    assert isinstance(pod_units(pod_job(tmp_path), "prep-data", lambda text: None), LocalUnits)


@pytest.mark.parametrize("key", ["partition", "slurm"])
def test_keys_of_slurm_are_refused(key: str, tmp_path: Path) -> None:
    pod_job(tmp_path)
    path = tmp_path / "jobs.toml"
    value = {"partition": '"cpu"', "slurm": "{ mem = 0 }"}[key]
    text = path.read_text()
    more = f"[clusters.here.stages.prep-data]\n{key} = {value}\n[clusters.here.kubernetes]"
    path.write_text(text.replace("[clusters.here.kubernetes]", more))
    from trainkit.jobs.load import load

    with pytest.raises(ConfigError, match=f"stages.prep-data.{key} is Slurm's; units in pods"):
        load(tmp_path, {}).resolve("demo")


def test_what_pods_cannot_see_is_refused(tmp_path: Path) -> None:
    """Before anything is made, and before this machine does its part."""
    job = stage_job(tmp_path, "small", stages={"prep-data": StagePlace()})
    runner = pod_units(job, "prep-data", lambda text: None)
    assert isinstance(runner, PodUnits)
    need = replace(NEED, inputs=(Path("/shared/a.jsonl"), Path("/home/me/b.jsonl")))
    with pytest.raises(ConfigError, match=r"prep-data reads /home/me/b.jsonl, which no pod sees"):
        runner.run(StageWork(need, need.units, tmp_path / "stamps", StageLines(print)))
    assert not (tmp_path / "stamps").exists()


def test_a_pod_does_the_share_of_its_index() -> None:
    shares = [[{"name": "a"}, {"name": "b"}], [{"name": "c"}]]
    level = {"tasks": 2, "shares": shares}
    for index, names in ((0, ["a", "b"]), (1, ["c"]), (2, [])):
        found = unit_share(level, {"JOB_COMPLETION_INDEX": str(index)})
        assert [unit["name"] for unit in found] == names
    # of a Slurm whose nodes are pods
    inside = {"JOB_COMPLETION_INDEX": "0", "SLURM_ARRAY_TASK_ID": "0", "SLURM_PROCID": "1"}
    assert unit_share(level, inside) == shares[1]


def test_indexes() -> None:
    assert parse_indexes("") == []
    assert parse_indexes("0-2,5,9-10") == [0, 1, 2, 5, 9, 10]


def test_a_unit_under_which_nodes_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evictions of pods are no failures to Kubernetes, without end: a node that runs out of memory
    evicts at once. A pod of another Job has not begun it."""
    out = tmp_path / "tokens-0.out"
    unit = {
        "name": "tokens-0",
        "argv": [sys.executable, "-c", "print('{\"result\": {}}')"],
        "out": str(out),
        "log": str(tmp_path / "tokens-0.log"),
        "stamp": str(tmp_path / "tokens-0.json"),
        "digest": "d",
        "outputs": [],
        "env": {},
    }
    begun = Path(f"{out}.begun")
    nodes = ["node1", "node2", "node1"]
    monkeypatch.setenv("TRAINKIT_POD_NAME", "tokens-1-0-abcde")
    monkeypatch.setenv("TRAINKIT_NODE_NAME", "node3")
    write_json(begun, {"job": "tokens-1-0", "nodes": nodes})
    assert run_once(unit) == 1
    assert "its node failed under it 3 times (node1, node2, node1)" in out.read_text()
    write_json(begun, {"job": "tokens-0-0", "nodes": nodes})
    assert run_once(unit) == 0 and not begun.exists()
    assert json.loads(out.read_text().splitlines()[-1]) == {"ended": 0, "host": "node3"}


def test_the_record_says_where_the_job_is(tmp_path: Path) -> None:
    ours = ArraysInFlight(
        "lock", "a", "", ("x-1",), ("/l",), (), "pid 1 on h", "kubernetes", "team", "east"
    )
    write_in_flight(tmp_path, ours)
    assert read_in_flight(tmp_path, "a") == ours
    assert ours.words() == "Kubernetes' jobs x-1 of pid 1 on h"
    slurms = ArraysInFlight("lock", "b", "d", ("1",), ("/l",), ("/r/one",))
    write_in_flight(tmp_path, slurms)
    assert {"scheduler", "namespace", "context"}.isdisjoint(
        json.loads((tmp_path / "b.making.json").read_text())
    )
