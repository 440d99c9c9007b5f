"""What training reads in which steps, and what the parts of a blend weigh where sizes decide it.
Pure functions of the job and of sizes: the same on every rank and after every resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from decimal import Context, Decimal, localcontext
from fractions import Fraction

from trainkit.base.errors import ConfigError
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record
from trainkit.jobs.schema import Dataset, Job
from trainkit.plan.batch import consumed_after


@dataclass(frozen=True)
class DataSpan:
    """Steps in a row that read one dataset.

    Args:
        phase: 0 of the job's own dataset, else which of `jobs.X.phases`, from 1.
        dataset: what they read.
        first_step: steps before them.
        steps: how many they are.
        first: samples that training consumes before them.
        samples: that they consume.
    """

    phase: int
    dataset: Dataset
    first_step: int
    steps: int
    first: int
    samples: int


def spans_of(job: Job) -> tuple[DataSpan, ...]:
    """The spans of a training, in order: the job's own dataset, then every phase. A span begins
    where a global batch does, so that no step reads of two."""
    datasets = (job.dataset, *(phase.dataset for phase in job.phases))
    spans: list[DataSpan] = []
    step = first = 0
    for number, (dataset, steps) in enumerate(zip(datasets, job.steps_by_phase, strict=True)):
        end = consumed_after(job, steps, first)
        spans.append(DataSpan(number, dataset, step, steps, first, end - first))
        step += steps
        first = end
    return tuple(spans)


def phase_at(spans: Sequence[DataSpan], position: int) -> int:
    """Which phase the sample at a position belongs to; the last one has no end."""
    return max(span.phase for span in spans if span.first <= position)


def samples_of(job: Job, dataset: Dataset) -> int:
    """Samples that training draws from a dataset in all of its spans; 0 where it does not."""
    return sum(span.samples for span in spans_of(job) if span.dataset.name == dataset.name)


def tempered(sizes: Sequence[int], temperature: float) -> list[float]:
    """size^(1 / temperature) of each: the exponent alpha = 1 / temperature of multilingual BERT
    and XLM (Conneau and Lample 2019, arXiv:1901.07291, section 3.1).

    In decimal arithmetic: a C library's pow may differ in the last bit from another's, and the
    order of samples would with it.
    """
    with localcontext(Context(prec=28)):
        power = 1 / Decimal(repr(temperature))
        return [float(Decimal(size) ** power) for size in sizes]


def capped(weights: Sequence[float], limits: Sequence[int], samples: int) -> list[int] | None:
    """Samples that each part gives of `samples`: in proportion to the weights, but none more than
    its limit; what it would exceed goes to the others in proportion (UniMax, Chung et al. 2023,
    arXiv:2304.09151, algorithm 1, for any weights). None where the limits sum to fewer.

    Args:
        weights: at least 0, not all 0.
        limits: whole samples, 0 for weight 0 or not.
        samples: to be given.
    """
    exact = [Fraction(weight) for weight in weights]
    by_need = sorted(
        (at for at, weight in enumerate(exact) if weight), key=lambda at: limits[at] / exact[at]
    )
    if sum(limits[at] for at in by_need) < samples:
        return None
    given = [Fraction(0)] * len(exact)
    left = Fraction(samples)
    weight_left = sum(exact, start=Fraction(0))
    for at in by_need:  # those that reach their limit first
        given[at] = min(Fraction(limits[at]), left * exact[at] / weight_left)
        left -= given[at]
        weight_left -= exact[at]
    # cumulated and rounded down: each within 1, none above its limit, and the sum is exact
    whole: list[int] = []
    total = Fraction(0)
    for part in given:
        before = int(total)
        total += part
        whole.append(int(total) - before)
    return whole


def blend_weights(
    dataset: Dataset,
    groups: Sequence[str],
    given: Mapping[str, float | None],
    sizes: Sequence[int],
    *,
    samples: int | None = None,
    drawn: Sequence[int] = (),
) -> list[float]:
    """The weights of what a blend is made of: what each dataset is given, else its size, tempered;
    shared among its files by size; capped.

    Args:
        dataset: the blend.
        groups: the dataset that each file belongs to.
        given: each dataset's own weight; None: by size.
        sizes: samples of an epoch of each file.
        samples: to be drawn, of each file at most `max_epochs` times what it has: the weights are
            whole samples then, and sum to it. None: no cap counts.
        drawn: samples of each file that training has drawn before; they count for its cap.

    Raises ConfigError: every file has reached its cap before so many samples.
    """
    totals = dict.fromkeys(groups, 0)
    for group, size in zip(groups, sizes, strict=True):
        totals[group] += size
    by_size = tempered(list(totals.values()), dataset.temperature or 1.0)
    own = {
        group: size if (weight := given[group]) is None else weight
        for group, size in zip(totals, by_size, strict=True)
    }
    weights = [
        own[group] * size / totals[group] if size else 0.0
        for group, size in zip(groups, sizes, strict=True)
    ]
    if dataset.max_epochs is None or samples is None:
        return weights
    most = Fraction(repr(dataset.max_epochs))
    limits = [
        max(0, int(most * size) - before)
        for size, before in zip(sizes, drawn or [0] * len(sizes), strict=True)
    ]
    counts = capped(weights, limits, samples)
    if counts is None:
        there = sum(limit for limit, weight in zip(limits, weights, strict=True) if weight)
        raise ConfigError(
            f"datasets.{dataset.name}.max_epochs = {dataset.max_epochs:g} leaves {there:,} samples"
            f" of {', '.join(totals)}, and training reads {samples:,} of them",
            hint="lower training.train_iters, raise max_epochs, or add data",
        )
    return [float(count) for count in counts]


@dataclass(frozen=True)
class PlannedRead(Record):
    """What some steps of a training read of one dataset.

    Args:
        phase: as of DataSpan.
        source: what these steps read: the dataset, or the blend that it is a part of.
        dataset: its name.
        first_step: the first of these steps, from 1.
        last_step: the last.
        share: of their samples, 0 to 1; None where it follows from sizes that are not known.
        tokens: that are read of it; None where the share is not known.
        epochs: how often its training part is read by then, in these steps alone; None where its
            size is not known.
    """

    phase: int
    source: str
    dataset: str
    first_step: int
    last_step: int
    share: float | None
    tokens: int | None
    epochs: float | None


def planned_reads(job: Job, tokens: Mapping[str, int]) -> tuple[PlannedRead, ...]:
    """What training reads in which steps; nothing for a job whose samples all come from one dataset
    or a blend of given weights, of which the plan's epochs say enough.

    Args:
        job: the job.
        tokens: of datasets that are prepared or here, by name; else what their tables say.

    Raises ConfigError: as `blend_weights`.
    """
    if not job.phases and job.dataset.temperature is None and job.dataset.max_epochs is None:
        return ()
    drawn: Counter[str] = Counter()
    return tuple(read for span in spans_of(job) for read in _reads_of(job, span, tokens, drawn))


def _reads_of(
    job: Job, span: DataSpan, tokens: Mapping[str, int], drawn: Counter[str]
) -> Iterator[PlannedRead]:
    dataset = span.dataset
    length = job.model.seq_length
    parts = [part.dataset for part in dataset.blend.values()] or [dataset]
    sizes = [_samples_known(dataset, part, tokens, length) for part in parts]
    names = [part.name for part in parts]
    weights = _weights_known(span, names, sizes, drawn)
    for at, (name, size) in enumerate(zip(names, sizes, strict=True)):
        share = None if weights is None else weights[at] / sum(weights)
        samples = None if share is None else round(span.samples * share)
        drawn[name] += samples or 0
        yield PlannedRead(
            span.phase,
            dataset.name,
            name,
            span.first_step + 1,
            span.first_step + span.steps,
            share,
            None if samples is None else samples * length,
            samples / size if samples is not None and size else None,
        )


def _samples_known(
    dataset: Dataset, part: Dataset, tokens: Mapping[str, int], length: int
) -> int | None:
    """Samples of an epoch of the training part of a dataset; None: not known."""
    known = tokens.get(part.name) or part.tokens
    weights = [float(weight) for weight in part.split.split(",")]
    whole = bool(dataset.valid_blend or dataset.test_blend)
    return known and int(known * (1.0 if whole else weights[0] / sum(weights))) // length


def _weights_known(
    span: DataSpan, names: Sequence[str], sizes: Sequence[int | None], drawn: Mapping[str, int]
) -> list[float] | None:
    """The weights of the parts that a span reads; None where they follow from unknown sizes."""
    dataset = span.dataset
    given = [part.weight for part in dataset.blend.values()]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and given:
        return blend_weights(
            dataset,
            names,
            dict(zip(names, given, strict=True)),
            known,
            samples=span.samples,
            drawn=[drawn[name] for name in names],
        )
    if not given:
        return [1.0]
    numbers = [weight for weight in given if weight is not None]
    return numbers if len(numbers) == len(given) and dataset.max_epochs is None else None
