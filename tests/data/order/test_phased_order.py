"""Phases of a training, and blends weighed by temperature or with a cap, from jobs.toml to tokens:
the same at every position whoever reads it, in both orders of samples."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

from tests.data.order.test_open import SEQ, TABLES
from tests.jobs.jobs_toml import GOOD
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.order.loader import Loader, ReadSchedule
from trainkit.data.order.megatron_worker import work
from trainkit.data.order.open import Mixture, open_mixture, open_training, refuse_without_samples
from trainkit.data.order.samples import MegatronSamples, NativeSamples
from trainkit.engines.gpt_neox.config import neox_data
from trainkit.engines.torchtitan.data import splits_of
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.plan.mixtures import spans_of
from trainkit.stages.index import IndexStage
from trainkit.train.batches import micro_batches
from trainkit.train.parallel.data_parallel import World

BATCH = 8
STEPS = 40
MORE = """
[datasets.good]
extends = "code"
prefixes = ["good"]

[datasets.tempered]
source = "blend"
blend = ["web", "code", "good"]
temperature = 3.3

[datasets.capped]
source = "blend"
blend = { web = 1, code = 1, good = 1 }
max_epochs = 2

[datasets.anneal]
source = "blend"
blend = { good = 0.5, web = 0.5 }

[datasets.whole]
extends = "capped"
valid_blend = ["code"]
test_blend = ["good"]

[jobs.annealed]
extends = "demo"
dataset = "mix"
training.global_batch_size = 8
training.micro_batch_size = 2
training.train_iters = 40
training.eval_iters = 0
[[jobs.annealed.phases]]
dataset = "code"
share = 0.2
[[jobs.annealed.phases]]
dataset = "anneal"
share = 0.1
[[jobs.annealed.phases]]
dataset = "mix"
share = 0.2

[jobs.plain]
extends = "annealed"
phases = []
"""
Sample = tuple[str, int]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pairs of other sizes; no two samples are the same."""
    folder = tmp_path_factory.mktemp("phases")
    for file, name in enumerate([*(f"web_{i}" for i in range(6)), "code", "good"]):
        random = np.random.default_rng(file)
        lengths = random.integers(1, 60, size={"code": 60, "good": 30}.get(name, 40 + 20 * file))
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_documents(random.integers(0, 500, size=int(lengths.sum())), lengths)
    text = GOOD.replace("seq_length = 64", f"seq_length = {SEQ}")
    (folder / "jobs.toml").write_text(text + TABLES + MORE)
    return folder


def job_of(root: Path, name: str, *sets: str) -> Job:
    return load(root, {}).resolve(name, sets).job


def samples_at(mixture: Mixture, first: int, n: int) -> list[Sample]:
    """(pair, sample) at some positions."""
    datasets, numbers = mixture.order.window(first, n)
    return [(mixture.names[d], k) for d, k in zip(datasets.tolist(), numbers.tolist(), strict=True)]


def build(job: Job, folder: Path) -> None:
    """The stage index, in this process."""
    for need in IndexStage().needs(job, folder):
        for unit in need.units:
            work(dict(unit.spec), lambda done, total: None)
        assert need.evidence is not None and need.evidence()[0]


def tokens_of(mixture: Mixture, ranks: int, micro: int, stops: list[int]) -> np.ndarray:
    """The training's tokens [samples, S + 1] as data-parallel ranks read them; each begins anew
    at every one of `stops`, steps at which the run is killed."""
    out = np.full((STEPS * BATCH, SEQ + 1), -7, np.int64)
    bounds = [0, *stops, STEPS]
    for rank in range(ranks):
        for first, last in pairwise(bounds):
            parts = partial(micro_batches, micro_batch=micro, world=World(rank, ranks))
            plan = ReadSchedule(parts, lambda at: BATCH, STEPS * BATCH)
            loader = Loader(mixture.order, mixture.samples, SEQ, plan)
            loader.seek(first * BATCH)
            for step in range(first, last):
                for batch in loader.read(step * BATCH, BATCH):
                    out[batch.positions.start : batch.positions.stop] = batch.tokens
            loader.close()
    return out


@given(
    st.sampled_from([(1, 8), (1, 1), (2, 2), (4, 2), (8, 1)]),
    st.lists(st.sampled_from([19, 20, 21, 27, 28, 29, 31, 32, 33, 39]), max_size=3, unique=True),
)
def test_every_layout_and_restart_reads_the_same(
    root: Path, layout: tuple[int, int], stops: list[int]
) -> None:
    """Killed before, at and after each boundary; steps 20, 28 and 32 begin a phase."""
    job = job_of(root, "annealed")
    assert [span.first_step for span in spans_of(job)] == [0, 20, 28, 32]
    mixture = open_training(job, 512)
    expected = tokens_of(mixture, 1, BATCH, [])
    assert expected.min() >= 0
    ranks, micro = layout
    found = tokens_of(open_training(job, 512), ranks, micro, sorted(stops))
    np.testing.assert_array_equal(found, expected)
    at = np.random.default_rng(len(stops)).permutation(STEPS * BATCH)[:20]
    assert [samples_at(mixture, int(p), 1)[0] for p in at] == [
        samples_at(mixture, 0, STEPS * BATCH)[p] for p in at
    ]


def test_a_file_goes_on_where_it_was(root: Path) -> None:
    """What the first part drew of a file is not drawn again by a phase, whatever blend it is in,
    until its epoch is over; and the first part is that of the job without phases."""
    job = job_of(root, "annealed")
    mixture = open_training(job, 512)
    plain = open_training(job_of(root, "plain"), 512)
    spans = spans_of(job)
    parts = [samples_at(mixture, span.first, span.samples) for span in spans]
    assert parts[0] == samples_at(plain, 0, spans[0].samples)
    assert {name for name, _ in parts[1]} == {"code"}
    assert {name.partition(".")[0] for name, _ in parts[2]} == {"good", "web"}
    sizes = dict(zip(mixture.names, (part.num_samples for part in mixture.samples), strict=True))
    drawn = Counter[str]()
    seen: dict[str, list[int]] = {name: [] for name in sizes}
    for name, number in (sample for part in parts for sample in part):
        drawn[name] += 1
        seen[name].append(number)
    assert drawn["code"] > sizes["code"]  # it begins its second epoch
    for name, numbers in seen.items():
        size = sizes[name]
        for begin in range(0, len(numbers), size):
            epoch = numbers[begin : begin + size]
            assert len(set(epoch)) == len(epoch), name
    again = samples_at(mixture, spans[3].first, 10**4)
    assert len(again) == 10**4  # a rollback reads beyond the end


def test_megatrons_order_of_every_phase_is_its_datasets_own(root: Path, tmp_path: Path) -> None:
    """Each dataset's order is built once, for all that training draws of it; the last phase goes
    on in the first part's."""
    sets = ("sample_order=megatron", f"cluster.root={tmp_path}")
    job = job_of(root, "annealed", *sets)
    with pytest.raises(ConfigError, match="is not built"):
        open_training(job, 512)
    build(job, tmp_path)
    folders = sorted(path.parent.parent.name for path in tmp_path.glob("data/*/t/megatron"))
    assert folders == ["anneal", "code", "mix"]
    mixture = open_training(job, 512)
    own, code, anneal, again = spans_of(job)
    alone = {"mix": 28, "code": 8, "anneal": 4}
    expected: dict[str, list[Sample]] = {}
    for name, steps in alone.items():
        plain = job_of(root, "plain", *sets, f"dataset={name}", f"training.train_iters={steps}")
        build(plain, tmp_path)
        expected[name] = samples_at(open_training(plain, 512), 0, steps * BATCH)
    assert samples_at(mixture, own.first, own.samples) == expected["mix"][: own.samples]
    assert samples_at(mixture, code.first, code.samples) == expected["code"]
    assert samples_at(mixture, anneal.first, anneal.samples) == expected["anneal"]
    assert samples_at(mixture, again.first, again.samples) == expected["mix"][own.samples :]
    refuse_without_samples(job)


@pytest.mark.parametrize("sample_order", ["native", "megatron"])
def test_temperature_weighs_by_size(root: Path, tmp_path: Path, sample_order: str) -> None:
    """Against n^(1 / 3.3) in floats; files of one dataset share its weight."""
    sets = (f"sample_order={sample_order}", f"cluster.root={tmp_path}", "dataset=tempered")
    job = job_of(root, "plain", *sets, "training.train_iters=250")
    build(job, tmp_path)
    whole = open_mixture(job_of(root, "plain", "dataset=by-size"), job.dataset, "train", 512)
    sizes = Counter[str]()
    for name, part in zip(whole.names, whole.samples, strict=True):
        sizes[name.partition(".")[0]] += part.num_samples
    weights = {name: size ** (1 / 3.3) for name, size in sizes.items()}
    drawn = Counter(
        name.partition(".")[0] for name, _ in samples_at(open_training(job, 512), 0, 2000)
    )
    expected = {name: 2000 * w / sum(weights.values()) for name, w in weights.items()}
    # megatron: documents are cut, not samples, so that sizes differ a little
    assert drawn == pytest.approx(expected, abs=12 if sample_order == "native" else 40)
    assert expected["good"] > 1.5 * 2000 * sizes["good"] / sum(sizes.values())


def epoch_of(part: NativeSamples | MegatronSamples) -> int:
    """Samples of one epoch; Megatron's split ends between documents."""
    if isinstance(part, NativeSamples):
        return part.num_samples
    share = 0.969 if part.dataset.prefix.name.startswith("web") else 0.8
    lengths = part.dataset.lengths[: round(share * len(part.dataset))]
    return int(lengths.sum() - 1) // SEQ


@pytest.mark.parametrize("sample_order", ["native", "megatron"])
def test_no_part_is_read_more_often_than_the_cap(
    root: Path, tmp_path: Path, sample_order: str
) -> None:
    """All weigh the same, as UniMax has it; the small ones stop at two epochs, exactly in the
    native order, and the large one gets what they cannot give."""
    sets = (f"sample_order={sample_order}", f"cluster.root={tmp_path}", "dataset=capped")
    job = job_of(root, "plain", *sets, "training.train_iters=60")
    build(job, tmp_path)
    mixture = open_training(job, 512)
    drawn = Counter(name for name, _ in samples_at(mixture, 0, 480))
    slack = 0 if sample_order == "native" else 2
    sizes = {"code": 0, "good": 0}
    for name, part in zip(mixture.names, mixture.samples, strict=True):
        assert isinstance(part, NativeSamples | MegatronSamples)
        sizes[name] = epoch_of(part)
        assert drawn[name] <= 2 * sizes[name] + slack
    for name in ("code", "good"):
        assert drawn[name] == pytest.approx(2 * sizes[name], abs=slack)
    assert sum(n for name, n in drawn.items() if name.startswith("web")) > 480 / 3
    too_long = job_of(root, "plain", *sets, "training.train_iters=6000")
    with pytest.raises(
        ConfigError, match=r"max_epochs = 2 leaves [\d,]+ samples of web, code, good"
    ):
        build(too_long, tmp_path)
        open_training(too_long, 512)


def test_a_cap_counts_what_earlier_phases_drew(root: Path) -> None:
    """A phase of the capped blend after a part that has read good text once already."""
    job = job_of(root, "annealed", "dataset=good", "phases.1.dataset=capped")
    sizes = dict(
        zip(
            (mixture := open_training(job, 512)).names,
            (part.num_samples for part in mixture.samples),
            strict=True,
        )
    )
    capped = spans_of(job)[2]
    before = Counter(name for name, _ in samples_at(mixture, 0, capped.first))
    drawn = Counter(name for name, _ in samples_at(mixture, capped.first, capped.samples))
    assert before["good"] > 2 * sizes["good"] and drawn["good"] == 0
    assert drawn["code"] == min(max(0, 2 * sizes["code"] - before["code"]), capped.samples // 2)


def test_other_engines_get_the_same_weights(root: Path) -> None:
    """torchtitan draws as the native order does; what has a list of weights gets them resolved."""
    job = job_of(root, "plain", "dataset=capped", "training.train_iters=60")
    mixture = open_training(job, 512)
    drawn = Counter(name for name, _ in samples_at(mixture, 0, 480))
    split = splits_of(job, 512)["train"]
    assert isinstance(split, dict)
    assert dict(zip(split["names"], split["weights"], strict=True)) == dict(drawn)
    whole = job_of(root, "plain", "dataset=whole", "training.train_iters=60")
    weighted = neox_data(whole).parts["train"]
    assert sum(weight for _, weight in weighted) == 480
    assert [weight for prefix, weight in weighted if prefix.endswith("good")] == [
        2 * open_training(whole, 512).samples[-1].num_samples
    ]
