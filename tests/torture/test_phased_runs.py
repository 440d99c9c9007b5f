"""Runs with phases, killed in them and at their boundaries: rows, weights and moments are those of
a run that nobody touched, in both orders of samples; and the same samples on another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.torture.conftest import Ranks, job_of
from tests.torture.test_disk import log_of
from tests.torture.test_kills import end_of
from tests.train.support import new_run
from tests.train.test_resume import facts
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.data.order.megatron_worker import work
from trainkit.jobs.data_phases import DataPhase
from trainkit.jobs.datasets import BlendPart
from trainkit.jobs.schema import Dataset, Job, Tokenizer
from trainkit.runs.folder import RunFolder
from trainkit.runs.metrics import read_rows
from trainkit.stages.index import IndexStage

TOKENIZER = Tokenizer(name="t", type="file", path="tokenizer.json")
PHASES = [0] * 6 + [1] * 3 + [2] * 3  # of the steps


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three pairs, so small that training walks through some more than once."""
    folder = tmp_path_factory.mktemp("pairs")
    for number, name in enumerate(("web", "code", "good")):
        random = np.random.default_rng(number)
        lengths = random.integers(1, 20, size=30)
        with IndexedWriter(folder / name, np.uint16) as writer:
            writer.add_documents(random.integers(0, 61, size=int(lengths.sum())), lengths)
    return folder


def dataset(files: Path, name: str) -> Dataset:
    return Dataset(
        name=name,
        source="indexed",
        prefixes=(str(files / name),),
        tokenizer=TOKENIZER,
        split="80,20,0",
    )


def blend(files: Path, name: str, *parts: str, **keys: Any) -> Dataset:
    held = {part: BlendPart(dataset=dataset(files, part)) for part in parts}
    return Dataset(name=name, source="blend", blend=held, tokenizer=TOKENIZER, **keys)


def phased(files: Path, root: Path, layout: str, sample_order: str, **training: Any) -> RunFolder:
    """Six steps on a tempered blend, three on one of its parts, three on a capped blend."""
    phases = (dataset(files, "code"), blend(files, "anneal", "good", "web", max_epochs=2))
    values = {
        "dataset": blend(files, "mix", "web", "code", temperature=2),
        "sample_order": sample_order,
        "phases": tuple(DataPhase(dataset=each, share=0.25) for each in phases),
    }
    job = job_of(layout, root, keep={"keep_last": 9}, **training)
    job = Job.model_validate({**dict(job), **values})
    for need in IndexStage().needs(job, root / "stamps"):
        for unit in need.units:
            work(dict(unit.spec), lambda done, total: None)
    return new_run(job)


def kill(step: int) -> dict[str, Any]:
    """All ranks, as they are about to make so many more steps."""
    return {"do": "kill", "at": "step", "call": step, "when": "before", "rank": 0, "all": True}


@pytest.fixture(scope="module")
def untouched(
    files: Path, tmp_path_factory: pytest.TempPathFactory, ranks: Ranks
) -> dict[str, RunFolder]:
    """A run in each order of samples that nothing befalls."""
    found = {}
    for sample_order in ("native", "megatron"):
        run = phased(files, tmp_path_factory.mktemp(sample_order), "DP2", sample_order)
        assert ranks.run(run, 2) == [0, 0], log_of(run)
        found[sample_order] = run
    return found


def trained(run: RunFolder) -> list[Any]:
    return [row for row in read_rows(run.metrics) if "eval" not in row]


@pytest.mark.parametrize(
    ("sample_order", "save_interval", "kills"),
    [
        ("native", 3, (7, 4)),  # from step 6, where the first phase begins; from 9: the second
        ("native", 4, (8, 5)),  # from step 4; from 8, in the first phase
        ("native", 5, (11, 2)),  # from step 10, in the second phase, twice
        ("megatron", 3, (8, 5)),  # from 6; from 9
    ],
)
def test_killed_and_resumed_equals_untouched(
    files: Path,
    tmp_path: Path,
    ranks: Ranks,
    untouched: dict[str, RunFolder],
    sample_order: str,
    save_interval: int,
    kills: tuple[int, ...],
) -> None:
    whole = untouched[sample_order]
    assert [row["phase"] for row in trained(whole)] == PHASES
    assert len({row["batch_checksum"] for row in trained(whole)}) == len(PHASES)
    broken = phased(files, tmp_path, "DP2", sample_order, save_interval=save_interval)
    for step in kills:
        assert ranks.run(broken, 2, [kill(step)]) != [0, 0]
    assert ranks.run(broken, 2) == [0, 0], log_of(broken)
    assert facts(broken) == facts(whole)
    assert end_of(broken) == end_of(whole)


def test_another_layout_reads_the_same(
    files: Path, tmp_path: Path, ranks: Ranks, untouched: dict[str, RunFolder]
) -> None:
    run = phased(files, tmp_path, "PP2", "native")
    assert ranks.run(run, 2) == [0, 0], log_of(run)
    for key in ("batch_checksum", "phase", "consumed_samples"):
        assert [row[key] for row in trained(run)] == [
            row[key] for row in trained(untouched["native"])
        ]
