"""A folder stands for its files of text, and never for training and test data together."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow import ipc

from tests.data.text.text_files import read_documents
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.sources.folders import folder_files

PLACE = "datasets.d.paths"


def fill(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


def names_of(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder_files(folder, PLACE)]


def refused(folder: Path, words: str) -> str:
    with pytest.raises(ConfigError, match=words) as caught:
        folder_files(folder, PLACE)
    assert caught.value.exit == Exit.STAGE_FAILED
    assert PLACE in str(caught.value) and str(folder) in str(caught.value)
    return str(caught.value)


def test_readable_files_in_sorted_order(tmp_path: Path) -> None:
    files = ["a/b.jsonl.zst", "a/c/CC-MAIN-1.warc.gz", "b.parquet", "notes.txt"]
    other = ["x.csv", "LICENSE.txt", ".git/a.txt", ".hidden.txt", "dataset_infos.json", "README.md"]
    assert names_of(fill(tmp_path, *reversed(files), *other)) == files


def test_links_to_blobs_as_the_hub_s_cache_keeps_them(tmp_path: Path) -> None:
    blob = fill(tmp_path / "blobs", "0123") / "0123"
    snapshot = fill(tmp_path / "snapshots/c0ffee", "README.md")
    (snapshot / "data").mkdir()
    (snapshot / "data/train-00000.parquet").symlink_to(blob)
    assert names_of(snapshot) == ["data/train-00000.parquet"]


@pytest.mark.parametrize(
    "held_out", ["data/test-00000-of-00001.parquet", "val/x.parquet", "dev.jsonl"]
)
def test_splits_are_not_mixed(held_out: str, tmp_path: Path) -> None:
    train = [f"data/train-{i:05d}-of-00012.parquet" for i in range(12)]
    message = refused(fill(tmp_path, *train, held_out), "1 of 13 files are not of a training split")
    assert held_out in message and f"such as {tmp_path}/data/train-*-of-*.parquet" in message
    (tmp_path / held_out).unlink()
    assert names_of(tmp_path) == train


def test_a_folder_of_one_split_is_that_split(tmp_path: Path) -> None:
    files = ["a-test.jsonl", "test/b.jsonl"]
    assert names_of(fill(tmp_path, *files)) == files
    assert names_of(fill(tmp_path / "test", "latest.jsonl")) == ["b.jsonl", "latest.jsonl"]


def test_nothing_to_read(tmp_path: Path) -> None:
    refused(fill(tmp_path, "README.md", "x.csv"), "without a file of a format that is read")


FINEWEB = """---
license: odc-by
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*/*
- config_name: sample-10BT
  data_files:
  - split: train
    path: ["./sample/10BT/*"]
- config_name: CC-MAIN-2013-20
  data_files: data/CC-MAIN-2013-20/*
---
# FineWeb
"""


class TestConfigurations:
    def test_several(self, tmp_path: Path) -> None:
        fill(tmp_path, "data/CC-MAIN-2013-20/0.parquet", "data/CC-MAIN-2024-10/0.parquet")
        (tmp_path / "README.md").write_text(FINEWEB)
        both = ["data/CC-MAIN-2013-20/0.parquet", "data/CC-MAIN-2024-10/0.parquet"]
        assert names_of(fill(tmp_path, "extra/a.jsonl")) == both
        fill(tmp_path, "sample/10BT/1.parquet")
        message = refused(tmp_path, "several configurations: default, sample-10BT, CC-MAIN-2013-20")
        assert f"{tmp_path}/sample/*BT/*.parquet" in message

    @pytest.mark.parametrize("head", ["", "---\nlicense: mit\n---\n", "---\n---\n", "---\n"])
    def test_none(self, head: str, tmp_path: Path) -> None:
        fill(tmp_path, "a.jsonl")
        (tmp_path / "README.md").write_text(head)
        assert names_of(tmp_path) == ["a.jsonl"]

    @pytest.mark.parametrize(
        "configs", ["5", "[5]", "[{data_files: x}]", "[{config_name: a, data_files: 5}]", "["]
    )
    def test_not_understood(self, configs: str, tmp_path: Path) -> None:
        fill(tmp_path, "a.jsonl")
        (tmp_path / "README.md").write_text(f"---\nconfigs: {configs}\n---\n")
        refused(tmp_path, "configurations cannot be understood")


class TestSavedToDisk:
    """As `datasets` writes it: its files are named by state.json, caches lie beside them."""

    TABLE = arrow.table({"text": ["one", "two"], "n": [1, 2]})

    def save(self, folder: Path, texts: arrow.Table = TABLE) -> Path:
        folder.mkdir(parents=True)
        name = "data-00000-of-00001.arrow"
        with ipc.new_stream(folder / name, texts.schema) as writer:
            writer.write_table(texts, max_chunksize=1)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}]}))
        (folder / "dataset_info.json").write_text("{}")
        return fill(folder, "cache-0123456789abcdef.arrow")

    def test_one(self, tmp_path: Path) -> None:
        (path,) = folder_files(self.save(tmp_path / "d"), PLACE)
        documents = list(read_documents(path, "text"))
        assert [d.text for d in documents] == ["one", "two"] and documents[1].fields["n"] == 2

    def test_splits(self, tmp_path: Path) -> None:
        fill(tmp_path, "dataset_dict.json")
        self.save(tmp_path / "train")
        assert len(folder_files(tmp_path, PLACE)) == 1
        self.save(tmp_path / "test")
        message = refused(tmp_path, "1 of 2 files are not of a training split")
        assert f"{tmp_path}/train/data-*-of-*.arrow" in message
