"""The task `scale`: a model for a budget, and the ladder of smaller ones below it."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import write_text
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import ScaleOptions
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.jobs.layers import parse_overrides
from trainkit.jobs.local_jobs import refuse_name
from trainkit.plan.storage import GIB
from trainkit.scaling.ladder import (
    PARTS,
    Budget,
    Dial,
    LadderRung,
    best_size,
    ladder_toml,
    measured_rungs,
    rungs_below,
)
from trainkit.scaling.picture import draw_law, refuse_picture
from trainkit.scaling.points import setting_of
from trainkit.scaling.report import Prediction, ScalingLaw

HOURS = {"hours": 1.0, "days": 24.0}
LARGEST = 1e28  # FLOPs, hours or dollars: for any more the search for a depth takes minutes


def budget_of(text: str, price: float) -> Budget:
    """What the command line says a run may cost.

    Args:
        text: 1e20, $500, 64 gpu-days, 100 gpu-hours.
        price: of a device and hour; 0: not given.

    Raises:
        TrainkitError: it is none of these, or dollars without a price (exit 1).
    """
    found = re.fullmatch(r"(\$?)\s*([0-9.e+]+)\s*(?:gpu-(hours|days))?", text.strip())
    try:
        amount = float(found[2]) if found else math.nan
    except ValueError:
        amount = math.nan
    if found is None or not 0 < amount <= LARGEST or (found[1] and found[3]):
        raise TrainkitError(
            f"'{text}' is no budget: expected FLOPs (1e20), dollars ('$500') or '64 gpu-days', up"
            f" to {LARGEST:g}",
            exit=Exit.USAGE,
        )
    if found[3]:
        return Budget(device_hours=amount * HOURS[found[3]])
    if not found[1]:
        return Budget(flops=amount)
    if not price:
        raise TrainkitError(
            f"'{text}': how many hours that buys is not known",
            exit=Exit.USAGE,
            hint="--price-per-gpu-hour 2.5: what a device of the cluster costs an hour",
        )
    if amount / price > LARGEST:
        raise TrainkitError(
            f"--price-per-gpu-hour {price:g}: '{text}' buys more than {LARGEST:g} hours",
            exit=Exit.USAGE,
        )
    return Budget(device_hours=amount / price)


def _depths(text: str, top: int) -> Sequence[int]:
    """Those of --ladder, or as `rungs_below`. Raises TrainkitError (exit 1)."""
    if not text:
        return rungs_below(top)
    words = text.split(",")
    if not all(word.strip().isdecimal() and int(word) for word in words):
        raise TrainkitError(f"--ladder {text}: expected depths, such as 4,6,8", exit=Exit.USAGE)
    depths = sorted({int(word) for word in words})
    if depths[-1] >= top:
        raise TrainkitError(
            f"--ladder {text}: the budget's model itself has {top} layers", exit=Exit.USAGE
        )
    return depths


def _law(path: str, dial: Dial) -> ScalingLaw | None:
    """Raises ConfigError (exit 3): the file is no law, or one of other data."""
    if not path:
        return None
    law = ScalingLaw.from_file(Path(path))
    for key, value in setting_of(dial.base).items():
        if law.setting.get(key) != value:
            raise ConfigError(
                f"{path} is of runs with {key} {law.setting.get(key)}; job {dial.base.name} has"
                f" {value}"
            )
    return law


def scale(task: TaskContext, text: str, options: ScaleOptions) -> TaskResult:
    """The task `scale`.

    Args:
        task: how it was called.
        text: the budget.
        options: of the command line.

    Raises:
        TrainkitError: options that are missing or do not go together (exit 1).
        ConfigError: as `best_size`, `Dial` and `ScalingLaw.predict`; the job or file that is
            written is there already (exit 3).
    """
    budget = budget_of(text, options.price_per_gpu_hour)
    if not options.job or (options.picture and not options.law):
        raise TrainkitError(
            "scale needs --job, the job whose shape the sizes have, and --law for a --picture",
            exit=Exit.USAGE,
        )
    jobs = load_jobs(task)
    written = Path(options.write)
    name = written.stem or f"{options.job}-scaled"
    if options.write:
        for job in (name, f"{name}-ladder"):
            refuse_name(jobs, job, "--write")
        if written.suffix != ".toml":
            raise ConfigError(f"--write {options.write} does not end in .toml")
        if written.exists():
            raise ConfigError(f"--write: {written} is there already", hint="give another name")
    if options.picture:
        refuse_picture(Path(options.picture))
    dial = Dial(jobs, options.job, options.set, options.rule)
    law = _law(options.law, dial)
    top = best_size(dial, budget, options.tokens_per_parameter, law)
    depths = _depths(options.ladder, top.depth)
    rungs = list(measured_rungs(dial, depths, options.tokens_per_parameter))
    predicted = top.predicted(law) if law else None
    if law and predicted and options.picture:
        draw_law(law, Path(options.picture), [(top.flops, predicted)])
        task.say(f"wrote {options.picture}")
    if options.write:
        sets = {".".join(each.path): each.value for each in parse_overrides(options.set)}
        write_text(written, ladder_toml(name, sets, dial, top, rungs))
        task.say(f'wrote {written}: jobs {name} and {name}-ladder; include = ["{written}"]')
    values = document(
        "scale/1",
        job=options.job,
        budget={"flops": budget.flops, "device_hours": budget.device_hours},
        rule=options.rule,
        tokens_per_parameter=None if law else options.tokens_per_parameter,
        parts=PARTS,
        best=_to_json(top, options.price_per_gpu_hour),
        predicted=predicted.to_json() if predicted else None,
        ladder=[_to_json(rung, options.price_per_gpu_hour) for rung in rungs],
    )
    refused = top.plan.exit if top.plan.exit == Exit.PLAN else Exit.DONE
    return TaskResult(values, refused, _page(top, rungs, predicted, options.price_per_gpu_hour))


def _hours(rung: LadderRung) -> float | None:
    return rung.plan.duration.device_hours if rung.plan.duration else None


def _to_json(rung: LadderRung, price: float) -> dict[str, object]:
    plan = rung.plan
    hours = _hours(rung)
    return {
        "depth": rung.depth,
        "parameters": rung.parameters,
        "tokens": rung.tokens,
        "flops": rung.flops,
        "device_hours": hours,
        "price": hours * price if hours is not None and price else None,
        "memory_bytes": plan.memory.fullest.total_bytes if plan.memory else None,
        "feasible": plan.feasible,
        "values": rung.values,
    }


def _page(
    top: LadderRung, rungs: Sequence[LadderRung], predicted: Prediction | None, price: float
) -> Page:
    numbers = ("depth", "width", "parameters", "tokens", "batch", "lr", "steps", "FLOPs")
    costs = ("GPU-hours", *(("price",) if price else ()), "GiB")
    table = Listing("", *numbers, *costs, right=(*numbers, *costs), drop=("GiB", "steps"))
    for rung in (*rungs, top):
        job = rung.job
        hours = _hours(rung)
        memory = rung.plan.memory
        cells = [
            "big" if rung is top else "",
            str(rung.depth),
            str(job.model.hidden_size),
            f"{rung.parameters:,}",
            f"{rung.tokens:,}",
            f"{job.global_batch_size:,}",
            f"{job.training.lr:.4g}",
            f"{job.training.train_iters:,}",
            f"{rung.flops:.3g}",
            f"{hours:,.3g}" if hours is not None else "-",
        ]
        if price:
            cells.append(f"{hours * price:,.2f}" if hours is not None else "-")
        table.add_row(*cells, f"{memory.fullest.total_bytes / GIB:.1f}" if memory else "-")
    yield table
    share = sum(rung.flops for rung in rungs) / top.flops
    yield f"{len(rungs)} runs to measure cost {share:.1%} of the big one's FLOPs"
    if predicted:
        yield f"loss by the law: {predicted.loss:.4f} ({predicted.low:.4f} to {predicted.high:.4f})"
    for objection in top.plan.objections:
        yield f"the big run cannot be as it is: {objection.problem(top.job.name)}"
