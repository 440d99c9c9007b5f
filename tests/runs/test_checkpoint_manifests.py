"""What makes a folder a checkpoint, which stay, and which samples a step took: by files made by
hand, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import xxhash

from trainkit.base.errors import TrainkitError
from trainkit.base.files import remove, write_json
from trainkit.jobs.schema import CheckpointSettings
from trainkit.runs import checkpoints, retention, sample_windows
from trainkit.runs.checkpoints import (
    DamagedCheckpoint,
    MissingCheckpoint,
    NewerCheckpoint,
    checkpoint_folder,
    files_to_hash,
    newest_valid,
    open_checkpoint,
    record_evaluation,
    set_aside,
    step_of,
    verify,
)
from trainkit.runs.folder import RunFolder
from trainkit.runs.manifest import (
    DTYPE_BYTES,
    MANIFEST,
    DataFile,
    Manifest,
    TensorChunk,
    TensorEntry,
    has_valid_seal,
)
from trainkit.runs.retention import pin, prune, retention_reasons, valid_by_size
from trainkit.runs.sample_windows import SLOTS, SampleWindow, SampleWindowLog, find_sample_window


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "PAUSES", (0.01, 0.02))


def chunk(offset: int, size: int, start: int) -> TensorChunk:
    return TensorChunk(offsets=(offset,), sizes=(size,), file="a.bin", start=start, bytes=4 * size)


def write(folder: Path, step: int, *, loss: float | None = None, **state: Any) -> Path:
    """A checkpoint of one tensor of 20 numbers in two parts."""
    made = checkpoint_folder(folder, step)
    made.mkdir(parents=True)
    content = bytes(range(64)) + bytes(16)
    (made / "a.bin").write_bytes(content)
    files = (DataFile(path="a.bin", bytes=80, xxh128=xxhash.xxh3_128_hexdigest(content)),)
    tensors = {
        "model.w": TensorEntry(
            shape=(20,), dtype="float32", chunks=(chunk(0, 16, 0), chunk(16, 4, 64))
        )
    }
    validation = {} if loss is None else {"valid": loss}
    facts: dict[str, Any] = {
        "layout": {},
        "job": {},
        "versions": {},
        "state": state,
        "validation": validation,
    }
    Manifest(step=step, consumed_samples=8 * step, files=files, tensors=tensors, **facts).write(
        made
    )
    return made


def change(folder: Path, **values: Any) -> None:
    """Without a hash of itself, as versions before wrote it, so that only the change is wrong."""
    document = json.loads((folder / MANIFEST).read_text())
    del document["xxh128"]
    write_json(folder / MANIFEST, document | values)


def test_what_is_whole_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = write(tmp_path, 7, optimizer_steps=7, hysteresis_tracker=-12, evaluation_due=True)
    found = open_checkpoint(made)
    assert (
        found.bytes,
        found.pinned,
        found.manifest.step,
        found.manifest.state["hysteresis_tracker"],
    ) == (80, False, 7, -12)
    assert verify(made) == [] and has_valid_seal((made / MANIFEST).read_bytes())
    record_evaluation(tmp_path, 7, {"valid": 1.5})
    again = open_checkpoint(made).manifest
    assert (again.validation, again.state["evaluation_due"], again.state["optimizer_steps"]) == (
        {"valid": 1.5},
        False,
        7,
    ) and verify(made) == []


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"step": 8}, "its manifest says step 8"),
        ({"state": {"rollbacks": -1}}, "state.rollbacks is -1, which is not a count"),
        ({"state": {"unlogged_nan": 1.5}}, "state.unlogged_nan is 1.5, which is not a count"),
        (
            {"state": {"hysteresis_tracker": True}},
            "state.hysteresis_tracker is True, which is not a whole number",
        ),
        (
            {"files": [{"path": "../a.bin", "bytes": 80, "xxh128": ""}]},
            "'../a.bin' is not a plain file name",
        ),
        ({"files": [{"path": "a.bin", "bytes": 81, "xxh128": ""}]}, "a.bin has 80 bytes, not 81"),
        ({"files": [{"path": "b.bin", "bytes": 80, "xxh128": ""}]}, "b.bin is missing"),
        ({"unknown": 1}, "unknown"),
        ({"xxh128": "0" * 32}, "manifest.json does not have the hash 0000"),
    ],
)
def test_every_wrong_word_of_a_manifest_is_named(
    values: dict[str, Any], words: str, tmp_path: Path
) -> None:
    made = write(tmp_path, 7)
    change(made, **values)
    with pytest.raises(DamagedCheckpoint) as error:
        open_checkpoint(made)
    assert words in error.value.message and isinstance(
        error.value, MissingCheckpoint
    ) == words.endswith("missing")


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([chunk(0, 16, 0)], "do not make up its shape"),
        ([chunk(0, 16, 0), chunk(15, 4, 64)], "parts at [0] and [15] overlap"),
        ([chunk(0, 16, 0), chunk(17, 4, 64)], "part at [17] does not fit"),
        # not where a part may start
        ([chunk(0, 16, 0), chunk(16, 4, 4)], "part at [16] does not fit"),
        ([chunk(0, 16, 64), chunk(16, 4, 0)], "part at [0] does not fit"),  # beyond the file's end
        (
            [chunk(0, 16, 0), chunk(16, 4, 64).model_copy(update={"bytes": 8})],
            "part at [16] does not fit",
        ),
    ],
)
def test_parts_lie_in_the_file_and_cover_the_tensor_once(
    chunks: list[TensorChunk], words: str, tmp_path: Path
) -> None:
    made = write(tmp_path, 7)
    change(
        made,
        tensors={
            "model.w": (
                TensorEntry(shape=(20,), dtype="float32", chunks=tuple(chunks)).model_dump(
                    mode="json"
                )
            )
        },
    )
    assert words in "; ".join(verify(made, "size"))


def test_parts_of_a_table_may_touch(tmp_path: Path) -> None:
    made = write(tmp_path, 7)
    boxes = [((0, 0), (2, 3)), ((0, 3), (2, 2)), ((2, 0), (2, 5))]
    chunks = [
        TensorChunk(offsets=at, sizes=size, file="a.bin", start=0, bytes=4 * size[0] * size[1])
        for at, size in boxes
    ]
    change(
        made,
        tensors={
            "model.w": (
                TensorEntry(shape=(4, 5), dtype="float32", chunks=tuple(chunks)).model_dump(
                    mode="json"
                )
            )
        },
    )
    assert verify(made, "size") == []


def test_a_form_that_is_newer_is_no_damage(tmp_path: Path) -> None:
    made = write(tmp_path, 7)
    body = (made / MANIFEST).read_bytes().rpartition(b',"xxh128"')[0] + b',"more":1'
    (made / MANIFEST).write_bytes(
        body + f',"xxh128":"{xxhash.xxh3_128_hexdigest(body)}"}}'.encode()
    )
    with pytest.raises(NewerCheckpoint):
        open_checkpoint(made)


def test_hashes_are_compared_as_asked(tmp_path: Path) -> None:
    made = write(tmp_path, 7)
    (made / "a.bin").write_bytes(bytes(80))
    assert verify(made, "size") == [] and "a.bin does not have the hash" in verify(made)[0]
    manifest = open_checkpoint(made).manifest
    many = manifest.model_copy(
        update={"files": tuple(DataFile(path=f"{n}", bytes=0, xxh128="") for n in range(17))}
    )
    assert [len(files_to_hash(many, how)) for how in ("size", "sample", "full")] == [0, 3, 17]
    assert files_to_hash(many, "sample") == files_to_hash(many, "sample")


def test_the_newest_whole_one_is_taken_and_newer_ones_are_named(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "nowhere", pytest.fail) is None
    for step in (3, 9, 12):
        write(tmp_path, step)
    (tmp_path / "step-00000015.1a2b3c4d.tmp").mkdir()
    (checkpoint_folder(tmp_path, 12) / "a.bin").unlink()
    said: list[str] = []
    found = newest_valid(tmp_path, said.append)
    assert (
        found is not None
        and found.manifest.step == 9
        and len(said) == 1
        and "a.bin is missing" in said[0]
    )
    aside = set_aside(checkpoint_folder(tmp_path, 12))
    assert (
        step_of(aside) == 12
        and aside.name.endswith(".damaged")
        and [c.manifest.step for c in valid_by_size(tmp_path)] == [3, 9]
    )
    for step in (3, 9):
        (checkpoint_folder(tmp_path, step) / MANIFEST).write_text("{")
    with pytest.raises(TrainkitError, match="none of the 2 checkpoints") as error:
        newest_valid(tmp_path, said.append)
    assert error.value.exit == 16


def test_why_each_stays_and_that_the_others_go(tmp_path: Path) -> None:
    losses = {2: 5.0, 4: 1.0, 5: 2.0, 6: None, 8: 3.0, 9: None, 11: None}
    for step, loss in losses.items():
        write(tmp_path, step, loss=loss)
    pin(tmp_path, 2, pinned=True)
    keep = CheckpointSettings(keep_last=2, keep_every=5, keep_best=1)
    reasons = retention_reasons(valid_by_size(tmp_path), keep, 9)
    assert reasons == {
        2: ["pinned"],
        4: ["validation loss 1.0000"],
        5: ["every 5"],
        6: [],
        8: ["newest 2"],
        9: ["newest 2"],
        11: ["after step 9"],
    }
    assert prune(tmp_path, keep, 9) == [6] and [
        c.manifest.step for c in valid_by_size(tmp_path)
    ] == [2, 4, 5, 8, 9, 11]
    # the one that was saved last is not there: others have gone on
    assert prune(tmp_path, keep, 10) == []
    pin(tmp_path, 2, pinned=False)
    assert prune(tmp_path, keep, 9) == [2]
    with pytest.raises(TrainkitError, match="there is no checkpoint of step 3") as error:
        pin(tmp_path, 3, pinned=True)
    assert error.value.exit == 16


def test_the_ring_of_windows_knows_the_last_steps_and_the_metrics_the_others(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)
    ring = SampleWindowLog(run)
    for step in (1, 2, SLOTS + 1):
        ring.note(SampleWindow(step, 8 * step - 8, 8))
    ring.close()
    assert sample_windows.windows_path(run).stat().st_size == 3 * sample_windows.RECORD.size
    assert find_sample_window(run, 2) == (2, 8, 8) and find_sample_window(run, SLOTS + 1) == (
        SLOTS + 1,
        8 * SLOTS,
        8,
    )
    # overwritten; never made
    assert find_sample_window(run, 1) is None and find_sample_window(run, 3) is None
    run.metrics.write_text(
        '{"step": 1, "consumed_samples": 8, "global_batch_size": 8}\n{"step": 1, "eval": "valid"}\n'
    )
    assert find_sample_window(run, 1) == (1, 0, 8)


def test_what_cannot_be_deleted_is_an_error_and_the_others_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in range(1, 6):
        write(tmp_path, step)
    tried: list[str] = []

    def remove_some(folder: Path) -> None:
        tried.append(folder.name[:13])
        if step_of(folder) in (2, 4):
            raise OSError(5, "Input/output error", str(folder))
        remove(folder)

    monkeypatch.setattr(retention, "remove", remove_some)
    with pytest.raises(OSError, match="step-00000002"):
        prune(tmp_path, CheckpointSettings(keep_last=1), 5)
    assert tried == [f"step-0000000{step}" for step in (1, 2, 3, 4)]
    left = sorted(path.name[:13] for path in tmp_path.iterdir())
    assert left == ["step-00000002", "step-00000004", "step-00000005"]
    assert [c.manifest.step for c in valid_by_size(tmp_path)] == [5]


def test_one_that_is_pinned_at_the_last_moment_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    reasons = retention_reasons(valid_by_size(tmp_path), CheckpointSettings(keep_last=1), 2)
    assert reasons == {1: [], 2: ["newest 1"]}

    def decide_and_pin(*_: object) -> dict[int, list[str]]:
        pin(tmp_path, 1, pinned=True)
        return reasons

    monkeypatch.setattr(retention, "retention_reasons", decide_and_pin)
    assert prune(tmp_path, CheckpointSettings(keep_last=1), 2) == []
    assert [c.manifest.step for c in valid_by_size(tmp_path)] == [1, 2]


def test_which_steps_there_are_is_said_where_one_is_missing(tmp_path: Path) -> None:
    with pytest.raises(TrainkitError) as none:
        pin(tmp_path, 3, pinned=True)
    assert none.value.hint == "those of steps: none"
    for step in (2, 10):
        write(tmp_path, step)
    with pytest.raises(TrainkitError) as some:
        pin(tmp_path, 3, pinned=True)
    assert some.value.hint == "those of steps: 2, 10"


def test_bytes_of_each_dtype() -> None:
    widths = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8}
    assert widths == DTYPE_BYTES
