"""Every rank's micro-batches together are the global batch, in any layout."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

from tests.train.support import MODEL, tiny_job
from trainkit.base.errors import ConfigError
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.order.loader import Loader
from trainkit.data.order.samples import MegatronSamples
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.train.batches import (
    Feed,
    data_folder,
    document_bounds,
    micro_batches,
    positions_within,
    train_plan,
    valid_plan,
    vocab_size,
)
from trainkit.train.inference.evaluate import SequentialOrder
from trainkit.train.parallel.data_parallel import World
from trainkit.train.update.schedule import global_batch_size

CPU = torch.device("cpu")


@given(
    ranks=st.integers(1, 9),
    micro=st.integers(1, 5),
    count=st.integers(1, 6),
    batches_before=st.integers(0, 2**40),
)
def test_global_batch_is_split_as_megatron_does(
    ranks: int, micro: int, count: int, batches_before: int
) -> None:
    size = ranks * micro * count
    consumed = batches_before * size
    of_rank = [micro_batches(consumed, size, micro, World(rank, ranks)) for rank in range(ranks)]
    assert all(len(mine) == count and all(len(m) == micro for m in mine) for mine in of_rank)
    in_order = [position for m in range(count) for mine in of_rank for position in mine[m]]
    assert in_order == list(range(consumed, consumed + size))


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (1, 8), (2, 2), (4, 2), (8, 1)])
def test_any_layout_reads_the_same_samples(ranks: int, micro: int, tmp_path: Path) -> None:
    def tokens(ranks: int, micro: int, consumed: int) -> tuple[list[tuple[int, ...]], int]:
        job = tiny_job(ranks, tmp_path, micro_batch_size=micro)
        batches = [
            b
            for rank in range(ranks)
            for b in Feed(job, job.dataset, "train", World(rank, ranks), CPU).read(consumed, 8)
        ]
        rows = [
            tuple(row)
            for b in batches
            for row in torch.cat([b.tokens_BS, b.labels_BS[:, -1:]], 1).tolist()
        ]
        assert all(torch.equal(b.tokens_BS[:, 1:], b.labels_BS[:, :-1]) for b in batches)
        return sorted(rows), sum(b.checksum for b in batches)

    for consumed in (0, 24):
        assert tokens(ranks, micro, consumed) == tokens(1, 4, consumed)
    assert tokens(1, 4, 0) != tokens(1, 4, 24)


def text_job(
    root: Path,
    ids: list[int],
    *,
    rows: int | None,
    split: str = "1,1",
    manifest_ids: int | None = None,
) -> Job:
    dataset = Dataset(
        name="words",
        source="files",
        paths=("x",),
        split=split,
        tokenizer=Tokenizer(name="t", type="file", path="tokenizer.json"),
    )
    job = tiny_job(1, root).model_copy(
        update={"dataset": dataset, "model": MODEL.model_copy(update={"vocab_size": rows})}
    )
    with IndexedWriter(data_folder(job).prefix, np.uint16) as writer:
        writer.add_document(np.array(ids, dtype=np.uint16))
    if manifest_ids is not None:
        data_folder(job).manifest.write_text(
            json.dumps({"schema": "dataset/1", "vocab_size": manifest_ids})
        )
    return job


def test_vocabulary_comes_from_the_model_the_tokenizer_or_the_data(tmp_path: Path) -> None:
    ids = list(range(300)) * 2
    assert vocab_size(text_job(tmp_path / "a", ids, rows=512)) == 512
    assert vocab_size(text_job(tmp_path / "b", ids, rows=None, manifest_ids=300)) == 300
    with pytest.raises(ConfigError, match=r"vocabulary size of model .* is not known"):
        vocab_size(text_job(tmp_path / "c", ids, rows=None))
    with pytest.raises(ConfigError, match=r"300 ids.*only 299"):
        vocab_size(text_job(tmp_path / "d", ids, rows=299, manifest_ids=300))


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    job = text_job(tmp_path, list(range(300)) * 2, rows=299, split="1")
    feed = Feed(job, job.dataset, "train", World(0, 1), CPU)
    with pytest.raises(ConfigError, match=r"token id 299 .* 299"):
        for consumed in range(0, 40, 8):  # more than an epoch
            list(feed.read(consumed, 8))


def test_a_split_without_a_sample_is_refused(tmp_path: Path) -> None:
    job = text_job(tmp_path, list(range(100)), rows=299, split="1,0")
    with pytest.raises(
        ConfigError, match=r"valid split.*\n.*; to train without evaluations, set eval_iters = 0"
    ):
        Feed(job, job.dataset, "valid", World(0, 1), CPU)
    with pytest.raises(
        ConfigError, match=r"test split.*\n  give it more weight or files, or shorten seq_length$"
    ):
        Feed(job, job.dataset, "test", World(0, 1), CPU)


END = 7


@given(
    st.lists(st.lists(st.sampled_from([1, 2, END]), min_size=6, max_size=6), min_size=1, max_size=4)
)
def test_documents_and_positions_are_megatrons(rows: list[list[int]]) -> None:
    """Against Megatron-LM's rule, token by token: what follows an end token is a new document
    whose positions begin at 0."""
    inputs = np.array(rows)
    bounds = document_bounds(inputs, END)
    expected, begins = [], []
    for b, row in enumerate(rows):
        position = 0
        for s, token in enumerate(row):
            if position == 0:
                begins.append(b * 6 + s)
            expected.append(position)
            position = 0 if token == END else position + 1
    assert bounds.tolist() == [*begins, inputs.size]
    assert positions_within(bounds, inputs.shape).ravel().tolist() == expected


def test_documents_reach_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = text_job(tmp_path, ([END] + [5] * 9) * 20, rows=299, split="1")
    monkeypatch.setattr("trainkit.train.batches._end_token", lambda job, dataset: END)
    keys = {"reset_attention_mask": True, "reset_position_ids": True, "eod_mask_loss": True}
    job = job.model_copy(update={"training": job.training.model_copy(update=keys)})
    for batch in Feed(job, job.dataset, "train", World(0, 1), CPU).read(0, 8):
        ends = batch.tokens_BS == END
        assert ends.any() and ((batch.labels_BS == NO_LABEL) == ends).all()
        assert batch.documents is not None and batch.positions_BS is not None
        bounds = batch.documents.bounds
        assert (
            bounds[-1] == batch.tokens_BS.numel()
            and batch.documents.longest == max(b - a for a, b in pairwise(bounds)) <= 10
        )
        assert (
            batch.documents.bounds_D.tolist() == list(bounds)
            and batch.documents.bounds_D.dtype == torch.int32
        )
        starts = torch.zeros(batch.tokens_BS.numel(), dtype=torch.bool)
        starts[list(bounds[:-1])] = True
        assert ((batch.positions_BS.flatten() == 0) == starts).all()


def test_tokens_that_are_missing_have_no_label(tmp_path: Path) -> None:
    """A last sample that Megatron keeps though it is short, and samples without the extra token:
    id 0, NO_LABEL."""
    job = text_job(tmp_path, list(range(1, 31)), rows=299, split="1")
    dataset = IndexedDataset(data_folder(job).prefix)
    for extra, last, labels in (
        (True, 29, [*range(2, 18), *range(18, 31), *[NO_LABEL] * 3]),
        (False, 30, [*range(2, 17), NO_LABEL, *range(18, 31), *[NO_LABEL] * 3]),
    ):
        feed = Feed(job, job.dataset, "train", World(0, 1), CPU)
        places = np.array([[0, 0], [0, 16], [0, last]], np.int32)
        samples = MegatronSamples(dataset, np.zeros(1, np.int32), places, 16, extra_token=extra)
        feed.loader = Loader(SequentialOrder([2]), [samples], 16, valid_plan(job, World(0, 1)))
        (batch,) = feed.read(0, 2)
        assert batch.labels_BS.flatten().tolist() == labels
        assert batch.tokens_BS.flatten().tolist() == [*range(1, 31), 0, 0]
        feed.close()


def test_batches_of_the_cpu_are_views_of_what_was_read(tmp_path: Path) -> None:
    job = tiny_job(1, tmp_path)
    feed = Feed(job, job.dataset, "train", World(0, 1), CPU)
    batches = list(feed.read(0, 8))
    assert all(b.tokens_BS[:, 1:].data_ptr() == b.labels_BS.data_ptr() for b in batches)
    for batch in batches:
        rows = torch.cat([batch.tokens_BS, batch.labels_BS[:, -1:]], 1).numpy()
        assert batch.checksum == sum(xxhash.xxh32_intdigest(row.tobytes()) for row in rows)
    feed.close()


def test_training_is_read_ahead_to_its_last_step_and_evaluation_to_its_own(tmp_path: Path) -> None:
    job = tiny_job(2, tmp_path, rampup_batch_size=(4, 4, 16), train_iters=5)
    world, consumed = World(1, 2), 0
    plan = train_plan(job, world)
    for _ in range(5):
        assert plan.end is not None and consumed < plan.end
        assert plan.parts(consumed, plan.size(consumed)) == micro_batches(
            consumed, global_batch_size(job, consumed), 2, world
        )
        consumed += plan.size(consumed)
    assert consumed == plan.end
    assert (valid_plan(job, world).size(3), valid_plan(job, world).end) == (8, 8)


def test_random_tokens_have_no_documents(tmp_path: Path) -> None:
    job = tiny_job(1, tmp_path, eod_mask_loss=True)
    with pytest.raises(ConfigError, match="eod_mask_loss needs documents; dataset 'mock'"):
        Feed(job, job.dataset, "train", World(0, 1), CPU)
