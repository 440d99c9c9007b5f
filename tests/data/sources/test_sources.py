"""Where demo's text comes from, and shards of it."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from tests.data.text.text_files import read_documents
from trainkit.base.errors import ConfigError
from trainkit.data.sources import Shard
from trainkit.data.sources.files import FilesSource
from trainkit.data.sources.stdlib import StdlibSource, source_files
from trainkit.data.text.formats import READABLE
from trainkit.data.unit_specs import TextRecipe
from trainkit.jobs.schema import Dataset, Tokenizer

DATASET = Dataset(name="d", source="stdlib", tokenizer=Tokenizer(name="t", vocab_size=300))


def made_of(shard: Shard) -> TextRecipe:
    assert isinstance(shard.recipe, TextRecipe)
    return shard.recipe


def test_every_source_file_is_in_one_shard_in_order(tmp_path: Path) -> None:
    shards = StdlibSource().shards(DATASET, tmp_path)
    files = [name for shard in shards for name in made_of(shard).files]
    assert files == source_files(Path(sysconfig.get_path("stdlib")))
    assert len(files) > 300 and files == sorted(files)
    assert not any({"site-packages", "test", "__pycache__"} & set(Path(f).parts) for f in files)
    assert all(s.size <= DATASET.shard_bytes or len(made_of(s).files) == 1 for s in shards)


def test_what_is_not_text_is_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("print(1)\n")
    (tmp_path / "b.py").write_bytes(b"")
    (tmp_path / "c.py").write_bytes(b"\xff\xfe")
    path = tmp_path / "shard.jsonl.zst"
    result = StdlibSource().write(TextRecipe(tmp_path, ("c.py", "b.py", "a.py")), path, "text")
    assert result.to_json() == {
        "documents": 1,
        "text_bytes": 9,
        "left_out": {"not_utf8": 1, "empty": 1},
    }
    assert [d.text for d in read_documents(path, "text")] == ["print(1)\n"]


def test_another_ending_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("a,b")
    with pytest.raises(ConfigError, match=r"is of no format that is known by its name"):
        list(read_documents(tmp_path / "x.csv", "text"))


class TestFiles:
    def dataset(self, folder: Path, *paths: str, **words: object) -> Dataset:
        values = {
            "name": "d",
            "source": "files",
            "paths": [f"{folder}/{path}" for path in paths],
            "tokenizer": DATASET.tokenizer,
            **words,
        }
        return Dataset.model_validate(values)

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        for i in range(12):
            (tmp_path / f"part-{i:02d}.jsonl").write_bytes(b"x" * (i + 1))
        return tmp_path

    def test_patterns_ranges_and_order(self, folder: Path) -> None:
        shards = FilesSource().shards(
            self.dataset(
                folder, "part-{10..11}.jsonl", "part-0[12].jsonl", "part-*.jsonl", files=12
            ),
            folder,
        )
        assert [int(s.path.stem[-2:]) for s in shards] == [10, 11, 1, 2, 0, 3, 4, 5, 6, 7, 8, 9]
        assert [s.size for s in shards[:3]] == [11, 12, 2] and not any(s.recipe for s in shards)

    @pytest.mark.parametrize("ending", READABLE)
    def test_every_format(self, ending: str, folder: Path) -> None:
        (folder / f"a{ending}").touch()
        assert len(FilesSource().shards(self.dataset(folder, f"a{ending}"), folder)) == 1

    def test_missing_ones_are_named_and_counted(self, folder: Path) -> None:
        with pytest.raises(
            ConfigError, match=r"part-12\.jsonl' matches no file \(2 more match none\)"
        ):
            FilesSource().shards(self.dataset(folder, "part-{00..14}.jsonl"), folder)
        assert (
            len(
                FilesSource().shards(
                    self.dataset(folder, "part-{00..14}.jsonl", missing_files="allow", files=12),
                    folder,
                )
            )
            == 12
        )
        with pytest.raises(ConfigError, match="12 files are there, files = 13"):
            FilesSource().shards(
                self.dataset(folder, "part-{00..14}.jsonl", missing_files="allow", files=13), folder
            )
        with pytest.raises(ConfigError, match="download_bytes = 79 was published, 78 are there"):
            FilesSource().shards(self.dataset(folder, "*.jsonl", download_bytes=79), folder)

    def test_what_is_no_text(self, folder: Path) -> None:
        (folder / "x.csv").touch()
        with pytest.raises(ConfigError, match=r"x\.csv is not a file of a format that is read"):
            FilesSource().shards(self.dataset(folder, "x.csv"), folder)

    def test_a_folder_is_its_files(self, folder: Path) -> None:
        (folder / "more").mkdir()
        (folder / "more" / "z.txt").write_text("text")
        shards = FilesSource().shards(self.dataset(folder, "part-03.jsonl", "", "mor*"), folder)
        names = [f"part-{i:02d}.jsonl" for i in range(12) if i != 3]
        assert [shard.path.name for shard in shards] == ["part-03.jsonl", "z.txt", *names]
