"""Merging token shards: Megatron's bytes, in parallel, whole or not at all; dataset.json over
them."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.data.pairs import pair_bytes, write_documents
from tests.shared import golden
from trainkit.base.errors import ConfigError
from trainkit.base.files import temporary_name
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.indexed.manifest import (
    ShardResult,
    check_declared,
    check_drop,
    ranges_path,
    totals,
)
from trainkit.data.indexed.paths import bin_path, idx_path, read_manifest
from trainkit.data.sums import file_sum
from trainkit.data.tokenize import merge_worker as module
from trainkit.data.tokenize.merge_worker import merge_pairs, work
from trainkit.data.tokenizer import train_bpe
from trainkit.data.unit_specs import TextResult, TokensResult


def silent(done: int, total: int, **counts: int) -> None: ...


def no_leftovers(folder: Path) -> bool:
    return not [p for p in folder.rglob("*") if ".tmp-" in p.name]


@pytest.mark.parametrize("threads", [1, 3])
def test_golden(tmp_path: Path, threads: int) -> None:
    vectors = golden()
    if vectors is None:
        pytest.skip("the golden files are not on this machine (TRAINKIT_TEST_DATA)")
    merge_pairs(
        [vectors / "tok_u16", vectors / "tok_multi_u16"],
        tmp_path / "m",
        threads=threads,
        progress=silent,
    )
    assert pair_bytes(tmp_path / "m") == pair_bytes(vectors / "tok_merged_u16")


documents = st.lists(st.lists(st.integers(0, 60000), max_size=6), max_size=7)


@settings(max_examples=40, deadline=None)
@given(st.lists(documents, min_size=1, max_size=4), st.sampled_from([1, 2, 5]))
def test_merged_is_what_one_writer_would_have_written(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[list[int]]], chunk: int
) -> None:
    """Empty documents and empty shards too; in blocks and pieces of a few entries, so that every
    border is crossed."""
    folder = tmp_path_factory.mktemp("merge")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        prefixes = [write_documents(folder / str(i), shard) for i, shard in enumerate(shards)]
        whole = write_documents(
            folder / "whole", [document for shard in shards for document in shard]
        )
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(module, "PIECE", 2 * chunk)
        merge_pairs(prefixes, folder / "merged", threads=2, progress=silent)
    assert pair_bytes(folder / "merged") == pair_bytes(whole)


@pytest.mark.parametrize("answer", [errno.EXDEV, errno.ENOSYS, 0])
def test_where_the_kernel_cannot_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: int
) -> None:
    """In the middle of a piece, too: what it has copied counts, the rest goes through a buffer."""
    calls = []

    def copy(source: int, target: int, count: int, start: int, at: int) -> int:
        calls.append(count)
        if len(calls) > 1:
            if answer:
                raise OSError(answer, "no")
            return 0
        return os.pwrite(target, os.pread(source, 3, start), at)

    monkeypatch.setattr(os, "copy_file_range", copy)
    prefixes = [
        write_documents(tmp_path / "a", [[1, 2, 3], [4]]),
        write_documents(tmp_path / "b", [[5, 6]]),
    ]
    merge_pairs(prefixes, tmp_path / "m", threads=1, progress=silent)
    assert IndexedDataset(tmp_path / "m").tokens.tolist() == [1, 2, 3, 4, 5, 6] and len(calls) >= 2


def test_a_failure_leaves_the_former_pair_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    former = pair_bytes(write_documents(tmp_path / "m", [[9]]))

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        merge_pairs(
            [write_documents(tmp_path / "a", [[1, 2]])], tmp_path / "m", threads=2, progress=silent
        )
    assert pair_bytes(tmp_path / "m") == former and no_leftovers(tmp_path)


def test_what_cannot_be_merged(tmp_path: Path) -> None:
    a, b = write_documents(tmp_path / "a", [[1]]), write_documents(tmp_path / "b", [[1]], "i4")
    with pytest.raises(ConfigError, match=r"b\.idx holds int32, but a\.idx uint16"):
        merge_pairs([a, b], tmp_path / "m", threads=1, progress=silent)
    with pytest.raises(ConfigError, match="nothing to merge"):
        merge_pairs([], tmp_path / "m", threads=1, progress=silent)
    bin_path(a).write_bytes(b"123456")
    with pytest.raises(ConfigError, match=r"a\.bin: has 6 bytes, but a\.idx describes 2"):
        merge_pairs([a], tmp_path / "m", threads=1, progress=silent)
    if (vectors := golden()) is not None:
        with pytest.raises(ConfigError, match="is multimodal"):
            merge_pairs([vectors / "tok_modal_i32"], tmp_path / "m", threads=1, progress=silent)
    assert no_leftovers(tmp_path) and not bin_path(tmp_path / "m").exists()


def test_many_shards_are_never_open_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may map some 65,000 files and open 1,024: SlimPajama has 59,166 shards."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    prefixes = [write_documents(tmp_path / "s" / str(i), [[i]]) for i in range(300)]
    most, plain = [0], IndexedDataset.__init__

    def counting(self: IndexedDataset, prefix: Path) -> None:
        plain(self, prefix)
        maps = Path("/proc/self/maps").read_text().splitlines()
        most.append(sum(f"{tmp_path}/s/" in line for line in maps))

    monkeypatch.setattr(IndexedDataset, "__init__", counting)
    merge_pairs(prefixes, tmp_path / "m", threads=2, progress=silent)
    assert max(most) <= 8 and len(IndexedDataset(tmp_path / "m")) == 300


# ---- dataset.json


def result(prefix: Path, **more: Any) -> dict[str, Any]:
    """What a tokens unit reports of a pair."""
    pair = IndexedDataset(prefix)
    n = len(pair.document_indices) - 1
    counts = {
        "documents": n,
        "empty_documents": 0,
        "sequences": len(pair),
        "tokens": pair.num_tokens,
        "text_bytes": 10 * n,
        "lines": n,
        "rejects": 0,
    }
    return {
        **counts,
        "bin_xxh128": file_sum(bin_path(prefix)),
        "idx_xxh128": file_sum(idx_path(prefix)),
        **more,
    }


def spec(
    folder: Path, shards: list[list[list[int]]], *, merged: bool = True, **more: Any
) -> dict[str, Any]:
    """The spec of the last unit of a dataset below `folder`, whose shards are written."""
    train_bpe(iter(["some text"] * 3), 300, "<|endoftext|>").save(str(folder / "tokenizer.json"))
    entries = []
    for i, documents in enumerate(shards):
        prefix, stamp = (
            write_documents(folder / "shards" / f"{i:05d}", documents),
            folder / f"{i}.json",
        )
        stamp.write_text(json.dumps({"result": result(prefix, left_out={"too short": i})}))
        entries.append(
            {
                "name": f"{i:05d}",
                "prefix": str(prefix),
                "source": {"path": f"part-{i}"},
                "stamps": {"tokens": str(stamp)},
            }
        )
    return {
        "name": "d",
        "tokenizer": str(folder / "tokenizer.json"),
        "eod_token": "<|endoftext|>",
        "shards": entries,
        "shuffle": False,
        "declared": {},
        "prefix": str(folder / "d_text_document") if merged else None,
        "manifest": str(folder / "dataset.json"),
        "rejects": str(folder / "rejects"),
        **more,
    }


def test_manifest_of_a_merged_dataset(tmp_path: Path) -> None:
    counts = work(spec(tmp_path, [[[5, 0], [6, 7, 0]], [[8, 0]]]), silent)
    manifest = read_manifest(tmp_path / "dataset.json")
    assert counts == {key: manifest[key] for key in counts}
    assert (
        manifest["documents"],
        manifest["tokens"],
        manifest["text_bytes"],
        manifest["left_out"],
    ) == (3, 7, 30, {"too short": 1})
    assert manifest["pairs"] == ["d_text_document"] and [
        shard["source"] for shard in manifest["shards"]
    ] == [{"path": "part-0"}, {"path": "part-1"}]
    ranges = [(entry["file"], entry["start"], entry["bytes"]) for entry in manifest["checksums"]]
    assert ranges == [
        ("d_text_document.bin", 0, 10),
        ("d_text_document.bin", 10, 4),
        ("d_text_document.idx", 0, 34 + 12 * 3 + 8 * 4),
    ]
    for entry in manifest["checksums"]:
        assert file_sum(tmp_path / entry["file"], entry["start"], entry["bytes"]) == entry["xxh128"]


def test_manifest_of_shards_that_stay_pairs(tmp_path: Path) -> None:
    """A shard without a token is not a pair to sample from, but it is counted and checked."""
    work(spec(tmp_path, [[[5, 0]], [[]], [[8, 0]]], merged=False), silent)
    manifest = read_manifest(tmp_path / "dataset.json")
    assert (
        manifest["pairs"] == ["shards/00000", "shards/00002"]
        and manifest["documents"] == 3
        and len(manifest["checksums"]) == 6
    )


def test_what_a_former_shape_of_the_dataset_left_is_deleted(tmp_path: Path) -> None:
    """Pairs of shards that are none any more, lines rejected then, temporary files of killed
    workers; nothing of other folders."""
    given = spec(tmp_path, [[[5, 0]], [[6, 0]]])
    stamp = Path(given["shards"][1]["stamps"]["tokens"])
    stamp.write_text(json.dumps({"result": result(tmp_path / "shards/00001", rejects=2)}))
    (tmp_path / "rejects").mkdir()
    kept = [
        tmp_path / name
        for name in ("shards/00001.bin", "shards/00001.lock", "rejects/00001.jsonl", "00007.bin")
    ]
    gone = [
        tmp_path / name
        for name in (
            "shards/00007_text_document.bin",
            "shards/00000.bin.tmp-1-ab",
            "rejects/00000.jsonl",
            "rejects/00001.jsonl.tmp-1-ab",
        )
    ]
    gone.append(temporary_name(ranges_path(Path(given["prefix"]))))
    for path in (*kept[1:], *gone):
        path.write_bytes(b"x")
    work(given, silent)
    assert all(path.exists() for path in kept) and not any(path.exists() for path in gone)


def test_counts_are_compared_with_what_was_published(tmp_path: Path) -> None:
    given = spec(tmp_path, [[[5, 0], [6, 0]]], declared={"documents": 3})
    with pytest.raises(ConfigError, match=r"datasets\.d\.documents = 3 was published, 2 are there"):
        work(given, silent)
    assert not (tmp_path / "dataset.json").exists()
    shard = ShardResult(TokensResult.from_json(result(tmp_path / "shards/00000")))
    check_declared("d", {"documents": 2, "text_bytes": 20}, [shard])


def test_reasons_are_summed_over_units_and_shards() -> None:
    plain = dict.fromkeys(
        ("documents", "empty_documents", "sequences", "tokens", "text_bytes", "lines", "rejects"), 1
    )
    found = totals(
        [
            ShardResult(
                TokensResult.from_json({**plain, "left_out": {"a": 2}}),
                TextResult(1, 1, {"a": 1, "b": 0}),
            ),
            ShardResult(TokensResult.from_json({**plain, "rejected": {"not JSON": 1}})),
        ]
    )
    assert (
        found.left_out == {"a": 3, "b": 0}
        and found.rejected == {"not JSON": 1}
        and found.documents == 2
    )


def test_an_unprepared_dataset_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"dataset\.json is not there: the dataset is not prepared"
    ):
        read_manifest(tmp_path / "dataset.json")


def dropped(documents: int, present: dict[str, int]) -> ShardResult:
    return ShardResult(
        TokensResult(documents, 0, documents, 1, 1, documents, 0, drop_present=present)
    )


def test_a_field_of_drop_that_nobody_has_is_refused() -> None:
    check_drop(
        "d",
        [
            dropped(3, {"meta.set": 0}),
            dropped(1, {"meta.set": 2}),
        ],
    )
    with pytest.raises(
        ConfigError, match=r"datasets\.d\.drop: no document has the field 'metta\.set'"
    ):
        check_drop("d", [dropped(3, {"metta.set": 0})])


def test_many_shards_are_shuffled_as_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefixes = [tmp_path / f"p{i}" for i in range(5)]
    for number, prefix in enumerate(prefixes):
        with IndexedWriter(prefix, "uint16") as writer:
            writer.add_documents(np.arange(12) + 100 * number, [3, 0, 4, 5])
    module._shuffle(prefixes, tmp_path / "few", lambda *done, **counts: None)
    monkeypatch.setattr(module, "MOST_OPEN", 2)
    module._shuffle(prefixes, tmp_path / "many", lambda *done, **counts: None)
    for ending in (".bin", ".idx"):
        assert (tmp_path / f"few{ending}").read_bytes() == (tmp_path / f"many{ending}").read_bytes()
    assert not list(tmp_path.glob("*joined*"))
