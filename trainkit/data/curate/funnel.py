"""curation.json: what went into each step, what came out, and why the rest did not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.base.documents import document, read_document
from trainkit.base.errors import ConfigError, Exit
from trainkit.base.extras import MissingExtra
from trainkit.base.files import atomic_open, read_json, write_json
from trainkit.data.curate.specs import FilterResult, StepCounts, SummarySpec

FORMATS = (".svg", ".png", ".pdf")
SCHEMA = "curation/1"
CURATION = "curation.json"


def summarize(spec: SummarySpec) -> dict[str, object]:
    """Write curation.json from the stamps of all passes. Raises ConfigError (exit 6) where other
    documents were read than were published, or no text is left."""
    passes = [
        [FilterResult.from_json(read_json(path)["result"]) for path in stamps]
        for stamps in spec.stamps
    ]
    totals = _totals(passes[0], passes[-1])
    if spec.documents is not None and totals["lines"] != spec.documents:
        raise ConfigError(
            f"datasets.{spec.name}: {totals['lines']:,} documents were read, {spec.documents:,}"
            " were published",
            exit=Exit.STAGE_FAILED,
            hint="some files are missing or of another version; or correct `documents`",
        )
    counts = add_steps(result.steps for results in passes for result in results)
    value = document(
        SCHEMA,
        name=spec.name,
        language=spec.language,
        words=sorted({result.words for results in passes for result in results}),
        **totals,
        steps=[{**each.to_json(), **_step_facts(spec, each.number)} for each in counts],
        passes=len(spec.stamps),
        shards=[shard.to_json() for shard in spec.shards],
    )
    write_json(spec.output, value)
    if not totals["text_bytes"]:
        raise _nothing_left(spec, totals, counts)
    return {"documents": totals["documents"], "text_bytes": totals["text_bytes"], "read": []}


def _nothing_left(
    spec: SummarySpec, totals: Mapping[str, object], counts: Sequence[StepCounts]
) -> ConfigError:
    most = max(counts, key=lambda each: sum(each.reasons.values()), default=None)
    if most is None or not most.reasons:
        what = f"no text in the {totals['lines']:,} documents that were read"
        hint = "look at the files, at text_key, and at what is left out (drop, min_document_bytes)"
    else:
        reason, count = max(most.reasons.items(), key=lambda each: each[1])
        what = (
            f"curation leaves no text of {totals['lines']:,} documents: step {most.number + 1}"
            f" ({most.step}) left out most, {count:,} of {most.documents_in:,} for {reason}"
        )
        hint = (
            f"`data-stats {spec.name} --curation` shows all steps, and examples of what they take"
        )
    return ConfigError(f"datasets.{spec.name}: {what}", exit=Exit.STAGE_FAILED, hint=hint)


def _totals(first: Sequence[FilterResult], last: Sequence[FilterResult]) -> dict[str, object]:
    """What was read in the first pass and written in the last."""
    return {
        "lines": sum(result.lines for result in first),
        "documents": sum(result.documents for result in last),
        "text_bytes": sum(result.text_bytes for result in last),
        "left_out": added(result.left_out for result in first),
        "rejects": sum(result.rejects for result in first),
        "rejected": added(result.rejected for result in first),
        "passed_over": added(result.passed_over for result in first),
    }


def _step_facts(spec: SummarySpec, number: int) -> dict[str, object]:
    """A step's table, and where what it compared lies."""
    keys = spec.keys.get(str(number), ())
    return {
        "table": dict(spec.steps[number]),
        "keys": [str(path.relative_to(spec.root)) for path in keys],
    }


def added(counters: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """{reason: count} of all together, sorted."""
    total: dict[str, int] = {}
    for counter in counters:
        for reason, count in counter.items():
            total[reason] = total.get(reason, 0) + count
    return dict(sorted(total.items()))


def add_steps(results: Iterable[Sequence[StepCounts]]) -> list[StepCounts]:
    """The counts of each step over all shards, in the order of the steps."""
    found: dict[int, StepCounts] = {}
    for step in (each for steps in results for each in steps):
        total = found.setdefault(step.number, StepCounts(step.number, step.step))
        total.documents_in += step.documents_in
        total.documents_out += step.documents_out
        total.bytes_in += step.bytes_in
        total.bytes_out += step.bytes_out
        total.reasons = added([total.reasons, step.reasons])
    return [found[number] for number in sorted(found)]


def read_curation(folder: Path) -> Mapping[str, Any]:
    """The curation.json of a folder. Raises ConfigError (exit 6) where there is none."""
    path = folder / CURATION
    if not path.is_file():
        raise ConfigError(
            f"{path} is not there: the dataset is not curated, or not prepared",
            exit=Exit.STAGE_FAILED,
            hint="invoke prep-data --dataset NAME",
        )
    return read_document(path, SCHEMA)


def counts_of(path: Path) -> Mapping[str, object]:
    """What dataset.json says of a curation.json: all but the names of files."""
    value = read_json(path)
    steps = [{**step, "keys": len(step["keys"])} for step in value["steps"]]
    return {**value, "steps": steps, "shards": len(value["shards"])}


def draw_funnel(curations: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw what each step let through into `path` (.svg, .png or .pdf). Raises ConfigError (exit
    3) for another ending and without matplotlib (the extra `report`)."""
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path} does not end in {', '.join(FORMATS)}")
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingExtra("drawing needs matplotlib, which is not installed", "report") from None
    with rc_context({"svg.hashsalt": "funnel", "svg.fonttype": "none", "font.size": 10}):
        rows = max(len(each["steps"]) for each in curations) + 1
        figure = Figure(figsize=(8, 0.8 + 0.4 * rows * len(curations)), layout="constrained")
        for number, curation in enumerate(curations):
            axes = figure.add_subplot(len(curations), 1, number + 1)
            names = ["read", *(step["step"] for step in curation["steps"])]
            first = curation["steps"][0]["documents_in"]
            counts = [first, *(step["documents_out"] for step in curation["steps"])]
            bars = axes.barh(range(len(names)), counts, color="#4c72b0")
            axes.bar_label(bars, [f"{count:,}" for count in counts], padding=4)
            axes.set_yticks(range(len(names)), names)
            axes.invert_yaxis()
            axes.set(xlabel="documents", title=curation["name"], xlim=(0, 1.15 * max(1, first)))
        with atomic_open(path) as file:
            figure.savefig(
                file,
                format=path.suffix[1:],
                metadata={"Date": None} if path.suffix == ".svg" else None,
            )
