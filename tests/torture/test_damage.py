"""Checkpoints that were damaged after they were written: the ranks name them, go back to one
that is whole, and train the same again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of, whole_steps
from tests.train.support import new_run
from tests.train.test_resume import facts
from trainkit.runs.checkpoints import published_folders
from trainkit.runs.folder import RunFolder
from trainkit.runs.manifest import MANIFEST

Damage = Callable[[Path], object]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 64
    file.write_bytes(content)


def change(folder: Path, old: str, new: str) -> None:
    """The manifest, as a disk may: the form is right, one fact is not."""
    text = (folder / MANIFEST).read_text()
    assert text.count(old) == 1, (old, text[:500])
    (folder / MANIFEST).write_text(text.replace(old, new))


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lose_files(folder: Path) -> None:
    for file in folder.glob("*.bin"):
        file.unlink()


def exchange(folder: Path) -> None:
    """Two files in each other's place: sizes may be right, hashes are not."""
    first, second, spare = folder / "rank-00000.bin", folder / "rank-00001.bin", folder / "spare"
    first.rename(spare), second.rename(first), spare.rename(second)


def of_an_older_step(folder: Path) -> None:
    """Its files are those of another step, as a writer that uses a folder again leaves them."""
    older = folder.with_name("step-00000009")
    for name in ("rank-00000.bin", "rank-00001.bin"):
        shutil.copy(older / name, folder / name)


DAMAGES: dict[str, tuple[Damage, str]] = {
    "byte flip": (
        lambda folder: flip(folder / "rank-00001.bin"),
        "rank-00001.bin does not have the hash",
    ),
    "byte flip in rank 0's": (
        lambda folder: flip(folder / "rank-00000.bin"),
        "rank-00000.bin does not have the hash",
    ),
    "truncation": (lambda folder: cut(folder / "rank-00001.bin"), "rank-00001.bin has "),
    "missing file": (
        lambda folder: (folder / "rank-00000.bin").unlink(),
        "rank-00000.bin is missing",
    ),
    "torn manifest": (lambda folder: cut(folder / MANIFEST), MANIFEST),
    "manifest: flip": (lambda folder: flip(folder / MANIFEST), MANIFEST),
    "manifest: samples": (
        lambda folder: change(folder, '"consumed_samples":96', '"consumed_samples":16'),
        f"{MANIFEST} does not have the hash",
    ),
    "manifest: steps": (
        lambda folder: change(folder, '"optimizer_steps":12', '"optimizer_steps":10'),
        f"{MANIFEST} does not have the hash",
    ),
    "manifest: a tensor's name": (
        lambda folder: change(folder, '"model.final_norm.bias"', '"model.final_norm.bias2"'),
        f"{MANIFEST} does not have the hash",
    ),
    "files without manifest": (
        lambda folder: (folder / MANIFEST).unlink(),
        f"{MANIFEST} cannot be read",
    ),
    "manifest without files": (lose_files, "rank-00001.bin is missing"),
    "files exchanged": (exchange, "rank-0000"),
    "files of an older step": (of_an_older_step, "does not have the hash"),
}


def copy_of(run: RunFolder, folder: Path) -> RunFolder:
    shutil.copytree(run.path, folder / "runs/tiny/one")
    return RunFolder(folder / "runs/tiny/one")


# tests/train/checkpoint/test_save_load.py has every kind, without ranks
FEW = ("byte flip", "missing file", "manifest: samples", "files of an older step")


@pytest.mark.parametrize(
    "damage",
    [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in DAMAGES],
)
def test_the_newest_is_passed_over_by_name(
    damage: str, ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = copy_of(reference, tmp_path)
    happen, words = DAMAGES[damage]
    happen(run.checkpoints / "step-00000012")
    run.attempt(1).log(0).unlink()
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    (warning,) = [line for line in log_of(run).splitlines() if "passed over" in line]
    assert "step-00000012 is damaged" in warning and words in warning
    assert " iteration       10/" in log_of(run) and " iteration        9/" not in log_of(run)
    assert facts(run) == facts(reference) and whole_steps(run) == [3, 6, 9, 12]


def test_where_none_is_whole_nothing_begins_anew(
    ranks: Ranks, tmp_path: Path, reference: RunFolder
) -> None:
    run = copy_of(reference, tmp_path)
    for folder in published_folders(run.checkpoints):
        flip(folder / "rank-00001.bin")
    (run.checkpoints / "step-00000014.tmp").mkdir()  # with all files, but never published
    shutil.copy(
        run.checkpoints / "step-00000012/rank-00000.bin", run.checkpoints / "step-00000014.tmp"
    )
    assert ranks.run(run, 2) == [16, 16], log_of(run)
    error = json.loads(run.attempt(1).error(1).read_text())
    assert error["exit"] == 16 and "none of the 4 checkpoints" in error["message"]
    assert facts(run) == facts(reference)


def test_sizes_alone_where_that_was_asked_for(ranks: Ranks, tmp_path: Path) -> None:
    """verify = "size" does not read the files: what was flipped is trained on with, and a person
    who says so knows."""
    run = new_run(job_of("1", tmp_path, keep={"keep_last": 9, "verify": "size"}, train_iters=6))
    assert ranks.run(run, 1) == [0]
    flip(run.checkpoints / "step-00000006/rank-00000.bin")
    run.attempt(1).log(0).unlink()
    assert ranks.run(run, 1) == [0] and "passed over" not in log_of(run)
