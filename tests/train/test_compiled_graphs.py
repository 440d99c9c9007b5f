"""Graphs that were compiled before: taken where they are those of this job and machine, and else
left with the reason."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import sha256_file
from trainkit.engines.registry import refuse_unlaunchable
from trainkit.jobs.load import load
from trainkit.jobs.schema import Job
from trainkit.launch.containers.stages import stage_box
from trainkit.stages.execute import stamps_folder
from trainkit.stages.precompile import PrecompileStage, prune
from trainkit.stages.stamps import check_freshness
from trainkit.train import compiled_graphs
from trainkit.train.compiled_graphs import (
    VARIABLE,
    GraphFiles,
    graph_fields,
    keep_cache_private,
    machine_fields,
    node_folder,
    pack,
    prepare_to_compile,
    take,
)
from trainkit.train.rehearsal import compile_worker

JOBS = """
[clusters.here]
device = "cpu"
root = "ROOT"

[models.small]
family = "llama"
num_layers = 2
hidden_size = 32
num_attention_heads = 4
seq_length = 16
vocab_size = 64

[jobs.small]
cluster = "here"
model = "small"
dataset = "mock"
precompile = true
training = { train_iters = 2, lr = 1e-3, compile = true }
"""


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A job whose nodes unpack below the test's folder."""
    (tmp_path / "node").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "node"))
    monkeypatch.setenv(VARIABLE, "before")
    return job_of(tmp_path)


def job_of(folder: Path, *sets: str) -> Job:
    (folder / "jobs.toml").write_text(JOBS.replace("ROOT", str(folder)))
    return load(folder).resolve("small", sets).job


def make(job: Job, folder: Path) -> GraphFiles:
    """Graphs of a job: one file, which torch never reads here."""
    made = folder / "made"
    (made / "fxgraph").mkdir(parents=True)
    (made / "fxgraph" / "graph").write_text("a graph")
    fields = {**graph_fields(job), **machine_fields(job)}
    pack(made, GraphFiles.of(job), fields, seconds=1.0, ranks=[])
    return GraphFiles.of(job)


def test_a_node_unpacks_them_once_where_they_were_made(job: Job, tmp_path: Path) -> None:
    make(job, tmp_path)
    assert take(job) == ""
    folder = node_folder(graph_fields(job))
    assert os.environ[VARIABLE] == str(folder)
    assert (folder / "fxgraph" / "graph").read_text() == "a graph"
    (folder / "more").write_text("compiled by a rank")
    assert take(job) == ""
    assert (folder / "more").exists()


def test_what_a_node_has_damaged_is_unpacked_again(job: Job, tmp_path: Path) -> None:
    make(job, tmp_path)
    assert take(job) == ""
    graph = node_folder(graph_fields(job)) / "fxgraph" / "graph"
    for damage in (lambda: graph.write_text("another graph"), graph.unlink):
        damage()
        assert take(job) == ""
        assert graph.read_text() == "a graph"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("model.hidden_size=64", "model.hidden_size was 32 and is 64"),
        ("training.micro_batch_size=2", "training.micro_batch_size was 1 and is 2"),
        ('training.precision="bf16"', "training.precision was 'fp32' and is 'bf16'"),
        ("parallelism.zero_stage=3", "zero_stage was 1 and is 3"),
        ("training.deterministic=true", "training.deterministic was False and is True"),
        ("nodes=2", "data_parallel_size was 1 and is 2"),
        ('env.TORCHINDUCTOR_X="1"', "env.TORCHINDUCTOR_X was None and is '1'"),
    ],
)
def test_a_difference_is_named(change: str, words: str, job: Job, tmp_path: Path) -> None:
    make(job, tmp_path)
    other = job_of(tmp_path, change)
    assert words in take(other)
    assert os.environ[VARIABLE] == "before"


@pytest.mark.parametrize(
    ("what", "other", "words"),
    [
        ("machine_fields", lambda job: {"capability": "9.0"}, ("capability was", "is '9.0'")),
        ("_version", lambda package: f"99 of {package}", ("torch was", "is '99 of torch'")),
        ("_processor", lambda: "another", ("processor was", "is 'another'")),
        ("_code", lambda: "changed", ("code was", "is 'changed'")),
    ],
)
def test_another_machine_torch_or_code_is_named(
    what: str,
    other: Any,
    words: tuple[str, str],
    job: Job,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make(job, tmp_path)
    monkeypatch.setattr(compiled_graphs, what, other)
    why = take(job)
    assert words[0] in why and words[1] in why


def test_a_field_that_changes_makes_another_unit(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the stage would find its unit done, and say that it is stale for ever."""
    (before,) = PrecompileStage().needs(job, tmp_path)
    monkeypatch.setattr(compiled_graphs, "_version", lambda package: f"99 of {package}")
    (after,) = PrecompileStage().needs(job, tmp_path)
    assert before.units[0].spec != after.units[0].spec


def test_what_only_the_compiling_process_had_is_named(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_X", "1")
        make(job, tmp_path)
    assert "env.TORCHINDUCTOR_X was '1' and is None" in take(job)


@pytest.mark.parametrize("there", ["nothing", "ours", "a link", "another user's"])
def test_what_torch_compiles_lies_where_nobody_else_can_write(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder in /tmp has a name that another user can take first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    keep_cache_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    place = tmp_path / f"trainkit-compiled-{os.getuid()}"
    if there == "a link":
        (tmp_path / "elsewhere").mkdir()
        place.symlink_to(tmp_path / "elsewhere")
    elif there != "nothing":
        place.mkdir()
        place.chmod(0o777)
    if there == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    keep_cache_private()
    taken = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).parent
    assert (taken == place) == (there in ("nothing", "ours"))
    assert taken.stat().st_mode & 0o777 == 0o700 and not taken.is_symlink()
    assert ("WARNING: compiled code is kept in" in capsys.readouterr().err) == (taken != place)


def test_gpus_without_a_c_compiler_are_refused(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would miss it at its first launch, after everything has been loaded."""
    monkeypatch.setenv("CC", "/no/such/cc")
    prepare_to_compile(job)  # on CPUs Triton compiles nothing
    device = ("cluster.device=cuda", "cluster.gpus_per_node=1", 'training.precision="bf16"')
    with pytest.raises(TrainkitError, match=r"compile: .*no C compiler is here") as refused:
        prepare_to_compile(job_of(tmp_path, *device))
    assert refused.value.exit is Exit.HEALTH


def test_the_number_of_threads_makes_another_unit(job: Job, tmp_path: Path) -> None:
    (before,) = PrecompileStage().needs(job, tmp_path)
    (after,) = PrecompileStage().needs(job_of(tmp_path, 'env.OMP_NUM_THREADS="3"'), tmp_path)
    assert before.settings != after.settings


NOTHING = """
from unittest import mock
from trainkit.base.worker import run_unit
from trainkit.train.rehearsal import compile_worker

with mock.patch.object(compile_worker, "_compile", lambda *args: []):
    run_unit(compile_worker.work)
"""


def test_what_compiles_has_the_environment_of_ranks(job: Job, tmp_path: Path) -> None:
    """Before torch reads it, with the cores of the machine that it is on."""
    own = job_of(tmp_path, 'env.ATEN_CPU_CAPABILITY="default"')
    (need,) = PrecompileStage().needs(own, tmp_path)
    (tmp_path / "spec.json").write_text(json.dumps(need.units[0].spec))
    subprocess.run(
        [sys.executable, "-c", NOTHING, str(tmp_path / "spec.json")],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "77", "TMPDIR": str(tmp_path / "node")},
    )
    fields = json.loads(GraphFiles.of(own).record.read_text())["fields"]
    cores = str(len(os.sched_getaffinity(0)))
    assert (fields["env.OMP_NUM_THREADS"], fields["capability"]) == (cores, "DEFAULT")


def test_a_variable_that_the_compiling_machine_lacks_is_named(job: Job, tmp_path: Path) -> None:
    own = job_of(tmp_path, 'env.X="${node:NOT_HERE}"')
    (need,) = PrecompileStage().needs(own, tmp_path)
    with pytest.raises(TrainkitError, match="which compiles: NOT_HERE"):
        compile_worker.work(need.units[0].spec, lambda done, total: None)


def pack_much(job_folder: str) -> None:
    """In a process of its own, which is killed."""
    folder = Path(job_folder)
    job = job_of(folder)
    fields = {**graph_fields(job), **machine_fields(job)}
    pack(folder / "made", GraphFiles.of(job), fields, seconds=1.0, ranks=[])


@pytest.mark.parametrize("seen", ["graphs.tar.tmp-*", "graphs.tar", "graphs.json"])
def test_a_packer_killed_leaves_nothing_half(seen: str, job: Job, tmp_path: Path) -> None:
    made = tmp_path / "made"
    (made / "fxgraph").mkdir(parents=True)
    for number in range(20):
        (made / "fxgraph" / str(number)).write_bytes(os.urandom(2**20))
    files = GraphFiles.of(job)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            pack_much(str(tmp_path))
        os._exit(0)
    while not list(files.folder.glob(seen)) and os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    why = take(job)
    assert why == "" or "invoke precompile small makes them" in why
    pack_much(str(tmp_path))
    assert take(job) == ""
    assert sorted(path.name for path in files.folder.iterdir()) == ["graphs.json", "graphs.tar"]
    for path in (made / "fxgraph").iterdir():
        unpacked = node_folder(graph_fields(job)) / "fxgraph" / path.name
        assert unpacked.read_bytes() == path.read_bytes()


def test_a_damaged_archive_is_a_miss(job: Job, tmp_path: Path) -> None:
    assert "invoke precompile small makes them" in take(job)
    files = make(job, tmp_path)
    content = bytearray(files.archive.read_bytes())
    content[700] ^= 1
    files.archive.write_bytes(content)
    assert f"{files.archive} is damaged" in take(job)
    files.archive.unlink()
    assert "cannot be unpacked" in take(job)
    assert os.environ[VARIABLE] == "before"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("../outside", tarfile.REGTYPE), ("/outside", tarfile.REGTYPE), ("link", tarfile.SYMTYPE)],
)
def test_an_archive_with_more_than_files_is_a_miss(
    name: str, kind: bytes, job: Job, tmp_path: Path
) -> None:
    """Before 3.11.4 tarfile looks at nothing."""
    files = make(job, tmp_path)
    with tarfile.open(files.archive, "a") as archive:
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname = kind, "/etc"
        archive.addfile(entry)
    record = json.loads(files.record.read_text())
    record["sha256"] = sha256_file(files.archive)
    files.record.write_text(json.dumps(record))
    assert f"{name!r} has no place in it" in take(job)
    assert not (tmp_path / "node" / "outside").exists()


def test_a_node_without_room_for_them_is_a_miss(job: Job, tmp_path: Path) -> None:
    make(job, tmp_path)
    parent = node_folder(graph_fields(job)).parent
    parent.write_text("no folder")
    assert "cannot be unpacked" in take(job)
    assert os.environ[VARIABLE] == "before"


def test_the_stage_says_why(job: Job, tmp_path: Path) -> None:
    """And nothing of it is there for a job that does not ask, or has nothing to compile."""
    stage = PrecompileStage()
    stamps = stamps_folder(tmp_path, stage.name)
    (need,) = stage.needs(job, stamps)
    assert not check_freshness(need, stamps).fresh
    assert stage.needs(job_of(tmp_path, "precompile=false"), stamps) == []
    with pytest.raises(ConfigError, match="nothing would be compiled"):
        refuse_unlaunchable(job_of(tmp_path, "training.compile=false"))
    device = ("cluster.device=cuda", "cluster.gpus_per_node=1", 'training.precision="bf16"')
    with pytest.raises(ConfigError, match="those of a batch are not known before"):
        job_of(tmp_path, *device, "training.reset_attention_mask=true")


def test_in_an_image_they_are_made_by_its_compiler(tmp_path: Path) -> None:
    """Where its table says so; elsewhere a rank that cannot take them says how."""
    text = JOBS.replace("ROOT", str(tmp_path)).replace('"mock"', '"mock"\ncontainer = "box"')
    box = "[containers.box]\nimage = '/i.sqsh'\nruntime = 'enroot'\npython = 'python3'\n"

    def boxed(more: str) -> Job:
        (tmp_path / "jobs.toml").write_text(f"{text}\n{box}{more}")
        return load(tmp_path).resolve("small", []).job

    outside, inside = boxed(""), boxed("stages_in_container = true")
    assert stage_box(outside, "precompile") is None
    assert stage_box(inside, "precompile") is not None
    needs = [PrecompileStage().needs(each, tmp_path)[0] for each in (outside, inside)]
    assert [need.settings.get("image") for need in needs] == [None, "/i.sqsh"]
    files = GraphFiles.of(outside)
    fields = {**graph_fields(outside), **machine_fields(outside), "python": "3.10.12"}
    (tmp_path / "made").mkdir()
    pack(tmp_path / "made", files, fields)
    way_out = "containers.box.stages_in_container = true has them made in the image"
    assert take(outside).endswith(way_out)
    assert "python was '3.10.12'" in take(inside) and way_out not in take(inside)


def test_the_oldest_are_deleted(job: Job, tmp_path: Path) -> None:
    files = make(job, tmp_path)
    old = tmp_path / "compiled" / "old"
    old.mkdir()
    (old / "graphs.tar").write_bytes(b"0" * 1000)
    os.utime(old / "graphs.tar", (1, 1))
    assert prune(tmp_path, most=10**9) == []
    assert prune(tmp_path, ["small"], most=0) == [(old, 1000)]
    assert files.archive.is_file() and not old.exists()
