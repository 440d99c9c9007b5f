"""Data that grow: what is new is made, what was there is taken from where it lies, and the bytes
are those of a dataset made at once."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Project
from tests.distributed import call
from tests.stages.web_project import texts
from trainkit.base.errors import TrainkitError
from trainkit.data.indexed.dataset import IndexedDataset
from trainkit.data.tokenize import merge_worker as merge
from trainkit.data.tokenizer import train_bpe
from trainkit.jobs.load import load
from trainkit.stages.contract import Need, Unit
from trainkit.stages.execute import StageWork, missing_units, stamps_folder, update_stage
from trainkit.stages.prep_data import needs_of_dataset
from trainkit.stages.stamps import Freshness, check_freshness
from trainkit.stages.unit_process import execute_locally

JOBS = """
[tokenizers.words]
type = "file"
path = "words.json"

[datasets.lines]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "words"
MORE
"""


class Silent:
    """A reporter that says nothing."""

    def verdict(self, verdict: Freshness) -> None: ...
    def waiting(self, need: Need, holder: str) -> None: ...
    def started(self, need: Need, units: Any) -> None: ...
    def counted(self, unit: Unit, counts: Any) -> None: ...
    def progress(self, unit: Unit, fraction: float) -> None: ...
    def finished(self, need: Need) -> None: ...


class Corpus:
    """A dataset of text files, prepared in this process but for its units."""

    def __init__(self, folder: Path, more: str = "") -> None:
        self.folder = folder
        (folder / "corpus").mkdir(parents=True)
        (folder / "jobs.toml").write_text(JOBS.replace("MORE", more))
        train_bpe(iter(texts(0, 200)), 320, "<|endoftext|>").save(str(folder / "words.json"))
        for number in range(3):
            self.write(f"part-{number}", number)

    def path(self, name: str) -> Path:
        return self.folder / f"corpus/{name}.jsonl"

    def write(self, name: str, seed: int) -> None:
        rows = [{"text": text} for text in (*texts(seed, 12), "", *texts(seed + 100, 3))]
        self.path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def need(self, *, anew: bool = False) -> Need:
        (need,) = needs_of_dataset(
            load(self.folder).dataset("lines"), self.folder, self.stamps, force=anew
        )
        return need

    @property
    def stamps(self) -> Path:
        return stamps_folder(self.folder, "prep-data")

    def because(self) -> str:
        verdict = check_freshness(self.need(), self.stamps)
        return "fresh" if verdict.fresh else verdict.because

    def missing(self) -> list[str]:
        """Units that would run."""
        return [unit.name for unit in missing_units(self.need(), self.stamps, force=False)]

    def make(self, *, force: bool = False) -> None:
        """In a process whose units are forked: they are many, and short."""
        call("tests.stages.test_prep_data_grows:make", self.folder, force)

    def content(self) -> dict[str, bytes]:
        """The pair, the tokenizer, and dataset.json without the names of shards (they keep those
        they had) and what was compared."""
        folder = self.folder / "data/lines/words"
        manifest = json.loads((folder / "dataset.json").read_text())
        # how many documents were compared: the first 200 of the shard that was once the first
        del manifest["encoders"]
        for shard in manifest["shards"]:
            del shard["name"]
        found = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix in (".bin", ".idx")}
        return {**found, "dataset.json": json.dumps(manifest).encode()}

    def at_once(self) -> dict[str, bytes]:
        """What a dataset of these very files is where it was never made before."""
        other = self.folder.parent / f"at-once-{len(list(self.folder.parent.iterdir()))}"
        shutil.copytree(self.folder, other, ignore=shutil.ignore_patterns("data", "stamps"))
        fresh = Corpus.__new__(Corpus)
        fresh.folder = other
        fresh.make()
        return fresh.content()


def make(folder: Path, force: bool) -> None:
    """What a corpus in `folder` needs."""
    corpus = Corpus.__new__(Corpus)
    corpus.folder = folder
    update_stage(corpus.need(anew=force), folder, execute_locally, Silent(), force=force)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Corpus:
    made = Corpus(tmp_path / "project")
    monkeypatch.chdir(made.folder)
    made.make()
    return made


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def test_a_file_more_is_all_that_is_made(corpus: Corpus) -> None:
    """Behind, between and before the others; a touched one and the tokenizer's file among them
    are not a work, nor is half of a pair that a task left which was killed as it deleted them."""
    prepared = corpus.folder / "data/lines/words"
    for name, seed in (("part-3", 3), ("part-1b", 4), ("a", 5)):
        (prepared / "shards").mkdir()
        shutil.copy(prepared / "lines_text_document.idx", prepared / "shards/00001.idx")
        corpus.write(name, seed)
        touch(corpus.path("part-1"))
        touch(corpus.folder / "words.json")
        assert corpus.because() == f"input {corpus.path(name)} is new"
        number = len(list((corpus.folder / "corpus").iterdir())) - 1
        assert corpus.missing() == [f"tokens-{number:05d}", "merge"]
        corpus.make()
        assert corpus.because() == "fresh" and not (prepared / "shards").exists()
    assert corpus.content() == corpus.at_once()
    IndexedDataset(prepared / "lines_text_document").verify()


def test_a_touched_file_is_read_once_and_nothing_is_made(corpus: Corpus) -> None:
    touch(corpus.path("part-0"))
    before = corpus.content()
    assert corpus.because() == "fresh"
    stamp = corpus.stamps / "lines--words.json"
    old = stamp.read_bytes()
    corpus.make()
    assert stamp.read_bytes() != old, "its new time is known now"
    assert json.loads(stamp.read_text())["inputs"][0][2] == corpus.path("part-0").stat().st_mtime_ns
    assert corpus.content() == before


def test_one_of_another_content_and_the_same_size(corpus: Corpus) -> None:
    path = corpus.path("part-1")
    path.write_bytes(path.read_bytes().replace(b"quick", b"slowe"))
    assert corpus.because() == f"input {path} changed" and corpus.missing() == [
        "tokens-00001",
        "merge",
    ]
    corpus.make()
    assert corpus.content() == corpus.at_once()


def test_one_less_and_one_renamed(corpus: Corpus) -> None:
    corpus.path("part-0").rename(corpus.path("zero"))
    assert (
        corpus.because()
        == f"input {corpus.path('zero')} is new, input {corpus.path('part-0')} is gone"
    )
    assert corpus.missing() == ["tokens-00003", "merge"], "another name is another file"
    corpus.make()
    assert corpus.content() == corpus.at_once()
    corpus.path("part-1").unlink()
    assert corpus.because() == f"input {corpus.path('part-1')} is gone" and corpus.missing() == [
        "merge"
    ]
    corpus.make()
    assert corpus.content() == corpus.at_once()


@pytest.mark.parametrize("change", ["bin", "idx", "dataset.json"])
def test_of_a_pair_that_somebody_changed_nothing_is_taken(change: str, corpus: Corpus) -> None:
    corpus.write("part-3", 3)
    folder = corpus.folder / "data/lines/words"
    path = folder / (change if change == "dataset.json" else f"lines_text_document.{change}")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)
    assert corpus.missing() == [*(f"tokens-{i:05d}" for i in range(4)), "merge"]
    path.unlink()
    corpus.make()
    assert corpus.content() == corpus.at_once()


def test_planned_before_another_process_wrote_the_pair(corpus: Corpus) -> None:
    """The ranges are those of the pair that was there: of another one nothing is taken, and the
    next call plans anew."""
    corpus.write("part-3", 3)
    planned = corpus.need()
    corpus.write("a", 5)
    corpus.make()
    corpus.path("a").unlink()
    with pytest.raises(TrainkitError, match="is not what it was when this was planned"):
        update_stage(planned, corpus.folder, execute_locally, Silent())
    corpus.make()
    assert corpus.content() == corpus.at_once()


def test_force_makes_everything_again(corpus: Corpus) -> None:
    corpus.write("a", 5)
    corpus.make(force=True)
    assert corpus.content() == corpus.at_once()
    shards = json.loads((corpus.folder / "data/lines/words/dataset.json").read_text())["shards"]
    assert [shard["name"] for shard in shards] == [f"{i:05d}" for i in range(4)]


@pytest.mark.parametrize("dies_after", ["tokens", "pair", "merge"])
def test_growing_that_is_cut_off_goes_on(
    dies_after: str, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed when the new shard is there, or the new pair, or its dataset.json too: what was
    made is not made again."""
    corpus.write("part-1b", 4)

    def killed(spec: Any, shards: Any) -> Any:
        raise KeyboardInterrupt

    def until(work: StageWork) -> None:
        kept = [unit for unit in work.units if dies_after == "merge" or unit.name != "merge"]
        execute_locally(replace(work, units=kept))
        if dies_after == "pair":
            with monkeypatch.context() as patch:
                patch.setattr(merge, "write_manifest", killed)
                merge.work(
                    next(unit.spec for unit in work.units if unit.name == "merge"),
                    lambda *done: None,
                )
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        update_stage(corpus.need(), corpus.folder, until, Silent())
    assert "was interrupted" in corpus.because()
    assert not [name for name in corpus.missing() if name != "merge"]
    corpus.make()
    assert corpus.content() == corpus.at_once()
    assert not list((corpus.folder / "data/lines/words").glob("*.ranges.json"))


def test_pairs_that_stay_keep_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """merge = false: the order of dataset.json is that of the files; a new one in between gets a
    name that was not given yet."""
    corpus = Corpus(tmp_path / "project", "merge = false")
    monkeypatch.chdir(corpus.folder)
    corpus.make()
    shards = corpus.folder / "data/lines/words/shards"
    before = {path.name: path.stat().st_mtime_ns for path in shards.glob("*.bin")}
    corpus.write("part-0b", 7)
    assert corpus.missing() == ["tokens-00003", "manifest"]
    corpus.make()
    assert {
        name: time
        for path in shards.glob("*.bin")
        if (name := path.name) in before
        for time in [path.stat().st_mtime_ns]
    } == before
    manifest = json.loads((corpus.folder / "data/lines/words/dataset.json").read_text())
    assert manifest["pairs"] == [f"shards/{i:05d}_text_document" for i in (0, 3, 1, 2)]


def test_a_corpus_without_a_token_is_an_error(corpus: Corpus) -> None:
    for path in (corpus.folder / "corpus").iterdir():
        path.write_text('{"text": ""}\n')
    with pytest.raises(TrainkitError, match="3 files hold no token"):
        make(corpus.folder, force=False)


def test_random_changes_end_in_the_bytes_of_a_dataset_made_at_once(corpus: Corpus) -> None:
    dice = random.Random(11)
    changes: list[Callable[[], object]] = [
        lambda: corpus.write(f"new-{dice.randrange(100):02d}", dice.randrange(1000)),
        lambda: dice.choice(sorted((corpus.folder / "corpus").iterdir())[1:]).unlink(),
        lambda: touch(dice.choice(sorted((corpus.folder / "corpus").iterdir()))),
        lambda: corpus.write("part-1", dice.randrange(1000)),
    ]
    for _ in range(3):
        for _ in range(3):
            dice.choice(changes)()
        corpus.make()
    assert corpus.content() == corpus.at_once()


def test_through_the_task(project: Project) -> None:
    """A file more of a project whose BPE is trained on its text trains it again: the dry run
    says what is made and why."""
    (project.path / "corpus/part-2.jsonl").write_text('{"text": "a new shard"}\n')
    project.invoke("prep-data")
    os.utime(project.path / "corpus/part-0.jsonl")
    assert "is fresh because nothing changed" in project.invoke("prep-data", "--dry-run").stdout
