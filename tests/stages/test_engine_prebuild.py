"""What engines compile, made ahead by a real make and compiler."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.engines.real import RealEngine, parameters
from tests.stages.engine_trees import MEGATRON, Bringer, commit, job_of, repository, write_files
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.git import head_commit
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.engines.compiled import (
    QUIET_SECONDS,
    ask_interpreter,
    engine_path,
    extensions_folder,
    left_locks,
    remove_dead_locks,
    tools_folder,
)
from trainkit.jobs.containers import Container
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Job
from trainkit.stages import engine_prebuild
from trainkit.stages.engine_prebuild import EnginePrebuildStage

SUFFIX = str(sysconfig.get_config_var("EXT_SUFFIX"))
# as the engines' own: the first python3 and python3-config of PATH
MAKEFILE = """CXXFLAGS += -shared -fPIC
CPPFLAGS += $(shell python3 -c 'import sysconfig as s; print("-I" + s.get_path("include"))')
LIBNAME = helpers_cpp
LIBEXT = $(shell python3-config --extension-suffix)

OUT = $(LIBNAME)$(LIBEXT)
SRC = helpers.cpp

default: $(OUT)

$(OUT): $(SRC)
\t$(CXX) $(CXXFLAGS) $(CPPFLAGS) $< -o $@
"""
HELPER = """#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "helpers_cpp", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit_helpers_cpp() { return PyModule_Create(&module); }
"""
NEMO_HELPER = HELPER.replace("helpers_cpp", "helpers")
# as NeMo's
NEMO_MAKEFILE = """CXXFLAGS += -shared -fPIC
CPPFLAGS += $(shell python3 -c 'import sysconfig as s; print("-I" + s.get_path("include"))')
LIBNAME = helpers
LIBEXT = $(shell $(shell readlink -f $(shell which python3))-config --extension-suffix)

default: $(LIBNAME)$(LIBEXT)

%$(LIBEXT): %.cpp
\t$(CXX) $(CXXFLAGS) $(CPPFLAGS) $< -o $@
"""
DATASETS = "megatron/core/datasets"
TREE = {**MEGATRON, f"{DATASETS}/Makefile": MAKEFILE, f"{DATASETS}/helpers.cpp": HELPER}


@pytest.fixture
def stage() -> Bringer:
    return Bringer(EnginePrebuildStage())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return repository(tmp_path / "the tree's", TREE)


@pytest.fixture
def quick_wheel_python(tmp_path: Path) -> Path:
    """An interpreter that has a package nemo with the sources of a helper."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", "--without-pip", str(venv)], check=True)
    (packages,) = venv.rglob("site-packages")
    below = "nemo/collections/nlp/data/language_modeling/megatron"
    write_files(
        packages,
        {
            "nemo/__init__.py": "raise SystemExit('imported')\n",
            f"{below}/Makefile": NEMO_MAKEFILE,
            f"{below}/helpers.cpp": NEMO_HELPER,
        },
    )
    return venv / "bin" / "python"


def asked(tmp_path: Path, tree: Path, **job: Any) -> Job:
    return job_of(tmp_path / "root", {"source": str(tree)}, **job)


def made(tree: Path) -> Path:
    return tree / DATASETS / f"helpers_cpp{SUFFIX}"


def left(tree: Path) -> list[str]:
    """Compiled files in the tree, by name."""
    return sorted(path.name for path in tree.rglob("*.so"))


def test_the_helper_is_made_once_for_its_sources(
    stage: Bringer, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MAKEFLAGS", "--dry-run")  # of a make around this one
    job = asked(tmp_path, tree)
    assert "was never compiled" in stage.bring(job).because
    first = made(tree).stat()
    verdict = stage.bring(job)
    assert verdict.fresh and "CUDA kernels: not needed" in verdict.because
    # the engine's own make finds nothing to do
    path = os.pathsep.join(map(str, (*engine_path(job), os.environ["PATH"])))
    said = subprocess.run(
        ["make", "-C", str(tree / DATASETS)],
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "Nothing to be done" in said
    # the same content at another time is the same source
    os.utime(tree / DATASETS / "Makefile")
    assert stage.bring(job).fresh
    (tree / DATASETS / "helpers.cpp").write_text(HELPER + "// more\n")
    assert stage.bring(job).because == f"{DATASETS}/helpers.cpp changed since it was compiled"
    assert made(tree).stat().st_mtime_ns > first.st_mtime_ns
    made(tree).unlink()
    assert "is missing or changed" in stage.bring(job).because
    assert left(tree) == [made(tree).name]


def test_the_helper_of_an_installed_package(
    stage: Bringer, tmp_path: Path, quick_wheel_python: Path
) -> None:
    """neuronx-nemo's: `make -C` in the package nemo of its interpreter, as compile_helper() runs
    it, by the Makefile's own names."""
    place = "nemo/examples/nlp/language_modeling"
    files = {f"{place}/{name}": "" for name in ("megatron_gpt_pretraining.py", "train_setup.sh")}
    tree = repository(tmp_path / "tree", {**files, "build.sh": ""})
    source = {"source": str(tree), "engine": "neuronx-nemo", "python": str(quick_wheel_python)}
    job = job_of(tmp_path / "root", source)
    assert "was never compiled" in stage.bring(job).because
    (package,) = (tmp_path / "venv").rglob("site-packages")
    folder = package / "nemo/collections/nlp/data/language_modeling/megatron"
    assert (folder / f"helpers{SUFFIX}").is_file()
    assert stage.bring(job).fresh
    (folder / "helpers.cpp").write_text(NEMO_HELPER + "// more\n")
    assert "helpers.cpp changed" in stage.bring(job).because
    assert not list(tree.rglob("*.so"))


def test_python3_config_of_another_python_names_no_file(
    stage: Bringer, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A venv has no python3-config: the system's would name a file that the engine cannot
    import."""
    other = "#!/bin/sh\necho .cpython-27-other.so\n"
    write_files(tmp_path, {"bin/python3-config": other, "bin/python3": "#!/bin/sh\nexit 1\n"})
    for name in ("python3-config", "python3"):
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    job = asked(tmp_path, tree)
    stage.bring(job)
    assert left(tree) == [made(tree).name]
    tools = tools_folder(job)
    for argv, said in (
        ([tools / "python3-config", "--extension-suffix"], SUFFIX),
        ([tools / "python3", "-c", "import sys; print(sys.prefix, sys.argv[1])", "a b"], None),
    ):
        done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=True)
        assert done.stdout.strip() == (said or f"{sys.prefix} a b")


def test_a_helper_that_cannot_be_imported_is_made_again(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    made(tree).write_bytes(b"half of it")
    old = made(tree).with_name("helpers_cpp.tmp-1-aa.so")
    old.touch()
    os.utime(old, (0, 0))
    stage.bring(asked(tmp_path, tree))
    assert made(tree).stat().st_size > 1000 and left(tree) == [made(tree).name]


def test_one_that_is_there_already_is_taken_as_it_is(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    stage.bring(asked(tmp_path, tree))
    time_before = made(tree).stat().st_mtime_ns
    other = job_of(tmp_path / "another root", {"source": str(tree)})
    assert "was never compiled" in stage.bring(other).because
    assert made(tree).stat().st_mtime_ns == time_before
    commit(tree, {"README": "x"})
    assert "was never compiled for this commit" in stage.bring(asked(tmp_path, tree)).because
    assert made(tree).stat().st_mtime_ns == time_before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({f"{DATASETS}/helpers.cpp": "int x = y;\n"}, "was not declared in this scope"),
        ({f"{DATASETS}/helpers.cpp": "#include <nowhere/Python.h>\n"}, "python3-dev"),
        ({f"{DATASETS}/helpers.cpp": "int x = 1;\n"}, "PyInit_helpers_cpp"),
        ({f"{DATASETS}/Makefile": "default:\n\tfalse\n"}, "Error 1"),
        ({f"{DATASETS}/Makefile": "default:\n\ttrue\n"}, "could not be compiled"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_the_compilers_words(
    stage: Bringer, tmp_path: Path, tree: Path, change: dict[str, str], said: str
) -> None:
    write_files(tree, change)
    job = asked(tmp_path, tree)
    with pytest.raises(TrainkitError, match="could not be compiled") as raised:
        stage.bring(job)
    assert raised.value.exit == Exit.STAGE_FAILED and said in str(raised.value)
    assert not stage.verdict(job).fresh and left(tree) == []


def test_no_make_and_no_interpreter(
    stage: Bringer, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_of(tmp_path / "root", {"source": str(tree), "python": "/nowhere/python"})
    with pytest.raises(TrainkitError, match="/nowhere/python, the Python of") as raised:
        stage.bring(job)
    assert "stages.engine-prebuild" in str(raised.value)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TrainkitError, match="make is not on PATH") as raised:
        stage.bring(asked(tmp_path, tree))
    assert raised.value.exit == Exit.STAGE_FAILED


def test_a_killed_make_leaves_nothing_that_counts(
    stage: Bringer, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = asked(tmp_path, tree)
    slow = f'#!/bin/sh\ntouch "{tmp_path}/began"\nexec sleep 600\n'
    write_files(tmp_path, {"bin/g++": slow})
    (tmp_path / "bin" / "g++").chmod(0o755)
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(dict(stage.need(job).units[0].spec)))
    unit = subprocess.Popen(
        [sys.executable, "-m", "trainkit.stages.engine_prebuild", str(spec)],
        env={
            **os.environ,
            PARENT_VARIABLE: str(os.getpid()),
            "CXX": str(tmp_path / "bin" / "g++"),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for((tmp_path / "began").exists, "the compiler to be at work")
    os.kill(unit.pid, signal.SIGKILL)
    unit.wait()
    os.killpg(unit.pid, signal.SIGKILL)
    assert not stage.verdict(job).fresh and not made(tree).exists()
    stage.bring(job)
    assert stage.verdict(job).fresh


def test_a_lock_of_a_dead_compiler_is_removed_and_a_held_one_stays(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    job = asked(tmp_path, tree)
    stage.bring(job)
    assert extensions_folder(job).is_dir()
    lock = extensions_folder(job) / "fused adam" / "lock"
    lock.parent.mkdir()
    handle = os.open(lock, os.O_CREAT | os.O_EXCL)  # as torch's FileBaton
    assert stage.bring(job).fresh and lock.exists()
    os.close(handle)
    assert stage.bring(job).because == f"{lock} was left by a compiler that was killed"
    assert not lock.exists() and stage.verdict(job).fresh
    log = stage.stamps(job) / "megatron-lm.units" / "compile.json"
    (note,) = json.loads(log.read_text())["result"]["notes"]
    assert note == f"removed {lock}, which a killed compiler left"
    kernels = tree / "megatron/fused_kernels/build/lock"
    write_files(tree, {"megatron/fused_kernels/build/lock": ""})
    stage.bring(job)
    assert not kernels.exists()


def test_a_lock_that_another_host_may_hold_stays_until_all_is_quiet(tmp_path: Path) -> None:
    write_files(tmp_path, {"a/lock": "", "a/x.o": "", "b/lock": ""})
    old = time.time() - 2 * QUIET_SECONDS
    for path in (tmp_path / "b" / "lock", tmp_path / "b", tmp_path / "a" / "lock", tmp_path / "a"):
        os.utime(path, (old, old))
    assert [lock.dead for lock in left_locks(tmp_path, shared=True)] == [False, True]
    removed, kept = remove_dead_locks(tmp_path, shared=True)
    assert removed == [tmp_path / "b" / "lock"] and kept == [tmp_path / "a" / "lock"]
    assert left_locks(tmp_path / "none", shared=True) == []


def test_a_lock_that_may_live_elsewhere_is_named_while_the_stage_is_fresh(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    cluster = Cluster(name="c", launcher="ssh", root=str(tmp_path / "root"))
    job = asked(tmp_path, tree, cluster=cluster)
    stage.bring(job)
    lock = extensions_folder(job) / "x" / "lock"
    write_files(lock.parent, {"lock": ""})
    verdict = stage.verdict(job)
    assert verdict.fresh and f"{lock} is held by nobody here" in verdict.because


def test_another_python_or_commit_has_a_folder_of_its_own(tmp_path: Path, tree: Path) -> None:
    here = asked(tmp_path, tree)
    folder = extensions_folder(here)
    assert folder.parent == tmp_path / "root" / "engines" / "extensions"
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    other = job_of(tmp_path / "root", {"source": str(tree), "python": python})
    image = asked(tmp_path, tree, container=Container(name="i", image="n", runtime="docker"))
    folders = {folder, extensions_folder(other), extensions_folder(image)}
    commit(tree, {"README": "x"})
    folders.add(extensions_folder(here))
    assert len(folders) == 4
    asked_of = ask_interpreter(python)
    assert asked_of is not None and asked_of.torch == ""
    package = venv / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    write_files(package, {"torch-9.9.dist-info/METADATA": "Name: torch\nVersion: 9.9\n"})
    asked_of = ask_interpreter(python)
    assert asked_of is not None and asked_of.torch == "9.9"
    assert engine_path(other) == (tools_folder(other), venv / "bin")
    assert engine_path(image) == ()


def test_a_container_needs_nothing(stage: Bringer, tmp_path: Path, tree: Path) -> None:
    job = asked(tmp_path, tree, container=Container(name="i", image="n", runtime="docker"))
    assert stage.stage.needs(job, stage.stamps(job)) == []


def test_in_an_image(
    stage: Bringer, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was compiled with follows from the image, which is not asked from outside."""
    box = Container(
        name="i", image="n:1", runtime="docker", stages_in_container=True, python=sys.executable
    )
    job = asked(tmp_path, tree, container=box)
    assert not stage.bring(job).fresh
    (need,) = stage.stage.needs(job, stage.stamps(job))
    assert need.units[0].spec["image"] == "n:1"
    monkeypatch.setattr(engine_prebuild, "ask_interpreter", lambda python: None)
    assert stage.verdict(job).fresh
    another = box.model_copy(update={"image": "n:2"})
    changed = asked(tmp_path, tree, container=another)
    monkeypatch.setattr(engine_prebuild, "image_of", lambda job: "sha256:2")
    assert "its image changed since" in str(stage.verdict(job).because)
    assert "never compiled" in str(stage.verdict(changed).because), "another name, another record"
    tree.rename(tmp_path / "away")
    assert stage.stage.needs(job, stage.stamps(job)) == [], "the tree is in the image"


def test_the_commit_is_read_without_git(tmp_path: Path) -> None:
    tree = repository(tmp_path / "tree")
    first = commit(tree, {"a": "1"})
    assert head_commit(tree) == first
    subprocess.run(["git", "-C", str(tree), "pack-refs", "--all"], check=True)
    assert head_commit(tree) == first
    words = ["git", "-C", str(tree), "worktree", "add", "-q", str(tmp_path / "w"), "-b", "other"]
    subprocess.run(words, check=True)
    second = commit(tmp_path / "w", {"a": "2"})
    assert head_commit(tmp_path / "w") == second != first
    subprocess.run(["git", "-C", str(tree), "checkout", "-q", "--detach", second], check=True)
    assert head_commit(tree) == second
    assert head_commit(tmp_path) == ""


KERNELS = {
    "megatron/__init__.py": "",
    "megatron/fused_kernels/__init__.py": (
        "import os, pathlib\n"
        "def load(args):\n"
        "    assert args.masked_softmax_fusion and args.rank == 0\n"
        "    if os.environ.get('BROKEN'): raise RuntimeError('nvcc fatal: arch')\n"
        "    (pathlib.Path(__file__).parent / 'build').mkdir(exist_ok=True)\n"
        "    path = pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR']) / 'was here'\n"
        "    path.touch()\n"
    ),
    "megatron/fused_kernels/a.cu": "",
}


def test_kernels_are_made_where_there_is_a_gpu_and_else_left_to_the_ranks(
    stage: Bringer, tmp_path: Path, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit(tree, KERNELS)
    a100 = Cluster(
        name="c",
        gpus_per_node=1,
        device=built_in_device("a100-sxm-40gb"),
        root=str(tmp_path / "root"),
    )
    spec = stage.need(asked(tmp_path, tree)).units[0].spec
    assert spec["kernels"] is False  # no device that they are for
    job = asked(tmp_path, tree, cluster=a100)
    unit = engine_prebuild.PrebuildSpec.from_json(stage.need(job).units[0].spec)
    monkeypatch.setattr(engine_prebuild, "has_gpu", lambda: False)
    compiled, _ = engine_prebuild._Prebuild(unit).run()
    assert compiled.kernels == "left to the ranks: no GPU and nvcc here"
    assert stage.verdict(job).fresh
    monkeypatch.setattr(engine_prebuild, "has_gpu", lambda: True)
    assert "left to a machine with a GPU" in stage.verdict(job).because
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(TrainkitError, match="nvcc fatal: arch"):
        engine_prebuild._Prebuild(unit).run()
    monkeypatch.delenv("BROKEN")
    compiled, _ = engine_prebuild._Prebuild(unit).run()
    assert compiled.kernels == "made" and (unit.extensions / "was here").exists()
    assert "CUDA kernels: made" in stage.verdict(job).because
    (tree / "megatron/fused_kernels/a.cu").write_text("// more\n")
    assert "megatron/fused_kernels/a.cu changed" in stage.verdict(job).because


def test_neox_needs_its_kernels_by_its_options(stage: Bringer, tmp_path: Path) -> None:
    files = {"train.py": "", "deepy.py": "", "megatron/data/Makefile": MAKEFILE}
    tree = repository(tmp_path / "neox", {**files, "CITATION.cff": "version: 2.0.0\n"})
    a100 = Cluster(
        name="c", gpus_per_node=1, device=built_in_device("a100-sxm-40gb"), root=str(tmp_path)
    )
    for args, needed in (
        ({}, False),
        ({"scaled-upper-triang-masked-softmax-fusion": True}, True),
        ({"scaled_masked_softmax_fusion": False}, False),
        ({"rope_fusion": True}, True),
    ):
        source = {"name": "neox", "engine": "gpt-neox", "source": str(tree)}
        job = job_of(tmp_path, source, cluster=a100, engine_args=args)
        assert stage.need(job).units[0].spec["kernels"] is needed


@pytest.mark.slow
@pytest.mark.parametrize("real", [*parameters("megatron-lm"), *parameters("gpt-neox")])
def test_real_trees_are_made_ahead(stage: Bringer, tmp_path: Path, real: RealEngine) -> None:
    tree = tmp_path / "tree"
    without = shutil.ignore_patterns("*.so", ".git", "build", "__pycache__")
    shutil.copytree(real.tree, tree, ignore=without)
    source = {"name": real.engine, "source": str(tree), "python": real.python}
    job = job_of(tmp_path / "root", source)
    stage.bring(job)
    (helper,) = tree.rglob("*.so")
    asked_of = ask_interpreter(real.python)
    assert asked_of is not None and helper.name.endswith(asked_of.suffix)
    verdict = stage.verdict(job)
    assert verdict.fresh, verdict
    # the engine's own make, as its ranks would run it: nothing is left for it to do
    path = os.pathsep.join(map(str, (*engine_path(job), os.environ["PATH"])))
    words = ["make", "-C", str(helper.parent)]
    done = subprocess.run(words, env={"PATH": path}, capture_output=True, text=True, check=True)
    assert "Nothing to be done" in done.stdout, done.stdout
