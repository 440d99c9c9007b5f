"""hf:NAME is fetched from a hub: here a server of this machine with the hub's paths."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.conftest import Project
from tests.train.huggingface.hub_server import (
    FIRST,
    MODEL,
    SECOND,
    WANTED,
    Hub,
    Silent,
    fetch,
    job,
    need_of,
)
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.runs.checkpoints import checkpoint_folder, open_checkpoint
from trainkit.stages import weights as stage
from trainkit.stages.execute import stamps_folder, update_stage
from trainkit.stages.stamps import check_freshness
from trainkit.stages.unit_process import execute_locally
from trainkit.stages.weights import WeightsStage
from trainkit.train.checkpoint.save_load import load as load_checkpoint
from trainkit.train.huggingface import check_weights, weights_folder
from trainkit.train.huggingface.names import table


def test_the_stage_fetches_once_and_keeps_the_commit(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    """A real unit process; then the branch moves on the hub, and nothing changes here until
    --force."""
    hub.put("org/tiny", model_files)
    asked = job(tmp_path, "hf:org/tiny", hub)
    stamps, reporter = stamps_folder(tmp_path, "weights"), Silent()
    with pytest.raises(ConfigError, match="was not fetched") as error:
        weights_folder(asked)
    assert "prep-data --job tiny" in error.value.list[0].hint
    verdict = update_stage(need_of(asked), tmp_path, execute_locally, reporter)
    assert not verdict.fresh and verdict.because == "it was never fetched"
    folder = weights_folder(asked)
    assert folder == tmp_path / "hub/org--tiny" / FIRST
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: model_files[name] for name in WANTED
    }
    assert check_weights(folder, MODEL, 53) == [] and reporter.fractions[-1] == 1.0
    hub.put("org/tiny", model_files | {"tokenizer.json": b"newer"}, SECOND)
    asked_before = len(hub.asked)
    verdict = update_stage(need_of(asked), tmp_path, execute_locally, reporter)
    assert (
        verdict.fresh
        and "main was 111111111111" in verdict.because
        and len(hub.asked) == asked_before
    )
    assert weights_folder(asked) == folder
    update_stage(need_of(asked), tmp_path, execute_locally, reporter, force=True)
    assert weights_folder(asked).name == SECOND and folder.is_dir()
    assert check_freshness(need_of(asked), stamps).fresh


def test_what_is_lost_is_fetched_again_and_only_that(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("tiny", model_files)
    asked = job(tmp_path, "hf:tiny", hub)
    update_stage(need_of(asked), tmp_path, execute_locally, Silent())
    folder = weights_folder(asked)
    for damage in ("gone", "cut"):
        lost = folder / "model-00002-of-00002.safetensors"
        lost.unlink() if damage == "gone" else lost.write_bytes(b"half")
        hub.asked.clear()
        verdict = update_stage(need_of(asked), tmp_path, execute_locally, Silent())
        assert not verdict.fresh and f"{lost} is missing or cut off" in verdict.because
        assert hub.downloads() == [lost.name] and lost.read_bytes() == model_files[lost.name]
    moved = asked.model_copy(
        update={"cluster": asked.cluster.model_copy(update={"hub_endpoint": hub.url + "/"})}
    )
    verdict = check_freshness(need_of(moved), stamps_folder(tmp_path, "weights"))
    assert not verdict.fresh and "hub_endpoint changed from" in verdict.because
    (record,) = folder.parent.glob("*.json")
    kept = record.read_bytes()
    record.write_bytes(kept[:9])
    verdict = check_freshness(need_of(asked), stamps_folder(tmp_path, "weights"))
    assert not verdict.fresh and str(record) in verdict.because
    record.write_bytes(kept)
    shutil.rmtree(folder)
    assert "missing" in update_stage(need_of(asked), tmp_path, execute_locally, Silent()).because
    assert {p.name for p in weights_folder(asked).iterdir()} == WANTED


def test_a_cut_connection_is_taken_up_where_it_broke(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the last whole block of the library's, which are of 10 MB otherwise."""
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 250)
    hub.put("tiny", model_files)
    hub.cut["model-00001-of-00002.safetensors"] = 1000
    asked = job(tmp_path, "hf:tiny", hub)
    fetch(asked)
    ranges = [
        r
        for method, path, r, _ in hub.asked
        if method == "GET" and path.endswith("model-00001-of-00002.safetensors")
    ]
    assert ranges == [None, "bytes=1000-"]
    assert check_weights(weights_folder(asked), MODEL, 53) == []


def test_an_interrupted_fetch_goes_on_shard_by_shard(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    lacking = {
        name: content
        for name, content in model_files.items()
        if name != "model-00002-of-00002.safetensors"
    }
    hub.put("tiny", model_files)
    asked = job(tmp_path, "hf:tiny", hub)
    spec = stage.WeightsSpec.from_json(need_of(asked).units[0].spec)
    fetching = stage._Fetch(spec, stage._Hub(spec, None), lambda done, total: None)
    original = fetching.hub.get

    def breaks(file: str, commit: str, folder: Path) -> None:
        if file == "model-00002-of-00002.safetensors":
            raise KeyboardInterrupt
        original(file, commit, folder)

    fetching.hub.get = breaks  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        fetching.run()
    part = tmp_path / "hub/tiny" / f"{FIRST}.part"
    (part / ".cache/huggingface").mkdir(parents=True, exist_ok=True)
    (part / ".cache/huggingface/half.incomplete").write_bytes(b"x" * 100)
    with pytest.raises(ConfigError, match="was not fetched"):
        weights_folder(asked)
    hub.asked.clear()
    fetch(asked)
    assert hub.downloads() == ["model-00002-of-00002.safetensors"] and lacking
    assert {p.name for p in weights_folder(asked).iterdir()} == WANTED and not part.exists()


def test_a_file_that_is_not_what_the_hub_says(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("tiny", model_files)
    asked = job(tmp_path, "hf:tiny", hub)
    spec = stage.WeightsSpec.from_json(need_of(asked).units[0].spec)
    api = stage._Hub(spec, None)
    original = api.get

    def spoils(file: str, commit: str, folder: Path) -> None:
        original(file, commit, folder)
        if file == "model-00001-of-00002.safetensors":
            content = bytearray((folder / file).read_bytes())
            content[-1] ^= 1
            (folder / file).write_bytes(content)

    api.get = spoils  # type: ignore[method-assign]
    with pytest.raises(
        TrainkitError, match=r"model-00001-of-00002.safetensors of hf:tiny is not what the hub says"
    ) as error:
        stage._Fetch(spec, api, lambda done, total: None).run()
    assert error.value.exit == 6 and not (tmp_path / "hub/tiny" / FIRST).exists()
    fetch(asked)  # the spoiled one is gone, so it comes again
    assert check_weights(weights_folder(asked), MODEL, 53) == []


def test_a_revision_with_a_slash_and_a_commit(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("org/tiny.20b", model_files, SECOND, "refs/pr/1")
    for revision in ("refs/pr/1", SECOND):
        asked = job(tmp_path, f"hf:org/tiny.20b@{revision}", hub)
        assert fetch(asked) == {"commit": SECOND} and weights_folder(asked).name == SECOND
    assert len(hub.downloads()) == len(WANTED)  # the second time all is there
    assert (tmp_path / "hub/org--tiny.20b/refs%2Fpr%2F1.json").is_file()


def test_a_folder_is_looked_at_and_needs_nothing(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.put("tiny", model_files)
    fetch(job(tmp_path, "hf:tiny", hub))
    folder = weights_folder(job(tmp_path, "hf:tiny", hub))
    asked = job(tmp_path / "elsewhere", str(folder))
    assert WeightsStage().needs(asked, tmp_path) == [] and weights_folder(asked) == folder
    with pytest.raises(ConfigError, match="n_layer is 2 there, 4 for this job") as error:
        WeightsStage().needs(
            job(tmp_path, str(folder), model=MODEL.model_copy(update={"num_layers": 4})), tmp_path
        )
    assert error.value.exit == 3
    with pytest.raises(ConfigError, match="no such folder"):
        WeightsStage().needs(job(tmp_path, str(tmp_path / "nowhere")), tmp_path)
    assert (
        WeightsStage().needs(job(tmp_path, "x").model_copy(update={"init_from": None}), tmp_path)
        == []
    )


def test_training_begins_with_what_the_hub_has(
    hub: Hub, model_files: dict[str, bytes], project: Project
) -> None:
    """The task itself: fetched before any rank starts, read by two ranks; one step at rate 0
    later the checkpoint holds the hub's weights."""
    hub.put("org/tiny", model_files)
    path = project.path / "jobs.toml"
    path.write_text(
        path.read_text().replace("[clusters.here]", f'[clusters.here]\nhub_endpoint = "{hub.url}"')
        + """
[models.published]
num_layers = 2
hidden_size = 24
num_attention_heads = 3
seq_length = 16
vocab_size = 53
[jobs.on]
extends = "random"
model = "published"
init_from = "hf:org/tiny"
training = { train_iters = 1, lr = 0.0, eval_iters = 0 }
"""
    )
    refused = project.document("train", "on", "--no-stages", exit=5)
    assert (
        "weights org--tiny--main: stale because it was never fetched"
        in refused["problems"][0]["message"]
    )
    assert project.document("train", "on")["state"] == "succeeded"
    (run,) = project.runs()
    saved = open_checkpoint(checkpoint_folder(run / "checkpoints", 1))
    tensors = {
        name: torch.zeros(entry.shape)
        for name, entry in saved.manifest.tensors.items()
        if name.startswith("model.")
    }
    load_checkpoint(saved, tensors)
    second = json.loads(model_files["model.safetensors.index.json"])["weight_map"]
    for name, entry in table(MODEL, 53).items():
        value = 2.0 if second[entry.pieces[0].source].startswith("model-00002") else 1.0
        assert torch.equal(tensors[f"model.{name}"], torch.full(entry.shape, value))


def test_relative_folders_are_the_projects(tmp_path: Path) -> None:
    from trainkit.jobs.load import load

    text = """
[models.m]
num_layers = 1
hidden_size = 8
num_attention_heads = 1
seq_length = 8
vocab_size = 9
[clusters.here]
hub_endpoint = "https://hub.example"
[jobs.a]
cluster = "here"
model = "m"
dataset = "mock"
init_from = "published/m"
training = { train_iters = 1, lr = 1.0 }
[jobs.b]
extends = "a"
init_from = "hf:org/m@main"
"""
    (tmp_path / "jobs.toml").write_text(text)
    jobs = load(tmp_path)
    assert jobs.resolve("a").job.init_from == str(tmp_path / "published/m")
    assert (
        jobs.resolve("b").job.init_from == "hf:org/m@main"
        and jobs.resolve("b").job.cluster.hub_endpoint == "https://hub.example"
    )
    (tmp_path / "jobs.toml").write_text(
        text.replace("https://hub.example", "https://user:password@hub.example")
    )
    # a password would be written into records
    with pytest.raises(ConfigError, match="hub_endpoint"):
        load(tmp_path).resolve("b")
