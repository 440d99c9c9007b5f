"""The task convert: a run's weights in another engine's format, and back."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.model import test_export
from tests.cli.model.test_export import RUN, make_run, same_logits
from tests.conftest import Project
from trainkit.base.documents import document
from trainkit.base.errors import TrainkitError
from trainkit.base.files import write_json
from trainkit.cli.model.convert import TARGETS, convert
from trainkit.cli.options import ConvertOptions
from trainkit.cli.wrapper import TaskContext
from trainkit.data.indexed.paths import DataFolder
from trainkit.engines.convert import formats
from trainkit.engines.convert.pickles import read_pickle
from trainkit.jobs.resolved import read_job
from trainkit.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("one_rank")

OTHER = "20260101-000001-0000"


def call(project: Project, run_name: str = RUN, **options: Any) -> dict[str, Any]:
    """The task's function, in this process."""
    asked = {"out": str(project.path / "out"), **options}
    task = TaskContext(json=True, dry_run=False, folder=project.path)
    return convert(task, run_name, ConvertOptions(**asked)).document


def refusal(project: Project, run_name: str = RUN, **options: Any) -> TrainkitError:
    with pytest.raises(TrainkitError) as error:
        call(project, run_name, **options)
    return error.value


def engine_run(project: Project, run: RunFolder, engine: str, folder: Path) -> RunFolder:
    """A run of the same job by another engine, which has written `folder`."""
    other = RunFolder(run.path.with_name(OTHER))
    shutil.copytree(folder, other.checkpoints)
    content = json.loads(run.job.read_text())
    content["job"]["engine"] = engine
    other.job.write_text(json.dumps(content))
    return other


def test_the_task_lists_every_format() -> None:
    assert TARGETS == formats.TARGETS


def test_as_a_person_types_it(project: Project) -> None:
    """Relative folder, one document, a word on how the engine begins with it; then again, refused.
    An earlier step holds other weights."""
    make_run(project, "text")
    words = ["convert", "last", "--to", "megatron-lm", "--out", "out/m"]
    made = project.document(*words, "--tensor-parallel-size", "2")
    files = [f"release/mp_rank_{rank:02d}/model_optim_rng.pt" for rank in range(2)]
    files.insert(0, "latest_checkpointed_iteration.txt")
    assert made["schema"] == "convert/1" and made["files"] == files
    assert made["run"] == RUN and made["engine"] == "native" and made["step"] == 10
    assert made["to"] == "megatron-lm" and made["folder"] == str(project.path / "out/m")
    assert made["notes"] == [] and made["dtype"] == "fp32"
    sizes = [(project.path / "out/m" / name).stat().st_size for name in files]
    assert made["bytes"] == sum(sizes)
    error = project.document(*words, exit=3)
    assert "is not empty" in error["problems"][0]["message"]
    said = project.invoke("convert", "last", "--to", "gpt-neox", "--out", "n", "--step", "5")
    assert f"converted step 5 of run {RUN} (native) to gpt-neox in {project.path}/n" in said.stdout
    assert '"finetune": true' in said.stdout
    name = "embedding.word_embeddings.weight"
    content: Any = read_pickle(project.path / "out/m" / files[1])
    other: Any = read_pickle(project.path / "n/global_step0/layer_00-model_00-model_states.pt")
    one = content["model"][name]
    assert not torch.equal(one, other["word_embeddings.weight"][: len(one)])


@pytest.mark.parametrize("engine", ["megatron-lm", "gpt-neox"])
def test_a_run_of_another_engine_becomes_a_hugging_face_folder(
    engine: str, project: Project
) -> None:
    """With the tokenizer of the dataset, and without the vocabulary's padding."""
    run, models = make_run(project, "text")
    rows = models[10].embed_tokens.weight.shape[0]
    manifest = DataFolder(project.path, read_job(run.job).dataset).manifest
    write_json(manifest, document("dataset/1", vocab_size=rows))
    call(project, to=engine, out=str(project.path / "converted"))
    engine_run(project, run, engine, project.path / "converted")
    said = call(project, OTHER, to="hf")
    assert said["engine"] == engine and said["step"] == 0
    assert (project.path / "out/tokenizer.json").is_file()
    same_logits(project.path / "out", models[10])
    assert json.loads((project.path / "out/config.json").read_text())["vocab_size"] == rows


def test_from_one_engine_to_the_other(project: Project) -> None:
    run, models = make_run(project, "random")
    call(project, to="megatron-lm", out=str(project.path / "m"), pipeline_parallel_size=2)
    engine_run(project, run, "megatron-lm", project.path / "m")
    call(project, OTHER, to="gpt-neox", pipeline_parallel_size=0)
    content: Any = read_pickle(project.path / "out/global_step0/mp_rank_00_model_states.pt")
    found = content["module"]["sequential.3.mlp.linear1.weight"]
    assert torch.equal(found, models[10].get_parameter("layers.1.mlp.up.weight"))


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes in the block."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.parametrize("size", [300, 8192])
@pytest.mark.parametrize("to", ["megatron-lm", "gpt-neox"])
def test_a_full_disk_is_named(to: str, size: int, project: Project) -> None:
    make_run(project, "random")
    with full_disk(size), pytest.raises(OSError, match="File too large") as error:
        call(project, to=to)
    assert error.value.filename == str(project.path / "out")
    assert not list(project.path.glob("out*"))


@pytest.mark.parametrize(
    ("task", "module"),
    [
        (lambda project: call(project, to="gpt-neox"), "trainkit.engines.convert.files"),
        (test_export.call, "trainkit.train.huggingface.writing"),
    ],
)
def test_a_signal_to_end_leaves_nothing(
    task: Callable[[Project], object],
    module: str,
    project: Project,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a folder that is as good as whole."""
    make_run(project, "random")

    def killed(temporary: Path, target: Path) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(f"{module}.publish_folder", killed)
    former = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            task(project)
    finally:
        signal.signal(signal.SIGTERM, former)
    assert not list(project.path.glob("out*"))


class TestRefused:
    """Options, places and runs that are not taken."""

    def test_options(self, project: Project) -> None:
        error = refusal(project, to="nemo", out="", dtype="fp8")
        messages = [problem["message"] for problem in error.problems()]
        assert error.exit == 3 and len(messages) == 3
        assert messages[0] == "--to 'nemo' is not one of: hf, megatron-lm, gpt-neox"
        for given in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 0}, {"names": "x"}):
            assert "Hugging Face folder is whole" in str(refusal(project, to="hf", **given))

    def test_before_anything_is_read(self, project: Project) -> None:
        make_run(project, "random")
        (project.path / "out").mkdir()
        (project.path / "out/mine").write_text("kept")
        error = refusal(project, to="hf", step=7)
        assert error.exit == 3 and "is not empty" in str(error)
        assert (project.path / "out/mine").read_text() == "kept"
        assert refusal(project, to="hf", step=7, out=str(project.path / "new")).exit == 16

    def test_a_model_that_the_format_has_not(self, project: Project) -> None:
        path = project.path / "jobs.toml"
        path.write_text(
            path.read_text().replace("[models.tiny]", "[models.tiny]\nfamily='gpt-neox'")
        )
        make_run(project, "random")
        error = refusal(project, to="megatron-lm")
        assert error.exit == 3 and "gpt_j_residual" in str(error)
        assert not (project.path / "out").exists()
        error = refusal(project, to="gpt-neox", pipeline_parallel_size=10**12)
        assert "--pipeline-parallel-size 1000000000000 is not 0 to 2, its layers" in str(error)

    def test_engines_whose_checkpoints_are_not_read(self, project: Project) -> None:
        run, _ = make_run(project, "random")
        (project.path / "nothing").mkdir()
        other = engine_run(project, run, "nemo", project.path / "nothing")
        error = refusal(project, OTHER, to="hf")
        assert error.exit == 3 and "checkpoints of engine 'nemo' are not read" in str(error)
        other.job.write_text(other.job.read_text().replace('"nemo"', '"gpt-neox"'))
        error = refusal(project, OTHER, to="hf")
        assert error.exit == 16 and "finished no checkpoint" in str(error)
