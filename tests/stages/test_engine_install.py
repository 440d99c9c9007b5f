"""Environments of engines made by a real pip, from a small package of the test's own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_for
from tests.once import once
from tests.stages.engine_trees import MEGATRON, Bringer, everything_below, job_of, write_files
from trainkit.base.errors import Exit, TrainkitError
from trainkit.base.worker import PARENT_VARIABLE
from trainkit.engines.requirements import (
    absolute_line,
    build_lines,
    known_lines,
    merged_lines,
    package_of,
)
from trainkit.jobs.clusters import Cluster
from trainkit.jobs.schema import Job
from trainkit.stages.engine_install import EngineInstallStage, read_marker


@pytest.fixture
def stage() -> Bringer:
    return Bringer(EngineInstallStage())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write_files(tmp_path / "tree", MEGATRON)
    return tmp_path / "tree"


def wheel(folder: Path, name: str, version: str, requires: str = "") -> None:
    """A wheel of one module (PEP 427)."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{name}-{version}.dist-info"
    needs = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needs}"
        )
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n")


def asked(tmp_path: Path, *lines: str, venv: str = "venv", python: str = "", **source: Any) -> Job:
    """A job whose venv is made from wheels of the test alone, by `python`; its version has no
    known lines."""
    offline = ("--no-index", f"--find-links {tmp_path / 'wheels'}")
    values = {"source": str(tmp_path / "tree"), "version": "of-the-test", **source}
    root = tmp_path / "root"
    return job_of(
        root,
        {**values, "venv": str(tmp_path / venv), "requirements": (*offline, *lines)},
        cluster=Cluster(name="c", root=str(root), launcher="ssh", python=python or None),
    )


@pytest.fixture
def quick_python(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose venvs are copies of a real one that was made once: ensurepip takes
    4 s of a processor."""
    whole = once(tmp_path_factory, "venv", _whole_venv)
    path = tmp_path / "quick-python"
    path.write_text(
        f'#!/bin/bash\nif [ "${{*:1:3}}" = "-I -m venv" ]; then\n    cp -aT {whole} "$4"\nelse\n'
        f'    exec {sys.executable} "$@"\nfi\n'
    )
    path.chmod(0o755)
    return str(path)


def _whole_venv(folder: Path) -> Path:
    venv = folder / "venv"
    subprocess.run([sys.executable, "-I", "-m", "venv", str(venv)], check=True)
    for words in (("--version",), ("install", "--help"), ("check",)):  # compiles what they load
        argv = [str(venv / "bin" / "python"), "-I", "-m", "pip", *words]
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
    return venv


def imported(venv: Path, name: str) -> str:
    """What the venv's own Python finds."""
    code = f"import {name}; print({name}.version)"
    return subprocess.run(
        [str(venv / "bin" / "python"), "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_a_venv_is_made_once_and_again_when_its_lines_change(
    stage: Bringer, tmp_path: Path, tree: Path, quick_python: str
) -> None:
    wheel(tmp_path / "wheels", "tiny", "1.0")
    wheel(tmp_path / "wheels", "tiny", "2.0")
    job = asked(tmp_path, "tiny<2", venv="its venv")
    venv = tmp_path / "its venv"
    assert stage.bring(job).because == f"{venv} was never made"
    assert imported(venv, "tiny") == "1.0"
    marker = read_marker(venv)
    assert marker is not None and marker.state == "made"
    time = (venv / "pyvenv.cfg").stat().st_mtime_ns
    again = stage.bring(job)
    assert again.fresh and "its 3 requirements" in again.because
    assert (venv / "pyvenv.cfg").stat().st_mtime_ns == time
    (venv / "left").touch()
    changed = asked(tmp_path, "tiny==2.0", venv="its venv", python=quick_python)
    assert stage.bring(changed).because == "requirement tiny<2 changed to tiny==2.0"
    assert imported(venv, "tiny") == "2.0" and not (venv / "left").exists()
    (venv / "bin" / "python").unlink()
    assert "is gone" in stage.verdict(changed).because
    assert not (tmp_path / "its venv.lock").exists()


def test_constraints_are_a_line_and_files_are_found_from_the_tree(
    stage: Bringer, tmp_path: Path, tree: Path, quick_python: str
) -> None:
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "wheels", "tiny", version)
    write_files(tree, {"requirements/more.txt": "tiny\n", "pins.txt": "tiny==1.0\n"})
    stage.bring(asked(tmp_path, "-r requirements/more.txt", "-c pins.txt", python=quick_python))
    assert imported(tmp_path / "venv", "tiny") == "1.0"


def test_a_killed_install_is_made_from_scratch(
    stage: Bringer, tmp_path: Path, tree: Path, quick_python: str
) -> None:
    wheel(tmp_path / "wheels", "tiny", "1.0")
    job = asked(tmp_path, "tiny", python=quick_python)
    venv = tmp_path / "venv"
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(dict(stage.need(job).units[0].spec)))
    unit = subprocess.Popen(
        [sys.executable, "-m", "trainkit.stages.engine_install", str(spec)],
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for((venv / "pyvenv.cfg").exists, "the venv to be begun")
    os.kill(unit.pid, signal.SIGKILL)
    unit.wait()
    (venv / "half").touch()
    verdict = stage.verdict(job)
    assert verdict.because == f"the making of {venv} was interrupted"
    wait_for(lambda: not running_below(venv), "what the unit had started to end with it")
    stage.bring(job)
    assert imported(venv, "tiny") == "1.0" and not (venv / "half").exists()
    assert stage.verdict(job).fresh


def running_below(venv: Path) -> list[str]:
    """Processes that name the venv."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(venv).encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_a_venv_that_trainkit_did_not_make_is_never_touched(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    job = asked(tmp_path, "tiny")
    write_files(tmp_path / "venv", {"bin/python": "", "mine": "x"})
    with pytest.raises(TrainkitError, match="was not made by trainkit") as raised:
        stage.need(job)
    assert raised.value.exit == Exit.STAGE_FAILED
    assert f'python = "{tmp_path}/venv/bin/python" instead of venv' in str(raised.value)
    write_files(tmp_path / "file", {"x": ""})
    with pytest.raises(TrainkitError, match="was not made by trainkit"):
        stage.need(asked(tmp_path, "tiny", venv="file/x"))
    # one that was made between the question and the work
    (tmp_path / "empty").mkdir()
    need = stage.need(asked(tmp_path, "tiny", venv="empty"))
    (tmp_path / "empty" / "mine").touch()
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps(dict(need.units[0].spec)))
    done = subprocess.run(
        [sys.executable, "-m", "trainkit.stages.engine_install", str(spec)],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 6 and b"was not made by trainkit" in done.stdout
    assert [path.name for path in (tmp_path / "empty").iterdir()] == ["mine"]


def test_what_pip_cannot_find_or_build_is_named(
    stage: Bringer, tmp_path: Path, tree: Path, quick_python: str
) -> None:
    wheel(tmp_path / "wheels", "tiny", "1.0", requires="nowhere>=3")
    for line in ("tiny", "missing==1"):
        job = asked(tmp_path, line, python=quick_python)
        with pytest.raises(TrainkitError, match="could not be made") as raised:
            stage.bring(job)
        said = str(raised.value)
        assert raised.value.exit == Exit.STAGE_FAILED
        assert "No matching distribution found for" in said and "engines.X.requirements" in said
        assert not stage.verdict(job).fresh


@pytest.mark.parametrize("line", ["a\nb", "", " ", "--index-url https://me:hunter22@example.org/"])
def test_lines_that_are_none_or_hold_a_password_are_refused(
    stage: Bringer, tmp_path: Path, tree: Path, line: str
) -> None:
    with pytest.raises(TrainkitError) as raised:
        stage.need(asked(tmp_path, line))
    assert "hunter22" not in str(raised.value)
    assert "hunter22" not in everything_below(tmp_path / "root")


def test_no_venv_needs_nothing_and_an_unknown_version_says_so(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    job = job_of(tmp_path, {"source": str(tree)})
    assert stage.stage.needs(job, stage.stamps(job)) == []
    (tree / "megatron/core/package_info.py").write_text("")
    job = job_of(tmp_path, {"source": str(tree), "venv": str(tmp_path / "v")})
    assert "was never made" in stage.verdict(job).because
    with pytest.raises(TrainkitError, match="does not say which version"):
        stage.bring(job)
    assert not (tmp_path / "v").exists()


def test_every_engine_version_has_lines_of_a_known_source() -> None:
    assert "transformers==4.38.0" in known_lines("gpt-neox", "2.0.0")
    assert "protobuf==3.20.1" in known_lines("gpt-neox", "1.0.0")
    assert "torch==2.7.*" in known_lines("megatron-lm", "core-0.12.0")
    assert "torch>=2.6.0" in known_lines("megatron-lm", "core-0.16.1")
    assert "numpy<1.24" in known_lines("megatron-lm", "2021")
    assert known_lines("megatron-lm", "none") == ()
    for engine, version in (("gpt-neox", "2."), ("megatron-lm", "core-"), ("megatron-lm", "2021")):
        lines = known_lines(engine, version)
        packages = [package_of(line) for line in lines]
        assert None not in packages and len(set(packages)) == len(lines), lines


PROJECT = """
[build-system]
requires = ["setuptools", "not-there==1"]
[project]
name = "{name}"
version = "1.0"
dependencies = ["tiny"]
[tool.setuptools]
py-modules = ["{name}"]
"""


def test_wheels_of_the_tree_are_built_before_its_requirements(
    stage: Bringer, tmp_path: Path, quick_python: str
) -> None:
    """neuronx-nemo-megatron: build.sh, `pip3 install ./build/*.whl`, requirements and protobuf."""
    folder = "nemo/examples/nlp/language_modeling"
    files = {f"{folder}/{name}": "" for name in ("megatron_gpt_pretraining.py", "train_setup.sh")}
    for name in ("nemo", "apex"):
        files[f"{name}/pyproject.toml"] = PROJECT.format(name=name)
        files[f"{name}/{name}.py"] = "version = 'of the tree'\n"
    files |= {"build.sh": "", "requirements.txt": "tiny==1.0\n"}
    write_files(tmp_path / "tree", files)
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "wheels", "tiny", version)
    # the tools: a build that leaves a wheel by its outdir's name, without an isolated environment
    tools = Path(__file__).parent / "build_module.py"
    with zipfile.ZipFile(tmp_path / "wheels" / "build-1.0-py3-none-any.whl", "w") as file:
        file.writestr("build/__main__.py", tools.read_text())
        info = "build-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: build\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    lines = ("build", "-r requirements.txt")
    job = asked(tmp_path, *lines, python=quick_python, engine="neuronx-nemo")
    stage.bring(job)
    assert stage.verdict(job).fresh
    assert [imported(tmp_path / "venv", name) for name in ("nemo", "apex")] == ["of the tree"] * 2
    # nemo's wheel asks for the newest, and the tree's requirements.txt lie over that
    assert imported(tmp_path / "venv", "tiny") == "1.0"


def test_the_lines_of_neuronx_nemo() -> None:
    lines = known_lines("neuronx-nemo", "2.21")
    assert lines == known_lines("neuronx-nemo", "2.13.1")
    assert {"torch==1.13.1", "-r requirements.txt", "protobuf==3.20.3"} <= set(lines)
    assert build_lines(("--no-index", *lines)) == (
        "--no-index",
        "torch==1.13.1",
        "wheel",
        "setuptools<81",
        "build",
        "pytest-runner",
    )
    assert build_lines(("-r more.txt", "-c constraints.txt")) == ("-c constraints.txt",)


def test_lines_of_jobs_toml_replace_those_of_the_same_package() -> None:
    known = ("torch>=2.6", "Py_Yaml", "numpy<2")
    assert merged_lines(known, ("torch==2.13.0", "py.yaml==6", "-c x")) == (
        "numpy<2",
        "torch==2.13.0",
        "py.yaml==6",
        "-c x",
    )
    assert merged_lines(known, ("torch @ https://example.org/a.whl",))[:2] == known[1:]
    for line in ("-r x", "./a", "https://example.org/x", "--no-index"):
        assert package_of(line) is None
    assert package_of("A.b[c]; python_version<'4'") == "a-b"


def test_lines_that_name_files_are_absolute() -> None:
    tree = Path("/t r")
    assert absolute_line("-r requirements/x.txt", tree) == "-r /t r/requirements/x.txt"
    assert absolute_line("--constraint=pins", tree) == "--constraint /t r/pins"
    assert absolute_line("./local", tree) == "/t r/local"
    for line in ("-c https://example.org/x", "tiny==1", "-e git+https://example.org/x", "--pre"):
        assert absolute_line(line, tree) == line
