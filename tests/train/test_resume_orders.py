"""Killed and resumed on a blend of real files, in both orders of samples; and the same samples
on another number of ranks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.conftest import wait_for
from tests.distributed import finish
from tests.train.support import MODEL, new_run, start_ranks, tiny_job
from tests.train.test_resume import facts, steps
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.order.megatron_worker import work
from trainkit.jobs.datasets import BlendPart
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.stages.index import IndexStage

TOKENIZER = Tokenizer(name="t", type="file", path="tokenizer.json", vocab_size=MODEL.vocab_size)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs so small that 12 steps walk through one of them more than once."""
    folder = tmp_path_factory.mktemp("pairs")
    for number, name in enumerate(("prose", "code")):
        random = np.random.default_rng(number)
        lengths = random.integers(1, 50, size=40)
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_documents(random.integers(0, 301, size=int(lengths.sum())), lengths)
    return folder


def job_of(files: Path, root: Path, ranks: int, sample_order: str) -> Job:
    parts = {
        name: BlendPart(
            weight=weight,
            dataset=Dataset(
                name=name,
                source="indexed",
                prefixes=(str(files / name),),
                tokenizer=TOKENIZER,
                split="80,20,0",
                mmap=name == "code",
            ),
        )
        for name, weight in (("prose", 0.8), ("code", 0.2))
    }
    mix = Dataset(name="mix", source="blend", blend=parts, tokenizer=TOKENIZER)
    job = tiny_job(ranks, root, eval_interval=4, save_interval=5).model_copy(
        update={"dataset": mix, "sample_order": sample_order}
    )
    for need in IndexStage().needs(job, root / "stamps"):
        for unit in need.units:
            work(dict(unit.spec), lambda done, total: None)
    return job


def checksums(run: RunFolder) -> list[int]:
    return [row["batch_checksum"] for row in read_rows(run.metrics) if "eval" not in row]


# native: tests/train/test_resume.py
@pytest.mark.parametrize(
    "sample_order", [pytest.param("native", marks=pytest.mark.slow), "megatron"]
)
def test_killed_and_resumed_equals_uninterrupted(
    files: Path, tmp_path: Path, sample_order: str
) -> None:
    whole = new_run(job_of(files, tmp_path / "whole", 2, sample_order))
    assert finish(start_ranks(whole, 2), 600) == [0, 0], whole.attempt(1).log(0).read_text()
    assert len(set(checksums(whole))) == 12

    broken = new_run(job_of(files, tmp_path / "broken", 2, sample_order))
    children = start_ranks(broken, 2)
    wait_for(lambda: steps(broken)[-1:] >= [7], "step 7")
    for child in children:
        child.kill()
    finish(children, 600)
    assert finish(start_ranks(broken, 2), 600) == [0, 0]
    assert facts(broken) == facts(whole)

    alone = new_run(job_of(files, tmp_path / "alone", 1, sample_order))
    assert finish(start_ranks(alone, 1), 600) == [0]
    assert checksums(alone) == checksums(whole)
