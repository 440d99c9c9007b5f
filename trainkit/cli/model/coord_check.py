"""The task `coord-check`, with its picture."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.base.documents import document
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_text
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.options import CoordCheckOptions
from trainkit.cli.tables import Listing, Page
from trainkit.cli.wrapper import TaskContext, TaskResult
from trainkit.reports.chart import Chart, Series, text
from trainkit.reports.page import page

if TYPE_CHECKING:
    from trainkit.train.coordinate_check import Coordinates


def coord_check(task: TaskContext, name: str, options: CoordCheckOptions) -> TaskResult:
    """The task `coord-check`."""
    from trainkit.train.coordinate_check import check_coordinates, usual_widths

    if options.html and Path(options.html).suffix not in (".html", ".htm"):
        raise ConfigError(f"{options.html} does not end in .html")
    job = load_jobs(task).resolve(name, options.set).job
    if not job.is_native:
        raise ConfigError(
            f"job {name} is of engine {job.engine}: its widths are not trainkit's to check",
            hint="--set engine=native",
        )
    widths = _widths(options.widths) or usual_widths(job.model)
    found = check_coordinates(
        job, widths, lambda width: task.say(f"width {width}, {job.model.num_layers} layers")
    )
    if options.html:
        write_text(Path(options.html), page(f"Widths of {name}", _sections(name, found)))
        task.say(f"wrote {options.html}")
    return TaskResult(
        document(
            "coord-check/1",
            job=name,
            parametrization=job.model.parametrization,
            widths=widths,
            sizes=found.sizes,
            slopes={each: found.slope(each) for each in found.sizes},
            growing=found.growing(),
            shrinking=found.shrinking(),
        ),
        page=_page(found, job.model.parametrization),
    )


def _widths(given: str) -> list[int]:
    """Raises ConfigError for what is no list of two or more hidden sizes."""
    if not given:
        return []
    words = given.split(",")
    widths = sorted({int(word) for word in words if word.strip().isdecimal()})
    if len(widths) < max(2, len(words)) or not widths[0]:
        raise ConfigError(f"--widths {given}: expected two or more such as 64,128,256")
    return widths


def _page(found: Coordinates, parametrization: str) -> Page:
    growing = found.growing()
    shrinking = found.shrinking()
    last = max(next(iter(found.sizes.values())))
    numbers = [str(width) for width in found.widths]
    listing = Listing("mean |x|", *numbers, "slope", "", right=[*numbers, "slope"])
    for name, sizes in found.sizes.items():
        cells = [f"{size:.4g}" for size in sizes[last]]
        word = "grows" if name in growing else "shrinks" if name in shrinking else ""
        listing.add_row(name, *cells, f"{found.slope(name):+.2f}", word)
    yield listing
    if not growing and not shrinking:
        yield f"after {last} steps activations are as large at every width"
        return
    advice = "check what differs between the widths besides the width"
    if parametrization == "standard":
        advice = "parametrization = 'mup' with mup_base_hidden_size keeps them"
    changing = ", ".join(growing + shrinking)
    yield (
        f"after {last} steps {changing} change with the width: the best learning rate of a narrow"
        f" model is not that of a wide one; {advice}"
    )


def _sections(name: str, found: Coordinates) -> Iterator[str]:
    """A chart for each activation, a line for each look."""
    yield f"<h1>Activations of {text(name)} over the width</h1>"
    yield '<p class="soft">log2 of the mean of |x|; a line for each number of steps before</p>'
    yield '<div class="grid">'
    for activation, sizes in found.sizes.items():
        series = [
            Series(
                f"{steps} steps",
                [
                    (math.log2(width), math.log2(size) if size > 0 else None)
                    for width, size in zip(found.widths, row, strict=True)
                ],
                colour,
            )
            for colour, (steps, row) in enumerate(sizes.items())
        ]
        title = f"{activation}: slope {found.slope(activation):+.2f}"
        yield Chart(title, "log2 of the hidden size", series).to_html()
    yield "</div>"
