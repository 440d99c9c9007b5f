"""The task `scaling-law`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, TrainkitError, raise_problems
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.experiment.sweep.record import read_newest
from trainkit.runs.find import find_run
from trainkit.runs.folder import RunFolder
from trainkit.scaling.isoflop import NEEDS
from trainkit.scaling.picture import draw_law, refuse_picture
from trainkit.scaling.points import read_points
from trainkit.scaling.report import Prediction, ScalingLaw, scaling_law as fit


@dataclass(frozen=True)
class LawForms:
    """What `scaling-law` does besides.

    Args:
        predict: "N,D" each.
        write: the law's file.
        picture: a file; "": none.
    """

    predict: Sequence[str]
    write: str
    picture: str


def runs_of(roots: Sequence[Path], text: str) -> list[RunFolder]:
    """Runs by a job's name, whose newest sweep they are, or by their own with a , between.

    Raises ConfigError (exit 3): one is not there, or a member of the sweep has no run yet.
    """
    found: list[RunFolder] = []
    for word in text.split(","):
        records = [record for root in roots if (record := read_newest(root, word)) is not None]
        if not records:
            found.append(find_run(roots, word))
            continue
        newest = max(records, key=lambda record: record.id)
        folders = [(each, newest.folder_of(each)) for each in newest.members]
        raise_problems(
            Problem(
                f"{word}: {each.words} has no run yet", hint=f"invoke sweep {word} goes on with it"
            )
            for each, folder in folders
            if folder is None
        )
        found += [folder for _, folder in folders if folder is not None]
    return list({run.id: run for run in found}.values())


def _asked(text: str) -> tuple[float, float]:
    """Raises TrainkitError (exit 1): it is not two numbers."""
    try:
        parameters, tokens = map(float, text.split(","))
    except ValueError:
        parameters = tokens = math.nan
    if not (0 < parameters < math.inf and 0 < tokens < math.inf):
        raise TrainkitError(
            f"--predict {text}: expected parameters and tokens, such as 7e9,140e9",
            exit=Exit.USAGE,
        )
    return parameters, tokens


def scaling_law(task: TaskContext, text: str, forms: LawForms) -> TaskResult:
    """The task `scaling-law`.

    Args:
        task: how it was called.
        text: which runs.
        forms: what is done besides.

    Raises:
        TrainkitError: numbers that are none (exit 1).
        ConfigError: as `runs_of`, `read_points`, `scaling_law.fit` and `ScalingLaw.predict`.
    """
    asked = [_asked(each) for each in forms.predict]
    if forms.picture:
        refuse_picture(Path(forms.picture))
    if Path(forms.write).suffix != ".json":
        raise ConfigError(f"--write '{forms.write}' does not end in .json")
    law = fit(read_points(runs_of(load_jobs(task).roots(), text)))
    predicted = [law.predict(*each) for each in asked]
    write_json(Path(forms.write), law.to_json())
    task.say(f"wrote {forms.write}")
    if forms.picture:
        largest = max(law.points, key=lambda point: point.parameters)  # attention counts as there
        factor = largest.flops / largest.parameters / largest.tokens
        costs = [(factor * each.parameters * each.tokens, each) for each in predicted]
        draw_law(law, Path(forms.picture), costs)
        task.say(f"wrote {forms.picture}")
    values = law.to_json() | {"predictions": [each.to_json() for each in predicted]}
    return TaskResult(values, page=_page(law, predicted))


def _page(law: ScalingLaw, predicted: Sequence[Prediction]) -> Page:
    runs = Listing(
        *("run", "parameters", "tokens", "FLOPs", "loss", "residual"),
        right=("parameters", "tokens", "FLOPs", "loss", "residual"),
        drop=("FLOPs",),
    )
    for point, residual in zip(law.points, law.residuals, strict=True):
        cells = (f"{point.parameters:,}", f"{point.tokens:,}", f"{point.flops:.3g}")
        runs.add_row(point.run, *cells, f"{point.loss:.4f}", f"{residual:+.2%}")
    yield runs
    yield f"L(N, D) = E + A / N^alpha + B / D^beta, {law.loss.replace('_', ' ')}:"
    numbers = Listing("", "fit", "low", "high", right=("fit", "low", "high"))
    a = law.law.beta / (law.law.alpha + law.law.beta)
    fitted = {**vars(law.law), "a": a, "b": 1 - a}
    for key, (low, high) in law.intervals.items():
        numbers.add_row(key, *(f"{value:.5g}" for value in (fitted[key], low, high)))
    yield numbers
    yield (
        f"intervals of {law.confidence:.0%} by {len(law.draws)} draws; best N is proportional to"
        " C^a, best D to C^b"
    )
    if law.isoflops is None:
        yield NEEDS
    else:
        found = law.isoflops
        for each in found.parabolas:
            yield (
                f"{each.flops:.3g} FLOPs: best N {each.parameters:,.4g}, D {each.tokens:,.4g},"
                f" loss {each.loss:.4f}"
            )
        yield "by parabolas a = {:.3f} ({:.3f} to {:.3f}), b = {:.3f} ({:.3f} to {:.3f})".format(
            found.a, *found.a_interval, found.b, *found.b_interval
        )
    for guess in predicted:
        yield (
            f"{guess.parameters:,.4g} parameters, {guess.tokens:,.4g} tokens: loss"
            f" {guess.loss:.4f} ({guess.low:.4f} to {guess.high:.4f})"
        )
