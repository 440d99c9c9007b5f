"""The program of the small job that completes a run's stages on Slurm: it stamps what the arrays
have made, makes the stages that waited for it, and plans.

`python -I RUN/code/trainkit/launch/slurm/finish_stages.py RUN` on a node, after the last array of
RUN's graph has ended well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # by path: the snapshot this file is part of comes first
    # before an import writes bytecode: files.keep_others_from_writing says why
    os.umask(os.umask(0o002) | 0o002)
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.files import write_json
from trainkit.data.order.open import refuse_without_samples
from trainkit.jobs.resolved import read_job
from trainkit.launch.job_plan import plan_of
from trainkit.launch.remote_units import remote_argv, this_machine_in_image
from trainkit.launch.run_inputs import write_inputs
from trainkit.launch.slurm.job_graph import (
    is_made,
    need_from_json,
    read_graph,
    submitted_units,
    write_refusal,
)
from trainkit.launch.slurm.sbatch import forget_secrets
from trainkit.launch.slurm.shared_arrays import SharedArrayStatus
from trainkit.launch.stage_lines import StageLines
from trainkit.plan.planner import refuse_infeasible
from trainkit.runs.folder import RunFolder
from trainkit.stages.execute import (
    StageWork,
    complete_need,
    needs_in_turn,
    needs_of,
    refuse_stale,
    stage_lock,
    stamps_folder,
    update_stage,
)
from trainkit.stages.in_flight import clear_own_in_flight
from trainkit.stages.registry import HERE_FIRST, STAGES
from trainkit.stages.stamps import check_freshness
from trainkit.stages.unit_process import execute_locally


def _say(text: str) -> None:
    print(text, flush=True)


def finish_stages(run: RunFolder, graph: Mapping[str, Any]) -> None:
    """Stamp what the arrays of a run have made, make the stages that waited for it, plan, and
    note what the samples come from.

    Raises TrainkitError: 5 where an input has changed meanwhile, 6 where a unit is not made, 4
    where the plan objects, 3 as `open_mixture`.
    """
    job = read_job(run.job)
    stages = [stage for stage in STAGES if stage not in HERE_FIRST]
    for need in graph["needs"]:
        _stamp(run, need)
    refuse_stale(
        needs_of(job, [stage for stage in stages if stage.name not in graph["deferred"]]), run.root
    )
    reporter = StageLines(_say)
    array_status = SharedArrayStatus(_say)

    def execute(work: StageWork) -> None:
        if place := this_machine_in_image(job, work.need.stage, _say):
            place.run(work)
            return
        code = run.code.resolve()
        units = [
            replace(unit, argv=tuple(remote_argv(unit.argv, sys.executable, code)))
            for unit in work.units
        ]
        execute_locally(replace(work, units=units))

    for need in needs_in_turn(job, [stage for stage in stages if stage.name in graph["deferred"]]):
        update_stage(need, run.root, execute, reporter, going=array_status)
    plan = refuse_infeasible(plan_of(job))
    refuse_without_samples(job)
    write_json(run.plan, plan.to_json())
    write_inputs(run, needs_of(job, stages))


def _stamp(run: RunFolder, written: Mapping[str, Any]) -> None:
    """The stamp of a need, for the inputs that were seen when it was submitted; another run that
    waited for the same arrays may have written it."""
    need = need_from_json(written)
    stamps = stamps_folder(run.root, written["stage"])
    # the submitter's, until all is submitted
    with stage_lock(need, stamps):
        clear_own_in_flight(stamps, need.name, written["levels"])
        if check_freshness(need, stamps).fresh:
            return
        if left := [unit["name"] for unit in submitted_units(written) if not is_made(unit)]:
            message = (
                f"{need.stage} {need.name}: {len(left)} units are not made as they were submitted,"
                f" {left[0]} for one"
            )
            raise TrainkitError(
                message,
                exit=Exit.STAGE_FAILED,
                hint=f"was it made again meanwhile? invoke train {run.job_name} looks again",
            )
        complete_need(need, stamps, written["seen"])
        for unit in submitted_units(written):
            Path(unit["out"]).unlink(missing_ok=True)


def main() -> None:
    """The program."""
    run = RunFolder(Path(sys.argv[1]))
    graph = read_graph(run)
    assert graph is not None, f"{run.path} has no graph"
    os.environ.update(read_job(run.job).cluster.env)  # as every unit has it
    try:
        finish_stages(run, graph)
    except TrainkitError as error:
        write_refusal(run, error)
        forget_secrets(run)
        print(f"ERROR: {error}", file=sys.stderr)
        sys.exit(int(error.exit))


if __name__ == "__main__":
    main()
