"""A run and its stages as one graph: the lines of sbatch, what is noted, who waits for whom,
which unit failed. sbatch, squeue and scancel only write down what they are told here; the real
thing is in tests/cluster/test_slurm_stages.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import trainkit
from tests.launch.recorded_slurm import ARGV, Slurm, need, new_start, part, ready, submit, units
from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.base.locks import locked
from trainkit.cli.run.stages import stage_ui
from trainkit.jobs.load import load
from trainkit.jobs.resolved import write_job
from trainkit.launch.run_inputs import refuse_other_inputs
from trainkit.launch.scheduler_registry import preparation_for
from trainkit.launch.slurm.arrays import array_place
from trainkit.launch.slurm.job_graph import (
    GraphPart,
    StageGraph,
    finish_job_script,
    stage_failure,
    stages_folder,
    stages_pending,
    submit_graph,
)
from trainkit.launch.slurm.reconcile import newest_job_status
from trainkit.launch.slurm.sbatch import dependency_options
from trainkit.launch.slurm.shared_arrays import array_progress
from trainkit.launch.slurm.stage_graph import hold_stage_graph
from trainkit.launch.slurm.submit_run import submit_with_stages
from trainkit.launch.slurm.withdraw import withdraw_stage_jobs
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record
from trainkit.runs.slurm import change_slurm_job
from trainkit.stages.array_task import run_once
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import (
    StageWork,
    begin_need,
    needs_of,
    refuse_stale,
    stamps_folder,
    update_stage,
)
from trainkit.stages.in_flight import ArraysInFlight, all_in_flight, read_in_flight
from trainkit.stages.index import IndexStage
from trainkit.stages.prep_data import PrepDataStage
from trainkit.stages.registry import STAGES
from trainkit.stages.stamps import check_freshness, stamp_unit, unit_folder


def test_everything_is_submitted_in_one_go(slurm: Slurm) -> None:
    """Datasets one after another (a stage has so many nodes), each level after the one before,
    the small job after all, the run last."""
    run, said = submit(slurm, "one", part(slurm, need("a", 3)), part(slurm, need("b", 20)))
    folder, after = stages_folder(run), "--kill-on-invalid-dep=yes"
    assert slurm.lines() == [
        f"sbatch --parsable {folder}/prep-data-a-0.sh",
        f"sbatch --parsable --dependency=afterok:101 {after} {folder}/prep-data-a-1.sh",
        f"sbatch --parsable --dependency=afterok:102 {after} {folder}/prep-data-b-0.sh",
        f"sbatch --parsable --dependency=afterok:103 {after} {folder}/prep-data-b-1.sh",
        f"sbatch --parsable --dependency=afterok:104 {after} {folder}/small-ready.sh",
        f"sbatch --parsable --dependency=afterok:105 {after} {run.path}/launch/slurm.sh",
    ]
    assert said == [
        "job 101: prep-data-a-0: 3 units in 1 x 3 tasks",
        "job 102: prep-data-a-1: 1 unit in 1 x 1 task, after job 101 has gone well",
        "job 103: prep-data-b-0: 20 units in 3 x 8 tasks, after job 102 has gone well",
        "job 104: prep-data-b-1: 1 unit in 1 x 1 task, after job 103 has gone well",
        "job 105: small-ready: notes that the stages are made, plans, after job 104 has gone well",
    ]
    assert stages_pending(run) and [
        job["id"] for job in json.loads(run.slurm.read_text())["jobs"]
    ] == ["106"]


def test_the_small_job(slurm: Slurm) -> None:
    run = RunFolder(Path("/shared/runs/small/one"))
    text = finish_job_script(run, slurm.job, StageGraph((part(slurm, need("a", 3)),), ("index",)))
    assert text.splitlines() == [
        "#!/bin/bash -l",
        "#SBATCH --job-name=small-ready",
        "#SBATCH --nodes=1",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --account=lm",
        "#SBATCH --partition=cpu",
        "#SBATCH --time=24:00:00",
        "#SBATCH --output=/shared/runs/small/one/launch/stages/small-ready-%j.out",
        "#SBATCH --open-mode=append",
        "#SBATCH --export=HOME,USER,LOGNAME,SHELL,PATH,LANG,LC_ALL,TZ",
        "#SBATCH --requeue",
        "set -e",
        (
            "exec /opt/p/python -I /shared/runs/small/one/code/trainkit/launch/slurm/"
            "finish_stages.py /shared/runs/small/one"
        ),
    ]


def test_a_dependency_of_the_jobs_own_is_kept() -> None:
    assert dependency_options("7", {"dependency": "singleton"}) == [
        "--dependency=singleton,afterok:7",
        "--kill-on-invalid-dep=yes",
    ]
    with pytest.raises(ConfigError, match="any of several"):
        dependency_options("7", {"dependency": "afterok:1?afterok:2"})


def test_a_second_run_waits_for_the_same_arrays(slurm: Slurm) -> None:
    first, _ = submit(slurm, "one", part(slurm, need("a", 3)))
    stamps = slurm.folder / "stamps" / "prep-data"
    (making,) = all_in_flight(stamps, "a")
    assert making.jobs == ("101", "102") and all_in_flight(stamps, "b") == []
    slurm.says("101|RUNNING", "102|PENDING")
    assert array_progress(making) == "going"
    second, said = submit(
        slurm, "two", part(slurm, need("a", 3), making), part(slurm, need("b", 1))
    )
    assert (
        slurm.lines()[4].endswith("prep-data-b-0.sh")
        and "--dependency=afterok:102 " in slurm.lines()[4]
    )
    assert said[0] == "prep-data a: Slurm's jobs 101, 102 of run one make it"
    # who leaves first leaves the arrays to the other
    slurm.says("101|RUNNING", "102|PENDING", *(f"{id}|PENDING" for id in range(103, 109)))
    write_json(second.job, {})
    assert withdraw_stage_jobs(first) == ["103"] and slurm.lines()[-1] == "scancel --quiet 103"
    joined = read_in_flight(stamps, "a")
    assert joined is not None and joined.runs == (str(second.path),)
    assert withdraw_stage_jobs(first) == ["103"], "asked again it spares them too"
    assert withdraw_stage_jobs(second) == ["105", "106", "107", "101", "102"]
    (left,) = all_in_flight(stamps, "a")
    assert left.runs == () and "being taken out" in left.words(), (
        "until Slurm says that they are over their tasks may write"
    )


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (["1|RUNNING", "1|FAILED"], "failing"),
        (["1|COMPLETED", "2|PENDING"], "going"),
        (["1|COMPLETED", "2|CANCELLED"], "over"),
        ([], "over"),
    ],
)
def test_how_far_arrays_are(slurm: Slurm, states: list[str], expected: str) -> None:
    slurm.says(*states)
    assert array_progress(ArraysInFlight("a", "a", "0", ("1", "2"), (), ())) == expected


def test_a_unit_that_failed_is_named_by_the_record(slurm: Slurm) -> None:
    run, _ = submit(slurm, "one", part(slurm, need("a", 3)))
    slurm.says("101|RUNNING", "102|PENDING", "103|PENDING")
    assert stage_failure(run) is None, (
        "a person has cancelled the run; nothing of its stages has failed"
    )
    unit = units(run, 0)[1]
    error = {
        "problems": [{"message": "is not JSON", "file": "c.jsonl", "line": 2, "hint": "mend it"}],
        "exit": 6,
    }
    Path(unit["out"]).write_text(
        f"noise\n{json.dumps({'error': error})}\n{json.dumps({'ended': 6, 'host': 'node7'})}\n"
    )
    failure = stage_failure(run)
    assert failure is not None
    change_slurm_job(run, "104", ended=failure)
    record = read_run_record(run)
    assert (record.state, record.exit, record.failure_class) == (
        "failed",
        Exit.STAGE_FAILED,
        "user",
    )
    assert (
        record.root_cause is not None
        and record.root_cause["message"] == f"c.jsonl:2: {unit['name']} on node7: is not JSON"
    )
    assert record.root_cause["advice"] == "mend it" and record.next_tasks() == [
        "invoke why one",
        "invoke train small",
    ]


def test_units_of_the_element_that_did_not_end_well_are_named(slurm: Slurm) -> None:
    """By what Slurm says of it; what Slurm did to those that waited for it is not a cause."""
    run, _ = submit(slurm, "one", part(slurm, need("a", 40)))
    slurm.says(
        "101_0|COMPLETED", "101_1|CANCELLED", "101_2|RUNNING", "101_3|RUNNING", "102_0|PENDING"
    )
    level = json.loads((stages_folder(run) / "prep-data-a-0.json").read_text())
    (first,) = level["shares"][8]  # of the second node, the first of eight tasks
    failure = stage_failure(run)
    assert failure is not None and failure["exit"] == 6
    assert failure["message"].startswith(f"{first['name']}, ")
    assert failure["message"].endswith(" and 5 more did not end: job 101_1 CANCELLED")
    slurm.says(
        "101_0|COMPLETED",
        "101_1|TIMEOUT|TimeLimit",
        "102_0|CANCELLED|DependencyNeverSatisfied",
        "103|CANCELLED|DependencyNeverSatisfied",
    )
    done = first
    stamp_unit(Path(done["stamp"]), done["name"], done["digest"], [], {})
    failure = stage_failure(run)
    assert failure is not None and done["name"] not in failure["message"]
    assert failure["message"].endswith(" and 4 more did not end: job 101_1 TIMEOUT (TimeLimit)")
    # as where they are another run's, which has been deleted
    for path in stages_folder(run).glob("prep-data-*.json"):
        path.unlink()
    failure = stage_failure(run)
    assert failure is not None and failure["message"].endswith(
        "not all jobs that make its stages ended well: job 101_1 TIMEOUT (TimeLimit)"
    )


@pytest.mark.parametrize(
    "reason", ["launch failed requeued held", "job requeued in held state", "JobHeldUser"]
)
def test_an_element_that_slurm_holds_waits_for_a_person(slurm: Slurm, reason: str) -> None:
    run, _ = submit(slurm, "one", part(slurm, need("a", 40)))
    slurm.says("101_0|RUNNING", f"101_3|PENDING|{reason}", "104|PENDING|Dependency")
    seen = newest_job_status(replace(read_run_record(run), state="queued"))
    assert seen is not None and "expected to start" not in seen.words()
    assert seen.words().endswith(
        f"job 101_3 is held ({reason}): `scontrol release 101_3` lets it go"
    )


def test_the_small_jobs_refusal_is_the_runs(slurm: Slurm) -> None:
    run, _ = submit(slurm, "one", part(slurm, need("a", 1)))
    write_json(
        stages_folder(run) / "ended.json",
        document("stages-ended/1", exit=4, message="too large", advice="more nodes"),
    )
    assert stage_failure(run) == {
        "state": "FAILED",
        "class": "user",
        "exit": 4,
        "message": "too large",
        "advice": "more nodes",
    }
    write_json(run.path / "launch" / "inputs.json", document("inputs/1", files=[]))
    assert stage_failure(run) is None, "made after all"


def test_nothing_is_left_where_sbatch_refuses(slurm: Slurm) -> None:
    (slurm.folder / "bin" / "sbatch").write_text(
        f'#!/bin/bash\necho "sbatch $*" >> {slurm.folder}/lines; n=$(grep -c ^sbatch'
        f" {slurm.folder}/lines); [ $n -lt 3 ] && echo $((100 + n)) && exit\necho sbatch: error:"
        " Invalid account >&2; exit 1\n"
    )
    slurm.says("101|PENDING", "102|PENDING")
    resolved = load(slurm.folder).resolve("small")
    graph = StageGraph((part(slurm, need("a", 3)),))
    with (
        locked(slurm.folder / "stamps" / "prep-data" / "a.lock", {}),
        pytest.raises(TrainkitError, match="Invalid account"),
    ):
        submit_with_stages(new_start(resolved, slurm.folder), graph, lambda text: None)
    assert slurm.lines()[-1] == "scancel --quiet 101 102" and not list(
        (slurm.folder / "runs").glob("*/*/job.json")
    )
    (left,) = all_in_flight(slurm.folder / "stamps" / "prep-data", "a")
    assert left.runs == ()


def test_what_the_small_job_completes_and_refuses(slurm: Slurm) -> None:
    (slurm.folder / "corpus").mkdir()
    corpus = slurm.folder / "corpus" / "part.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"text": f"the quick brown fox number {i} jumps over the lazy dog"}) + "\n"
            for i in range(60)
        )
    )
    resolved = load(slurm.folder).resolve("text", [f"cluster.python={json.dumps(sys.executable)}"])
    job, stamps = resolved.job, stamps_folder(slurm.folder, "prep-data")

    def submitted(name: str) -> tuple[RunFolder, list[Need]]:
        needs = PrepDataStage().needs(job, stamps, force=True)
        run, place = slurm.run(name), array_place(job, "prep-data", lambda text: None)
        assert place is not None
        run.code.rmdir()
        run.code.symlink_to(Path(trainkit.__file__).parent.parent)
        write_job(run.job, resolved)
        parts = []
        for each in needs:
            todo, inputs = begin_need(
                each, stamps, check_freshness(each, stamps, force=True), force=True
            )
            parts.append(GraphPart(place, each, tuple(todo), inputs))
        submit_graph(run, job, StageGraph(tuple(parts), ("index",)), lambda text: None)
        return run, needs

    run, needs = submitted("one")
    assert ready(run) == 6 and "units are not made" in (stage_failure(run) or {})["message"]
    (stages_folder(run) / "ended.json").unlink()
    for number in range(3):
        assert [run_once(unit) for unit in units(run, number)] == [0]
    assert ready(run) == 0 and stage_failure(run) is None and not stages_pending(run)
    assert (
        all(check_freshness(need, stamps).fresh for need in needs)
        and all_in_flight(stamps, "lines") == []
        and not list(stamps.glob("*/*.out"))
    )
    assert json.loads(run.plan.read_text())["vocab_size"] == 384 and all(
        check_freshness(need, stamps).fresh for need in IndexStage().needs(job, stamps)
    )
    refuse_other_inputs(run)

    run, _ = submitted("two")
    for number in range(3):
        assert [run_once(unit) for unit in units(run, number)] == [0]
    corpus.write_text(corpus.read_text() * 2)
    assert (
        ready(run) == 5
        and f"input {corpus} changed" in (stage_failure(run) or {})["message"]
        and not run.plan.exists()
    )
    assert not any(
        check_freshness(need, stamps).fresh for need in PrepDataStage().needs(job, stamps)
    ), "the next train makes it anew"


def test_without_a_place_all_is_made_here_in_turn(slurm: Slurm) -> None:
    """What the index is depends on the tokens, which are made a moment before."""
    (slurm.folder / "corpus").mkdir()
    (slurm.folder / "corpus" / "part.jsonl").write_text('{"text": "the quick brown fox"}\n' * 60)
    job = load(slurm.folder).resolve("text", ["cluster=bare"]).job
    context = slurm.task
    with hold_stage_graph(job, preparation_for(job, slurm.folder, stage_ui(context))) as graph:
        assert graph == StageGraph(())
    needs = needs_of(job, STAGES)
    assert {need.stage for need in needs} == {"build", "prep-data", "index"}
    refuse_stale(needs, slurm.folder)


def test_how_forgotten_arrays_ended_is_asked_of_sacct(slurm: Slurm) -> None:
    """After MinJobAge slurmctld knows them no more; a time limit and scancel leave no word of a
    unit."""
    run, _ = submit(slurm, "one", part(slurm, need("a", 3)))
    slurm.keeps(
        "101_0|COMPLETED",
        "101_1|TIMEOUT",
        "101_1.batch|CANCELLED",
        "102_0|CANCELLED by 0",
        "103|REQUEUED",
    )
    failure = stage_failure(run)
    assert failure is not None and failure["message"].endswith(
        "did not end: job 101_1 TIMEOUT (exit code 0:0)"
    ), failure
    slurm.keeps()
    assert "Slurm knows the jobs no more" in (stage_failure(run) or {})["message"]


class Silent:
    """A reporter that keeps who was waited for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def waiting(self, need: Need, holder: str) -> None:
        self.waited.append(holder)

    def __getattr__(self, name: str) -> Any:
        return lambda *values: None


def test_whoever_makes_it_here_waits_for_arrays_of_a_run(
    slurm: Slurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(need("a", 1), units=(Unit("only", ARGV, {}),))
    submit(slurm, "one", part(slurm, made))
    monkeypatch.setattr("trainkit.stages.execute.WAIT_SECONDS", 0.01)
    reporter, asked, begun = Silent(), list[str](), list[list[str]]()

    def going(making: ArraysInFlight) -> bool:
        asked.append(making.name)
        return len(asked) < 3

    def execute(work: StageWork) -> None:
        begun.append([unit.name for unit in work.units])

    update_stage(made, slurm.folder, execute, reporter, going=going)
    assert (
        asked == ["a"] * 4
        and begun == [["only"]]
        and reporter.waited == ["Slurm's jobs 101 of run one"]
    )
    assert (unit_folder(slurm.folder / "stamps" / "prep-data", "a")).is_dir()
    assert all_in_flight(slurm.folder / "stamps" / "prep-data", "a") == []
