"""What is believed of a rank's copies in memory, and what is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from tests.distributed import ROOT
from tests.torture.test_small_disk import APART
from tests.train.support import new_run, tiny_job
from trainkit.base.errors import ConfigError
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.train.checkpoint.memory import MemoryCopies
from trainkit.train.checkpoint.save_load import CheckpointMetadata
from trainkit.train.parallel.data_parallel import World
from trainkit.train.parallel.shards import Shards

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that an agent would have made."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setenv("TRAINKIT_MEMORY_FOLDER", str(folder))
    return folder


def job_in(folder: Path, **parallelism: Any) -> Job:
    job = tiny_job(1, folder)
    keep = job.checkpoint.model_copy(update={"memory_interval": 1})
    layout = job.parallelism.model_copy(update=parallelism)
    return job.model_copy(update={"checkpoint": keep, "parallelism": layout})


def tensors_of(step: int, rows: int = 3) -> dict[str, Tensor]:
    """Shards in two parts, a plain tensor, one of another dtype, one without elements."""
    boxes: dict[tuple[int, ...], Tensor] = {
        (0, 0): torch.full((rows, 5), float(step)),
        (7, 0): torch.full((2, 5), step + 0.5),
    }
    return {
        "model.w": Shards(boxes, (9, 5), torch.float32),
        "model.b": torch.full((7,), step, dtype=torch.bfloat16),
        "count": torch.full((3,), step, dtype=torch.int64),
        "none": torch.empty(0),
    }


def values(tensors: dict[str, Tensor]) -> list[list[Any]]:
    shards = tensors["model.w"]
    assert isinstance(shards, Shards)
    parts = [*shards.parts.values(), tensors["model.b"], tensors["count"]]
    return [part.flatten().tolist() for part in parts]


class Rank:
    """One that trains, in as far as it fills its tensors with the number of its step."""

    def __init__(self, folder: Path, job: Job | None = None, run: RunFolder | None = None) -> None:
        job = job or job_in(folder)
        self.tensors = tensors_of(-1)
        self.copies = MemoryCopies(job, run or new_run(job), World(0, 1), self.tensors)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            for name, tensor in tensors_of(step).items():
                mine = self.tensors[name]
                if isinstance(tensor, Shards) and isinstance(mine, Shards):
                    for at, part in tensor.parts.items():
                        mine.parts[at].copy_(part)
                else:
                    mine.copy_(tensor)
            self.copies.copy(CheckpointMetadata(step, 8 * step, state={"optimizer_steps": step}))
            self.copies.wait_for_copying()

    def close(self) -> None:
        self.copies.close()

    def load(self, least: int = -1, published: int = -1) -> int | None:
        """The step that it goes on from; its tensors and numbers are of that step."""
        assert self.copies.find(published) == published
        found = self.copies.load(least)
        if found is None:
            return None
        assert values(self.tensors) == values(tensors_of(found.step))
        assert found.state == {"optimizer_steps": found.step}
        assert found.consumed_samples == 8 * found.step
        return found.step


def trained(folder: Path, steps: int) -> Path:
    """The file of a rank that has made so many steps."""
    rank = Rank(folder)
    rank.copies.begin_timeline()
    rank.train(1, steps)
    rank.close()
    return folder / "memory" / "0.state"


def test_the_newest_copy_is_loaded_as_it_was(tmp_path: Path) -> None:
    assert Rank(tmp_path).load() is None
    trained(tmp_path, 4)
    assert Rank(tmp_path).load() == 4
    assert Rank(tmp_path).load(least=4, published=3) == 4
    assert Rank(tmp_path).load(least=5) is None


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(at=st.floats(0, 1), bit=st.integers(0, 7))
def test_a_flipped_bit_is_never_believed(
    tmp_path_factory: pytest.TempPathFactory, at: float, bit: int
) -> None:
    """Wherever it is: the older copy is taken, or the newer one where the bit was in the older or
    in neither. `load` compares every value."""
    folder = tmp_path_factory.mktemp("flipped")
    (folder / "memory").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRAINKIT_MEMORY_FOLDER", str(folder / "memory"))
        path = trained(folder, 3)
        content = bytearray(path.read_bytes())
        content[int(at * (len(content) - 1))] ^= 1 << bit
        path.write_bytes(content)
        assert Rank(folder).load() in (2, 3)


@pytest.mark.parametrize("part", ["form", "step", "length", "hash", "description", "data"])
def test_a_torn_copy_leaves_the_older_one(part: str, tmp_path: Path) -> None:
    path = trained(tmp_path, 3)
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    # steps 1 and 3 were copied to the first slot
    at = {"form": 0, "step": 8, "length": 16, "hash": 24, "description": 60, "data": half - 4096}
    content[at[part]] ^= 1
    path.write_bytes(content)
    assert Rank(tmp_path).load() == 2
    content[half + at[part]] ^= 1
    path.write_bytes(content)
    assert Rank(tmp_path).load() is None


def test_another_run_or_layout_is_not_ours(tmp_path: Path) -> None:
    trained(tmp_path, 3)
    job = job_in(tmp_path)
    other = RunFolder(tmp_path / "runs/tiny/two")
    other.path.mkdir()
    assert Rank(tmp_path, run=other).load() is None
    assert Rank(tmp_path, job_in(tmp_path, zero_stage=3)).load() is None
    assert Rank(tmp_path, job).load() == 3
    larger = MemoryCopies(job, new_run(job), World(0, 1), tensors_of(0, rows=4000))
    assert larger.find(-1) == -1 and larger.load(-1) is None


def test_what_was_not_gone_on_from_is_forgotten(tmp_path: Path) -> None:
    """A checkpoint was newer, or steps were rolled back: its copies are of another past."""
    trained(tmp_path, 3)
    before = (tmp_path / "memory/0.state").read_bytes()
    rank = Rank(tmp_path)
    assert rank.load(least=4) is None
    rank.copies.begin_timeline()
    assert Rank(tmp_path).load() is None
    # as on a host that did not take part, and comes back
    (tmp_path / "memory/0.state").write_bytes(before)
    assert Rank(tmp_path).load() is None


def test_copies_go_on_beside_the_one_that_was_loaded(tmp_path: Path) -> None:
    """The next copy must not overwrite it: a kill would leave none."""
    trained(tmp_path, 3)
    rank = Rank(tmp_path)
    assert rank.load() == 3
    rank.train(4, 4)
    rank.close()
    path = tmp_path / "memory/0.state"
    content = bytearray(path.read_bytes())
    content[len(content) // 2 + 8] ^= 1  # the step of 4, in the second slot
    path.write_bytes(content)
    assert Rank(tmp_path).load() == 3


def test_steps_made_another_time_are_not_mixed(tmp_path: Path) -> None:
    """A host comes back with a copy of step 4, which the others made again from 3."""
    path = trained(tmp_path, 4)
    before = path.read_bytes()
    content = bytearray(before)
    content[len(content) // 2 + 8] ^= 1  # step 4 is in the second slot
    path.write_bytes(content)
    assert Rank(tmp_path).load() == 3
    path.write_bytes(before)
    assert Rank(tmp_path).load() == 3


def test_ranks_that_no_agent_started_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRAINKIT_MEMORY_FOLDER")
    with pytest.raises(ConfigError, match="memory_interval"):
        Rank(tmp_path)


def test_a_small_tmpfs_is_refused_before_the_start(tmp_path: Path) -> None:
    """With the sizes, and not by SIGBUS in the first copy."""
    mount = 'mount -t tmpfs -o size=32k small "$0" && exec "$@"'
    small = tmp_path / "small"
    small.mkdir()
    there = [*APART, "sh", "-c", mount, str(small)]
    if subprocess.run([*there, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no mount namespaces here")
    code = (
        "from pathlib import Path; from tests.train.checkpoint.test_memory_slots import Rank;"
        f" Rank(Path({str(tmp_path)!r}))"
    )
    done = subprocess.run(
        [*there, sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TRAINKIT_MEMORY_FOLDER": str(small)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    said = done.stderr
    assert "rank 0 needs 0." in said and "No space left on device" in said, said
    assert "GB free" in said and str(small) in said and "the 1 ranks of its node" in said, said
