"""Compiling the kernels: what makes them stale, what a failed or killed build leaves, and what is
said where they cannot be used. The sources compiled here are a few lines of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from tests.conftest import wait_for
from tests.ops.op_cases import why_no_kernels
from tests.train.support import tiny_job
from trainkit.base.errors import Exit
from trainkit.base.install import InstallError, extension_path
from trainkit.ops import build, kernels
from trainkit.stages import build as stage
from trainkit.stages.build import INDEX, KERNELS, BuildStage

NAME = build.LIBRARY_FILE.name


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A checkout whose kernels are quick to compile."""
    if missing := build.missing_tools():
        pytest.skip("; ".join(missing))
    (tmp_path / "csrc/kernels").mkdir(parents=True)
    (tmp_path / "trainkit").mkdir()
    (tmp_path / "csrc/kernels/a.cpp").write_text("int a() { return 1; }\n")
    (tmp_path / "csrc/kernels/b.cpp").write_text("int b() { return 2; }\n")
    return tmp_path


def built(root: Path) -> Path:
    build.build_kernels(root, Path(sys.executable))
    return root / "trainkit" / NAME


def say(path: Path, origin: build.Origin) -> None:
    """A file that says it was made from this."""
    path.write_bytes(b"\x7fELF" + build.MARK + json.dumps(asdict(origin)).encode() + b"\0")


def test_an_extension_that_is_cut_short_is_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapping it would end the process."""
    shutil.copytree(stage.CHECKOUT / "csrc/index", tmp_path / "csrc/index")
    (tmp_path / "trainkit").mkdir()
    whole = extension_path(stage.CHECKOUT).read_bytes()
    copy = extension_path(tmp_path)
    monkeypatch.setattr(stage, "CHECKOUT", tmp_path)
    fresh = stage.EVIDENCE[INDEX]
    for size, said in ((len(whole), "was compiled from this source"), (-1, "is cut short")):
        copy.write_bytes(whole[:size])
        assert said in fresh()[1]
    assert not fresh()[0]


def test_a_library_says_what_it_was_made_from(root: Path) -> None:
    assert build.staleness(root) == "the kernels were never compiled"
    path = built(root)
    assert build.origin_of(path) == build.wanted(root) and build.staleness(root) == ""
    assert build.why_unusable(path, torch.__version__) == ""
    assert not list((root / "build").iterdir())
    (root / "csrc/kernels/a.cpp").write_text("int a() { return 3; }\n")
    assert "the source in csrc/kernels changed" in build.staleness(root)
    assert "the source in csrc/kernels changed" in build.why_unusable(path, torch.__version__)


@pytest.mark.parametrize(
    ("changed", "because"),
    [
        ({"torch": "2.9.1"}, "the kernels were compiled for torch 2.9.1, here is "),
        ({"compiler": "g++ 4.8"}, "the kernels were compiled by g++ 4.8, here is "),
        ({"flags": "0"}, "the kernels were compiled with other options"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_makes_them_stale(root: Path, changed: dict[str, str], because: str) -> None:
    say(root / "trainkit" / NAME, replace(build.wanted(root), **changed))
    assert build.staleness(root).startswith(because)


def test_a_failed_build_shows_the_compilers_words_and_leaves_no_library(root: Path) -> None:
    """Not the former one either: nobody shall compute with what the source does not say."""
    path = built(root)
    (root / "csrc/kernels/b.cpp").write_text("int b() { return nothing_like_it; }\n")
    with pytest.raises(InstallError, match="nothing_like_it") as refused:
        built(root)
    assert "b.cpp:1" in str(refused.value)
    assert not path.exists() and not list((root / "build").iterdir())


SLOW = '#!/bin/sh\necho >> "{log}"\ntest -e "{go}" || exec sleep 600\nexec g++ "$@"\n'


def test_killed_and_two_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is killed leaves what was there; of two at once the second finds it made."""
    path = built(root)
    before = path.read_bytes()
    (root / "csrc/kernels/a.cpp").write_text("int a() { return 4; }\n")
    log, go, compiler = root / "log", root / "go", root / "compiler"
    compiler.write_text(SLOW.format(log=log, go=go))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    code = f"""
from pathlib import Path
from trainkit.ops import build
build.build_kernels(Path({str(root)!r}), Path({sys.executable!r}))"""
    # --version is asked once more than go exists: it would sleep as well
    go.touch()
    origin = build.wanted(root)
    assert origin.compiler
    log.unlink()
    go.unlink()
    child = subprocess.Popen([sys.executable, "-I", "-c", code], start_new_session=True)
    wait_for(log.exists, "the compiler")
    os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert path.read_bytes() == before
    go.touch()
    for process in _sleepers(root):
        os.kill(process, signal.SIGKILL)
    several = [subprocess.Popen([sys.executable, "-I", "-c", code]) for _ in range(2)]
    assert [process.wait() for process in several] == [0, 0]
    assert build.origin_of(path) == origin


def _sleepers(root: Path) -> list[int]:
    """Processes that a killed build has left, known by their working folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if Path(os.readlink(folder / "cwd")) == root and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this process looks for the library: nothing is there."""
    path = tmp_path / NAME
    monkeypatch.setattr(kernels, "LIBRARY_FILE", path)
    kernels._load.cache_clear()
    yield path
    kernels._load.cache_clear()


def test_a_gpu_leaves_compiled_blocks_to_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "load", lambda device_type: None)
    around = kernels.choose("auto", "cuda", graphs=True).kernels
    assert around.rms_norm is kernels.REFERENCE.rms_norm
    assert around.softmax_loss is kernels.FUSED.softmax_loss
    assert around.adamw is kernels.FUSED.adamw
    assert kernels.choose("auto", "cuda").kernels is kernels.FUSED
    assert kernels.choose("fused", "cuda", graphs=True).kernels is kernels.FUSED
    assert kernels.choose("auto", "cpu", graphs=True).kernels is kernels.FUSED


def test_auto_says_why_and_fused_refuses(nowhere: Path) -> None:
    chosen = kernels.choose("auto", "cpu")
    assert chosen.kernels is kernels.REFERENCE
    assert str(chosen) == (
        f"kernels: reference, because the fused kernels are not compiled ({nowhere} is not there);"
        " compile them: ./inv build"
    )
    with pytest.raises(kernels.Unavailable) as refused:
        kernels.choose("fused", "cpu")
    assert refused.value.exit == Exit.STAGE_STALE and "./inv build" in refused.value.hint
    assert kernels.choose("reference", "cpu") == kernels.Choice(kernels.REFERENCE)


def test_a_library_that_cannot_be_used(nowhere: Path) -> None:
    ours = build.Origin("0", torch.__version__, "g++", "0")
    say(nowhere, replace(ours, torch="1.13.0"))
    words = f"compiled for torch 1.13.0, this is torch {torch.__version__}"
    assert words in kernels.choose("auto", "cpu").because
    say(nowhere, ours)  # of this torch, and cut short
    assert "cannot be loaded" in kernels.choose("auto", "cpu").because
    assert "no fused operations for devices of type 'mps'" in kernels.choose("auto", "mps").because


def test_auto_on_a_gpu_without_triton(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rule as on CPUs."""
    monkeypatch.setattr(kernels, "triton_objection", lambda: "no C compiler is here")
    chosen = kernels.choose("auto", "cuda")
    assert chosen.kernels is kernels.REFERENCE and "no C compiler is here" in chosen.because
    with pytest.raises(kernels.Unavailable, match="no C compiler is here"):
        kernels.choose("fused", "cuda")


def test_a_machine_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` needs no stage there; `build` and `fused` are refused with what is missing."""
    job = tiny_job(1, tmp_path)
    names = [need.name for need in BuildStage().needs(job, tmp_path)]
    assert names == ([INDEX] if build.missing_tools() else [INDEX, KERNELS])
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [need.name for need in BuildStage().needs(job, tmp_path)] == [INDEX]
    fused = job.model_copy(update={"kernels": "fused"})
    assert [need.name for need in BuildStage().needs(fused, tmp_path)] == [INDEX, KERNELS]
    with pytest.raises(InstallError, match=r"missing:\n  - a C\+\+ compiler"):
        build.build_kernels(tmp_path, Path(sys.executable))


def test_the_library_needs_nothing_of_python() -> None:
    """One file for every version of it."""
    if why := why_no_kernels():
        pytest.skip(why)
    content = build.LIBRARY_FILE.read_bytes()
    assert b"PyInit" not in content and b"libpython" not in content
    assert b"libtorch_python" not in content
