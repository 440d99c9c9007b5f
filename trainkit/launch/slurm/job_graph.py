"""The graph of a run: arrays of its stale stages, one small job that notes that they are made
and plans, and the run last; all submitted at once.

RUN/launch/stages has graph.json (what is made, written before anything is submitted), jobs.json
(Slurm's numbers), the scripts, what the jobs print, and ended.json where the small job refuses
the run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_json, write_text
from trainkit.base.lazy_dataclasses import asdict, dataclass
from trainkit.base.worker import said_by_worker
from trainkit.jobs.clusters import SlurmOptions
from trainkit.jobs.schema import Job
from trainkit.launch.array_units import ArrayLevel, ArrayUnit, array_levels, level_file
from trainkit.launch.launchers.transports import last_line
from trainkit.launch.programs import program_path
from trainkit.launch.slurm.array_scripts import ArrayPlace, stage_script
from trainkit.launch.slurm.array_states import (
    describe_failure,
    element_ends,
    first_failed,
    jobs_are_over,
)
from trainkit.launch.slurm.arrays import (
    array_argv,
    array_place,
    describe_level,
    submit_level,
    write_levels,
)
from trainkit.launch.slurm.sbatch import dependency_options, sbatch, submit
from trainkit.launch.slurm.squeue import element_statuses
from trainkit.runs.folder import RunFolder
from trainkit.stages.array_task import FORM as LEVEL
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import stamps_folder
from trainkit.stages.in_flight import ArraysInFlight, need_digest, write_in_flight
from trainkit.stages.stamps import read_stamp
from trainkit.stages.unit_process import unit_error

GRAPH = "graph/1"
JOBS = "stage-jobs/1"
ENDED = "stages-ended/1"


@dataclass(frozen=True)
class GraphPart:
    """One need in the graph.

    Args:
        place: where its units run.
        need: what it is.
        units: those to be made by Slurm.
        inputs: their identities when that was decided.
        shared: the arrays of another run that are making the very same; then this run submits none.
    """

    place: ArrayPlace
    need: Need
    units: tuple[Unit, ...]
    inputs: list[Any]
    shared: ArraysInFlight | None = None

    @property
    def levels(self) -> list[ArrayLevel]:
        if self.shared:
            return []
        return array_levels(self.need, self.units, self.place.asked)


@dataclass(frozen=True)
class StageGraph:
    """All that is made before a run.

    Args:
        parts: in order; each after those before it, since a stage is given so many nodes and no
            more.
        deferred: stages of which nobody knows what is needed until the parts are made: the small
            job makes them.
    """

    parts: tuple[GraphPart, ...]
    deferred: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageJob:
    """A job of the graph, but for the run's own. `own`: this run has submitted it."""

    id: str
    name: str
    own: bool


@dataclass(frozen=True)
class SubmittedArrays:
    """A part whose arrays this run has submitted, for a person who follows."""

    part: GraphPart
    ids: tuple[str, ...]
    units: tuple[ArrayUnit, ...]


def stages_folder(run: RunFolder) -> Path:
    """The folder of a run's graph."""
    return run.path / "launch" / "stages"


def finish_job_name(job: Job) -> str:
    """Name of the small job."""
    return f"{job.name}-ready"


def finish_job_script(run: RunFolder, job: Job, graph: StageGraph) -> str:
    """The script of the small job: on the partition of the stage that it makes itself, else of
    the last one before it."""
    place = next(
        (
            found
            for stage in graph.deferred
            if (found := array_place(job, stage, lambda text: None))
        ),
        graph.parts[-1].place,
    )
    shape: SlurmOptions = {
        "job-name": finish_job_name(job),
        "nodes": 1,
        "ntasks-per-node": place.asked.tasks_per_node if graph.deferred else 1,
    }
    words = [
        place.cluster.python or sys.executable,
        "-I",
        str(program_path(run.code, "finish_stages")),
        str(run.path),
    ]
    return stage_script(place, shape, f"{stages_folder(run)}/{finish_job_name(job)}-%j.out", words)


def describe_finish_job(job: Job, graph: StageGraph, after: str) -> str:
    """One line of the graph, for people."""
    made = f"makes {', '.join(graph.deferred)}, " if graph.deferred else ""
    return f"{finish_job_name(job)}: {made}notes that the stages are made, plans" + (
        f", after {after} has gone well" if after else ""
    )


def submit_graph(
    run: RunFolder, job: Job, graph: StageGraph, notice: Callable[[str], None]
) -> tuple[str, list[SubmittedArrays]]:
    """Submit everything; the run's script is there: (Slurm's number of the run's job, what can
    be followed). The caller holds the stages' locks.

    Raises TrainkitError (exit 8) where sbatch refuses a job; those before it are the caller's to
    take out, see `leave.withdraw_stage_jobs`.
    """
    further = dependency_options("0", job.sbatch_options)
    folder = stages_folder(run)
    code = run.code.resolve()
    folder.mkdir(parents=True)
    units = [
        write_levels(part.place, part.need, part.levels, _stamps(run, part), code, folder)
        for part in graph.parts
    ]
    _write_graph(run, graph)
    jobs: list[StageJob] = []
    before: list[str] = []  # whose end what comes next waits for
    followed = []
    for part, batches in zip(graph.parts, units, strict=True):
        if part.shared is not None:
            jobs += [StageJob(id, part.need.name, own=False) for id in part.shared.jobs]
            before += _join(run, part, part.shared, notice)
            continue
        ids: list[str] = []
        for level in part.levels:
            ids.append(submit_level(level, folder, before))
            _note(run, jobs, StageJob(ids[-1], level.name, own=True))
            files = tuple(str(level_file(folder, each)) for each in part.levels)
            made = ArraysInFlight(
                part.need.lock,
                part.need.name,
                need_digest(part.need, part.inputs),
                tuple(ids),
                files,
                (str(run.path),),
            )
            write_in_flight(_stamps(run, part), made)
            notice(f"job {ids[-1]}: {describe_level(level, _named(before))}")
            before = ids[-1:]
        followed.append(SubmittedArrays(part, tuple(ids), tuple(batches)))
    path = folder / f"{finish_job_name(job)}.sh"
    write_text(path, finish_job_script(run, job, graph), 0o755)
    ready = sbatch(array_argv(path, ":".join(before) or None), folder, hint=f"its script: {path}")
    _note(run, jobs, StageJob(ready, finish_job_name(job), own=True))
    notice(f"job {ready}: {describe_finish_job(job, graph, _named(before) or '')}")
    further = dependency_options(ready, job.sbatch_options)
    return submit(run, first_attempt=1, further=further), followed


def _join(
    run: RunFolder, part: GraphPart, arrays: ArraysInFlight, notice: Callable[[str], None]
) -> list[str]:
    """Wait for another run's arrays: the job that has to go well, if it has not already."""
    write_in_flight(
        _stamps(run, part),
        ArraysInFlight(**{**asdict(arrays), "runs": (*arrays.runs, str(run.path))}),
    )
    notice(f"{part.need.stage} {part.need.name}: {arrays.words()} make it")
    return [] if jobs_are_over(arrays.jobs[-1:]) else [arrays.jobs[-1]]


def _named(ids: Sequence[str]) -> str | None:
    return " and ".join(f"job {id}" for id in ids) or None


def _stamps(run: RunFolder, part: GraphPart) -> Path:
    return stamps_folder(run.root, part.need.stage)


def _note(run: RunFolder, jobs: list[StageJob], job: StageJob) -> None:
    """At once: who takes the run out must know of all that is submitted."""
    jobs.append(job)
    write_json(
        stages_folder(run) / "jobs.json", document(JOBS, jobs=[asdict(each) for each in jobs])
    )


def _write_graph(run: RunFolder, graph: StageGraph) -> None:
    needs = []
    for part in graph.parts:
        need = part.need
        folder = stages_folder(run)
        files = (
            part.shared.levels
            if part.shared
            else [str(level_file(folder, level)) for level in part.levels]
        )
        what = {
            "stage": need.stage,
            "name": need.name,
            "lock": need.lock,
            "version": need.version,
            "settings": dict(need.settings),
        }
        paths = {
            key: [str(path) for path in getattr(need, key)]
            for key in ("inputs", "outputs", "scratch")
        }
        needs.append({**what, **paths, "seen": part.inputs, "levels": list(files)})
    write_json(
        stages_folder(run) / "graph.json",
        document(GRAPH, needs=needs, deferred=list(graph.deferred)),
    )


def read_graph(run: RunFolder) -> dict[str, Any] | None:
    """graph.json; None where the run's stages were made before it was submitted."""
    path = stages_folder(run) / "graph.json"
    return read_document(path, GRAPH) if path.is_file() else None


def need_from_json(written: Mapping[str, Any]) -> Need:
    """A need of graph.json, without its units."""
    inputs, outputs, scratch = (
        tuple(map(Path, written[key])) for key in ("inputs", "outputs", "scratch")
    )
    return Need(
        written["stage"],
        written["name"],
        written["lock"],
        written["version"],
        written["settings"],
        inputs,
        outputs,
        (),
        scratch,
    )


def submitted_units(written: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What was submitted for a need of graph.json, as its tasks read it."""
    for path in written["levels"]:
        for share in read_document(Path(path), LEVEL)["shares"]:
            yield from share


def is_made(unit: Mapping[str, Any]) -> bool:
    """Whether a unit's last success was with what was submitted; its outputs may have been
    joined and swept since."""
    stamp = read_stamp(Path(unit["stamp"]))
    return stamp is not None and stamp.get("spec") == unit["digest"]


def read_stage_jobs(run: RunFolder) -> list[StageJob]:
    """The jobs of the graph; none where there is no graph."""
    path = stages_folder(run) / "jobs.json"
    if path.is_file():
        return [StageJob(**each) for each in read_document(path, JOBS)["jobs"]]
    return []


def stages_pending(run: RunFolder) -> bool:
    """Whether the run waits for its stages, or would have to: they were never completed."""
    return read_graph(run) is not None and not run.inputs.is_file()


def describe_active_job(run: RunFolder) -> str:
    """Which job of the graph is at work, or waits; "" where none does any more, or Slurm cannot
    be asked."""
    names = {job.id: job.name for job in read_stage_jobs(run)}
    with contextlib.suppress(TrainkitError):
        going = [each for each in element_statuses(list(names)) if not each.over]
        # what is held comes first: all others wait for it, and it for a person
        going.sort(key=lambda each: (not each.held, each.waits))
        if going:
            first = going[0]
            if first.held:
                return first.words()
            return f"job {first.id} ({names[first.array]}) is {first.state}"
    return ""


def write_refusal(run: RunFolder, error: TrainkitError) -> None:
    """The small job refuses the run: why."""
    write_json(
        stages_folder(run) / "ended.json", document(ENDED, exit=int(error.exit), **_words(error))
    )


def stage_failure(run: RunFolder) -> dict[str, Any] | None:
    """Why there are no ranks though the run's job is over: the stage's unit that failed, say.
    The form of SlurmJob.ended; None: not for its stages."""
    graph = read_graph(run)
    if graph is None or run.inputs.is_file():
        return None
    if (path := stages_folder(run) / "ended.json").is_file():
        return _failure(
            {key: value for key, value in read_document(path, ENDED).items() if key != "schema"}
        )
    units: list[Mapping[str, Any]] = []
    with contextlib.suppress(ConfigError):  # the run that has submitted them may have been deleted
        units = [unit for need in graph["needs"] for unit in submitted_units(need)]
    return _failed_unit(units) or _failed_jobs(run, units)


def _failed_unit(units: Sequence[Mapping[str, Any]]) -> dict[str, object] | None:
    """The first unit whose task says that it failed, and how many more."""
    failed = [(unit, end) for unit in units if (end := _end(unit)) is not None and end["ended"]]
    if not failed:
        return None
    unit, end = failed[0]
    error = unit_error(unit["name"], end["host"], end["ended"], end.get("error"), Path(unit["log"]))
    more = f" (and {len(failed) - 1} more units failed)" if len(failed) > 1 else ""
    cause = {**_words(error), "unit": unit["name"], "host": end["host"], "log": unit["log"]}
    return _failure({**cause, "message": f"{cause['message']}{more}", "exit": int(error.exit)})


def _failed_jobs(run: RunFolder, units: Sequence[Mapping[str, Any]]) -> dict[str, object] | None:
    """What Slurm says of the graph's jobs, where no unit said anything: None where some of them
    still go on well, or Slurm cannot be asked."""
    levels = _levels_by_job(run)
    try:
        ends = element_ends(list(levels))
    except TrainkitError:
        return None
    if not first_failed(list(levels), ends) and not all(each.over for each in ends):
        return None
    left = [unit["name"] for unit in units if not is_made(unit)]
    names, said = describe_failure(levels, ends, left)
    if left:
        return _failure(
            {
                "message": f"{names} did not end: {said}",
                "exit": int(Exit.STAGE_FAILED),
                "advice": f"what the jobs printed is in {stages_folder(run)}",
            }
        )
    output = next(iter(sorted(stages_folder(run).glob("*-ready-*.out"))), None)
    words = f"; {output} ends with: {last_line(output)}" if output else ""
    return _failure(
        {
            "message": f"not all jobs that make its stages ended well: {said}{words}",
            "exit": int(Exit.STAGE_FAILED),
        }
    )


def _levels_by_job(run: RunFolder) -> dict[str, Path | None]:
    """What the tasks of each job of the graph read, by its number, in order; None: of the small
    job."""
    jobs = read_stage_jobs(run)
    found: dict[str, Path | None] = {job.id: None for job in jobs}
    for need in (read_graph(run) or {"needs": []})["needs"]:
        paths = {Path(level).stem: Path(level) for level in need["levels"]}
        found |= {job.id: paths[job.name] for job in jobs if job.own and job.name in paths}
        shared = [job.id for job in jobs if not job.own and job.name == need["name"]]
        found |= dict(zip(shared, paths.values(), strict=False))
    return found


def _failure(values: Mapping[str, Any]) -> dict[str, object]:
    return {"state": "FAILED", "class": "user", **values}


def _words(error: TrainkitError) -> dict[str, str]:
    """An error's first message and its way out."""
    first = error.list[0]
    words = f"{first.place}: {first.message}" if first.place else first.message
    more = f" (and {len(error.list) - 1} more)" if len(error.list) > 1 else ""
    return {"message": words + more, "advice": first.hint}


def _end(unit: Mapping[str, Any]) -> dict[str, Any] | None:
    """The last words of a unit's task: {"ended": code, "host": name, "error": what it said};
    None where it has not ended."""
    try:
        output = Path(unit["out"]).read_bytes()
    except OSError:
        return None
    found: dict[str, Any] = {}
    for said in said_by_worker(output):
        found |= {key: said[key] for key in ("error", "ended", "host") if key in said}
    return found if isinstance(found.get("ended"), int) else None
