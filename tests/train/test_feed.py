"""Every rank's micro-batches together are the global batch, in any layout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.support import MODEL, tiny_job
from trainkit.base.errors import ConfigError
from trainkit.data.indexed import IndexedWriter
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.train.data_parallel import World
from trainkit.train.feed import Feed, data_folder, micro_batches, vocab_size

CPU = torch.device("cpu")


@given(ranks=st.integers(1, 9), micro=st.integers(1, 5), count=st.integers(1, 6), batches_before=st.integers(0, 2**40))
def test_global_batch_is_split_as_megatron_does(ranks: int, micro: int, count: int, batches_before: int) -> None:
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
        batches = [b for rank in range(ranks) for b in Feed(job, "train", World(rank, ranks), CPU).read(consumed)]
        rows = [tuple(row) for b in batches for row in torch.cat([b.tokens_BS, b.labels_BS[:, -1:]], 1).tolist()]
        assert all(torch.equal(b.tokens_BS[:, 1:], b.labels_BS[:, :-1]) for b in batches)
        return sorted(rows), sum(b.checksum for b in batches)

    for consumed in (0, 24):
        assert tokens(ranks, micro, consumed) == tokens(1, 4, consumed)
    assert tokens(1, 4, 0) != tokens(1, 4, 24)


def text_job(root: Path, ids: list[int], *, rows: int | None, split: str = "1,1", manifest_ids: int | None = None) -> Job:
    dataset = Dataset(name="words", source="files", paths=("x",), split=split, tokenizer=Tokenizer(name="t", type="file", path="tokenizer.json"))
    job = tiny_job(1, root).model_copy(update={"dataset": dataset, "model": MODEL.model_copy(update={"vocab_size": rows})})
    with IndexedWriter(data_folder(job).prefix, np.uint16) as writer:
        writer.add_document(np.array(ids, dtype=np.uint16))
    if manifest_ids is not None:
        data_folder(job).manifest.write_text(json.dumps({"schema": "dataset/1", "vocab_size": manifest_ids}))
    return job


def test_vocabulary_comes_from_the_model_the_tokenizer_or_the_data(tmp_path: Path) -> None:
    ids = list(range(300)) * 2
    assert vocab_size(text_job(tmp_path / "a", ids, rows=512)) == 512
    assert vocab_size(text_job(tmp_path / "b", ids, rows=None, manifest_ids=300)) == 300
    with pytest.raises(ConfigError, match="nobody says"):
        vocab_size(text_job(tmp_path / "c", ids, rows=None))
    with pytest.raises(ConfigError, match=r"300 ids.*only 299"):
        vocab_size(text_job(tmp_path / "d", ids, rows=299, manifest_ids=300))


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    feed = Feed(text_job(tmp_path, list(range(300)) * 2, rows=299, split="1"), "train", World(0, 1), CPU)
    with pytest.raises(ConfigError, match=r"token id 299 .* 299"):
        for consumed in range(0, 40, 8):  # more than an epoch
            list(feed.read(consumed))


def test_a_split_without_a_sample_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="valid split"):
        Feed(text_job(tmp_path, list(range(100)), rows=299, split="1,0"), "valid", World(0, 1), CPU)
