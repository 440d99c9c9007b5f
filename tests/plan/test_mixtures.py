"""What a blend's parts weigh by their sizes, against plain Python; which steps read what; and what
the plan says of it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from tests.plan.example import job_of
from trainkit.base.errors import ConfigError
from trainkit.jobs.datasets import BlendPart
from trainkit.jobs.schema import DataPhase, Dataset, Job, Tokenizer
from trainkit.plan.batch import global_batch_size
from trainkit.plan.mixtures import blend_weights, capped, phase_at, spans_of, tempered
from trainkit.plan.planner import PreparedData, make_plan

TOKENIZER = Tokenizer(name="t", type="file", path="tokenizer.json")


def dataset(name: str, **keys: object) -> Dataset:
    values = {"name": name, "source": "indexed", "prefixes": (name,), "split": "1,0,0"}
    return Dataset.model_validate({**values, "tokenizer": TOKENIZER, **keys})


def blend(parts: dict[str, float | None], **keys: object) -> Dataset:
    held = {name: BlendPart(weight=weight, dataset=dataset(name)) for name, weight in parts.items()}
    return Dataset.model_validate(
        {"name": "mix", "source": "blend", "blend": held, "tokenizer": TOKENIZER, **keys}
    )


def phased(own: Dataset, *phases: tuple[Dataset, float]) -> Job:
    job = job_of(train_iters=100, eval_iters=0, global_batch_size=4)
    values = {
        "dataset": own,
        "phases": tuple(DataPhase(dataset=each, share=share) for each, share in phases),
    }
    return Job.model_validate({**dict(job), **values})


@given(
    st.lists(st.integers(1, 2**45), min_size=1, max_size=6),
    st.sampled_from([1.0, 1.43, 2.0, 3.3, 100.0]),
)
def test_temperature_is_the_exponent_of_the_published_formula(
    sizes: list[int], temperature: float
) -> None:
    """q_i = n_i^alpha / sum of n_j^alpha (arXiv:1901.07291), alpha = 1 / temperature."""
    weights = tempered(sizes, temperature)
    expected = [size ** (1 / temperature) for size in sizes]
    assert [each / sum(weights) for each in weights] == pytest.approx(
        [each / sum(expected) for each in expected], rel=1e-9
    )
    assert temperature != 1.0 or weights == [float(size) for size in sizes]


def reference(weights: list[float], limits: list[int], samples: int) -> list[Fraction]:
    """Water-filling as one says it: give all in proportion; who is above the limit keeps the limit,
    and the rest begins again without him."""
    full: set[int] = set()
    while True:
        left = samples - sum(Fraction(limits[at]) for at in full)
        total = sum(Fraction(w) for at, w in enumerate(weights) if at not in full)
        given = [
            Fraction(limits[at]) if at in full else left * Fraction(w) / total
            for at, w in enumerate(weights)
        ]
        above = {at for at, each in enumerate(given) if each > limits[at] and at not in full}
        if not above or len(full | above) == len(weights):
            return [Fraction(limits[at]) if at in above else each for at, each in enumerate(given)]
        full |= above


@given(
    st.lists(st.tuples(st.floats(1e-3, 1e6), st.integers(0, 500)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_no_part_gives_more_than_its_limit(parts: list[tuple[float, int]], part: float) -> None:
    weights = [weight for weight, _ in parts]
    limits = [limit for _, limit in parts]
    samples = int(part * sum(limits))
    given = capped(weights, limits, samples)
    assert given is not None and sum(given) == samples
    assert all(0 <= each <= limit for each, limit in zip(given, limits, strict=True))
    wanted = reference(weights, limits, samples)
    assert all(abs(each - want) < 1 for each, want in zip(given, wanted, strict=True))
    assert capped(weights, limits, sum(limits) + 1) is None


def test_files_of_one_dataset_share_its_weight() -> None:
    mix = blend({"a": None, "b": None}, temperature=2)
    weights = blend_weights(mix, ["a", "a", "b"], {"a": None, "b": None}, [300, 100, 100])
    assert weights == [15.0, 5.0, 10.0]
    capped_mix = blend({"a": 1.0, "b": 3.0}, max_epochs=1.5)
    groups, given = ["a", "a", "b"], {"a": 1.0, "b": 3.0}
    for samples, expected in ((100, [18, 7, 75]), (400, [187, 63, 150]), (750, [450, 150, 150])):
        assert (
            blend_weights(capped_mix, groups, given, [300, 100, 100], samples=samples) == expected
        )
    drawn = [0, 0, 150]
    assert blend_weights(capped_mix, groups, given, [300, 100, 100], samples=400, drawn=drawn) == [
        300,
        100,
        0,
    ]
    with pytest.raises(
        ConfigError, match=r"max_epochs = 1\.5 leaves 750 samples of a, b, and .* 751"
    ):
        blend_weights(capped_mix, groups, given, [300, 100, 100], samples=751)


def test_steps_are_rounded_to_the_nearest() -> None:
    """A half up, by the share as it is written: 0.29 of 50 is 14.5, though no float says so."""
    web, good = dataset("web"), dataset("good")
    for share, steps in ((0.004, 0), (0.005, 1), (0.1, 10), (0.145, 15), (1 / 3, 33), (0.29, 29)):
        if steps:
            assert phased(web, (good, share)).steps_by_phase == [100 - steps, steps]
        else:
            with pytest.raises(ValueError, match=r"is no step"):
                phased(web, (good, share))


@given(
    st.lists(st.sampled_from([0.01, 0.05, 0.1, 0.235]), max_size=4),
    st.sampled_from([None, (4, 4, 40), (8, 8, 333), (4, 4, 100_000)]),
)
def test_spans_follow_one_another(shares: list[float], ramp: tuple[int, int, int] | None) -> None:
    """Every step reads of one span, also where the batch grows over a boundary."""
    names = ["a", "b", "a", "c"]
    job = phased(
        dataset("web"), *[(dataset(n), share) for n, share in zip(names, shares, strict=False)]
    )
    training = job.training.model_copy(
        update={"rampup_batch_size": ramp, "global_batch_size": 32 if ramp else 4}
    )
    job = job.model_copy(update={"training": training})
    spans = spans_of(job)
    assert sum(span.steps for span in spans) == 100
    consumed = 0
    seen = []
    for step in range(100):
        size = global_batch_size(job, consumed)
        first, last = (phase_at(spans, at) for at in (consumed, consumed + size - 1))
        assert first == last
        span = spans[first]
        assert span.first_step <= step < span.first_step + span.steps
        seen.append(first)
        consumed += size
    assert sum(span.samples for span in spans) == consumed
    assert [seen.count(number) for number in range(len(spans))] == job.steps_by_phase
    assert phase_at(spans, consumed + 10**6) == len(spans) - 1  # a rollback reads beyond the end


def test_the_plan_says_what_is_read_when() -> None:
    """400 samples of 4 tokens: 320 of web, then 80 of two thirds good text."""
    anneal = blend({"good": 3.0, "web": 1.0}, max_epochs=4)
    job = phased(dataset("web"), (anneal, 0.2))
    plan = make_plan(job, prepared=PreparedData(tokens={"web": 2560, "good": 80}))
    assert [
        (r.phase, r.source, r.dataset, r.first_step, r.last_step, r.share, r.tokens, r.epochs)
        for r in plan.reads
    ] == [
        (0, "web", "web", 1, 80, 1.0, 1280, 0.5),
        (1, "mix", "good", 81, 100, 0.75, 240, 3.0),
        (1, "mix", "web", 81, 100, 0.25, 80, 20 / 640),
    ]
    assert plan.to_json()["reads"][1]["epochs"] == 3.0
    unknown = make_plan(job).reads
    assert [(read.share, read.epochs) for read in unknown] == [(1.0, None)] + 2 * [(None, None)]
    few = make_plan(job, prepared=PreparedData(tokens={"web": 8, "good": 8}))
    (objection,) = [each for each in few.objections if each.code == "max-epochs"]
    assert (
        "max_epochs = 4 leaves 8 samples of good, web, and training reads 80" in objection.message
    )
    assert few.feasible is False and few.reads == ()


def test_a_plan_without_phases_is_as_before() -> None:
    plan = make_plan(phased(dataset("web"))).to_json()
    assert "reads" not in plan
    counted = make_plan(phased(dataset("web", tokens=800), (dataset("good"), 0.5)))
    assert counted.epochs is not None and counted.epochs.epochs == 1.0  # half the steps are web's
