"""From a job's dataset to pairs of files, an order and samples: blends, held-out files, both
orders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.jobs.jobs_toml import GOOD
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.order.megatron_worker import work
from trainkit.data.order.native import SplitName
from trainkit.data.order.open import open_mixture
from trainkit.data.order.resolve_pairs import pairs_of
from trainkit.engines.torchtitan.data import splits_of
from trainkit.engines.torchtitan.inside.native_rules import Order, RandomTokens, Windows
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.stages.index import IndexStage

SEQ = 16
TABLES = """
[tokenizers.t]
type = "file"
path = "tokenizer.json"
vocab_size = 512

[datasets.web]
source = "indexed"
prefixes = ["web_{0..5}"]
tokenizer = "t"

[datasets.held]
extends = "web"
valid_files = 2
test_files = 1

[datasets.code]
source = "indexed"
prefixes = ["code"]
split = "8,1,1"
tokenizer = "t"

[datasets.mix]
source = "blend"
blend = { web = 0.75, code = 0.25 }

[datasets.by-size]
source = "blend"
blend = ["web", "code"]

[datasets.apart]
source = "blend"
blend = { web = 0.75, code = 0.25 }
valid_blend = ["code"]
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pairs; token i of file f is 8 * (i % 60) + f, so that a token tells its file."""
    folder = tmp_path_factory.mktemp("mixture")
    for file, name in enumerate([*(f"web_{i}" for i in range(6)), "code"]):
        lengths = np.random.default_rng(file).integers(1, 60, size=120 + 40 * file)
        tokens = 8 * (np.arange(lengths.sum()) % 60) + file
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_documents(tokens, lengths)
    text = (
        GOOD.replace("seq_length = 64", f"seq_length = {SEQ}").replace(
            'dataset = "mock"', 'dataset = "web"'
        )
        + TABLES
    )
    (folder / "jobs.toml").write_text(text)
    return folder


def job_of(root: Path, dataset: str, *sets: str) -> Job:
    return load(root, {}).resolve("demo", [f"dataset={dataset}", *sets]).job


def read(job: Job, split: SplitName, consumed: int, n: int) -> tuple[Any, Any]:
    """(dataset index, tokens [n, SEQ + 1]) at some positions."""
    mixture = open_mixture(job, job.dataset, split, 512)
    datasets, numbers = mixture.order.window(consumed, n)
    out = np.full((n, SEQ + 1), -7, np.int64)
    for dataset in np.unique(datasets):
        rows = np.flatnonzero(datasets == dataset)
        mixture.samples[dataset].read(numbers[rows], rows, out)
    return datasets, out


def files_of(tokens: Any) -> set[int]:
    return set(np.unique(tokens % 8).tolist())


def test_files_are_held_out_from_the_end(root: Path) -> None:
    dataset = job_of(root, "held").dataset
    names = {
        split: [pair.prefix.name for pair in pairs_of(root, dataset, split)]
        for split in ("train", "valid", "test")
    }
    assert names == {
        "train": ["web_0", "web_1", "web_2"],
        "test": ["web_3"],
        "valid": ["web_4", "web_5"],
    }
    with pytest.raises(ConfigError, match="leave none of 6 files to train on"):
        pairs_of(root, dataset.model_copy(update={"valid_files": 5}), "train")


def test_a_glob_and_a_missing_file(root: Path) -> None:
    dataset = job_of(root, "web").dataset
    globbed = dataset.model_copy(update={"prefixes": (str(root / "web_[135]"),)})
    assert [pair.prefix.name for pair in pairs_of(root, globbed, "train")] == [
        "web_1",
        "web_3",
        "web_5",
    ]
    with pytest.raises(ConfigError, match=r"there is no .*/nothing\.idx"):
        pairs_of(root, dataset.model_copy(update={"prefixes": (str(root / "nothing"),)}), "train")


def order_is_built(job: Job, tmp_path: Path) -> None:
    """The stage index, in this process."""
    for need in IndexStage().needs(job, tmp_path):
        assert need.evidence is not None and not need.evidence()[0]
        for unit in need.units:
            work(dict(unit.spec), lambda done, total: None)
        assert need.evidence()[0]


@pytest.mark.parametrize("sample_order", ["native", "megatron"])
@pytest.mark.parametrize("dataset", ["web", "held", "code", "mix", "apart"])
def test_splits_do_not_share_a_token_range(
    root: Path, tmp_path: Path, dataset: str, sample_order: str
) -> None:
    """Every split gives whole samples of its own files; a window is what its parts are."""
    job = job_of(
        root,
        dataset,
        f"sample_order={sample_order}",
        "training.train_iters=20",
        "training.eval_iters=2",
        f"cluster.root={tmp_path}",
    )
    order_is_built(job, tmp_path)
    for split in ("train", "valid"):
        n = 40 if split == "train" else 4
        _, tokens = read(job, split, 0, n)
        assert tokens.min() >= 0
        parts = np.concatenate([read(job, split, 0, 3)[1], read(job, split, 3, n - 3)[1]])
        np.testing.assert_array_equal(tokens, parts)
        expected = {
            ("held", "train"): {0, 1, 2},
            ("held", "valid"): {4, 5},
            ("code", "train"): {6},
            ("apart", "valid"): {6},
        }.get((dataset, split))
        assert files_of(tokens) <= (expected or set(range(7)))


@pytest.mark.parametrize("sample_order", ["native", "megatron"])
def test_a_blend_keeps_its_weights_and_shares_them_by_size(
    root: Path, tmp_path: Path, sample_order: str
) -> None:
    job = job_of(
        root,
        "mix",
        f"sample_order={sample_order}",
        "training.train_iters=100",
        "training.eval_iters=0",
        f"cluster.root={tmp_path}",
    )
    order_is_built(job, tmp_path)
    datasets, _ = read(job, "train", 0, 200)
    assert abs(int((datasets == 6).sum()) - 50) <= 2
    counts = np.bincount(datasets[datasets < 6], minlength=6)
    assert (
        counts.sum() == 200 - (datasets == 6).sum() and counts.min() > 0 and counts[5] > counts[0]
    )


def test_by_size_gives_every_sample_once(root: Path) -> None:
    job = job_of(root, "by-size")
    mixture = open_mixture(job, job.dataset, "train", 512)
    sizes = [part.num_samples for part in mixture.samples]
    datasets, numbers = mixture.order.window(0, sum(sizes))
    assert sorted(zip(datasets.tolist(), numbers.tolist(), strict=True)) == [
        (d, n) for d, size in enumerate(sizes) for n in range(size)
    ]


def test_megatrons_blend_by_size_ends(root: Path, tmp_path: Path) -> None:
    job = job_of(
        root,
        "by-size",
        "sample_order=megatron",
        "training.train_iters=5000",
        f"cluster.root={tmp_path}",
    )
    (need,) = IndexStage().needs(job, tmp_path)
    with pytest.raises(ConfigError, match=r"one epoch of each; 10,000 will be read"):
        work(dict(need.units[0].spec), lambda done, total: None)


def test_megatrons_order_is_refused_when_the_data_changed(root: Path, tmp_path: Path) -> None:
    for suffix in (".bin", ".idx"):
        (tmp_path / f"code{suffix}").write_bytes((root / f"code{suffix}").read_bytes())
    (tmp_path / "jobs.toml").write_text((root / "jobs.toml").read_text())
    job = job_of(tmp_path, "code", "sample_order=megatron", "training.eval_iters=0")
    with pytest.raises(ConfigError, match="is not built"):
        open_mixture(job, job.dataset, "train", 512)
    order_is_built(job, tmp_path)
    read(job, "train", 0, 4)
    with IndexedWriter(tmp_path / "code", np.uint16) as writer:
        writer.add_documents(np.arange(480, dtype=np.int64) % 480, np.full(10, 48))
    with pytest.raises(ConfigError, match="was built with"):
        open_mixture(job, job.dataset, "train", 512)
    (need,) = IndexStage().needs(job, tmp_path)
    assert need.evidence is not None and "was built with" in need.evidence()[1]
    work(dict(need.units[0].spec), lambda done, total: None)
    assert read(job, "train", 0, 4)[1].max() < 480


def test_files_of_one_name_are_told_apart(root: Path, tmp_path: Path) -> None:
    """Names salt the order, so they are distinct, and those of other files stay."""
    dataset = job_of(root, "web").dataset
    (tmp_path / "more").mkdir()
    for suffix in (".bin", ".idx"):
        (tmp_path / "more" / f"web_0{suffix}").write_bytes((root / f"web_0{suffix}").read_bytes())
    prefixes = (str(root / "web_{0..1}"), str(tmp_path / "more/web_0"))
    names = [
        pair.name
        for pair in pairs_of(root, dataset.model_copy(update={"prefixes": prefixes}), "train")
    ]
    assert names == ["web.web_0.1", "web.web_1", "web.web_0.2"]


@pytest.mark.parametrize(
    "part",
    ["dataset_index", "dataset_sample_index", "shuffle_index", "document_index", "sample_index"],
)
@pytest.mark.parametrize("damage", ["empty", "garbage"])
def test_damaged_arrays_of_megatrons_order_are_named(
    root: Path, tmp_path: Path, part: str, damage: str
) -> None:
    """Never a traceback, and the stage makes an empty one anew."""
    job = job_of(
        root,
        "mix",
        "sample_order=megatron",
        "training.train_iters=20",
        "training.eval_iters=0",
        f"cluster.root={tmp_path}",
    )
    order_is_built(job, tmp_path)
    for path in tmp_path.glob(f"data/mix/t/megatron/*-{part}.npy"):
        content = (
            b""
            if damage == "empty"
            else path.read_bytes()[:128] + b"\xff\xfe\xfd\x7c" * ((path.stat().st_size - 128) // 4)
        )
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"npy|damaged|sample index"):
        read(job, "train", 0, 40)
    if damage == "empty":
        order_is_built(job, tmp_path)
        read(job, "train", 0, 40)


def test_a_blend_that_is_there_is_left_alone(root: Path, tmp_path: Path) -> None:
    job = job_of(
        root,
        "mix",
        "sample_order=megatron",
        "training.train_iters=20",
        "training.eval_iters=0",
        f"cluster.root={tmp_path}",
    )
    order_is_built(job, tmp_path)
    before = {path: path.stat().st_ino for path in tmp_path.glob("data/mix/t/megatron/*")}
    (need,) = IndexStage().needs(job, tmp_path)
    work(dict(need.units[0].spec), lambda done, total: None)
    assert before == {path: path.stat().st_ino for path in tmp_path.glob("data/mix/t/megatron/*")}


@pytest.mark.parametrize("dataset", ["web", "held", "code", "mix", "by-size", "apart", "mock"])
def test_an_interpreter_without_compiled_code_reads_the_same(root: Path, dataset: str) -> None:
    """Other engines' (engines/torchtitan/inside)."""
    sets = ("training.eval_interval=5", "training.eval_iters=2", f"model.seq_length={SEQ}")
    job = job_of(root, dataset, *sets)
    splits = splits_of(job, 512)
    names: tuple[SplitName, ...] = ("train", "valid")
    for split in names:
        said: Any = splits[split]
        order = Order(*(said[key] for key in ("names", "sizes", "weights", "split", "seed")))
        sources = (
            [RandomTokens(said["mock"], SEQ)]
            if dataset == "mock"
            else [Windows(pair, SEQ) for pair in said["pairs"]]
        )
        for consumed in (0, 1000):
            places = [order.at(consumed + number) for number in range(40)]
            found = np.stack([sources[part].read(number) for part, number in places])
            datasets, expected = read(job, split, consumed, 40)
            np.testing.assert_array_equal(found, expected)
            assert [part for part, _ in places] == datasets.tolist()
