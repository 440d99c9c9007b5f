"""install.py: what it gives pip, what it refuses, and compiled files that are the same twice."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import tomli

from tests.container.dockerfiles import CONTAINER, arguments
from trainkit.engines.requirements import known_lines, package_of

ROOT = CONTAINER.parent


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", CONTAINER / "install.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_requirements_are_pyprojects_without_torch(install: ModuleType) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = install.requirements(ROOT / "pyproject.toml", ["data"])
    wanted = [*project["dependencies"], *project["optional-dependencies"]["data"]]
    assert found == [line for line in wanted if package_of(line) != "torch"]
    assert len(found) == len(wanted) - 1


def test_the_oldest_python_is_pyprojects(install: ModuleType) -> None:
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    python = ".".join(str(number) for number in install.OLDEST_PYTHON)
    assert project["requires-python"] == f">={python}"


def test_an_unknown_extra(install: ModuleType) -> None:
    with pytest.raises(install.InstallError, match="EXTRAS: no extra 'tests' in"):
        install.requirements(ROOT / "pyproject.toml", ["tests"])


@pytest.mark.parametrize("name", ["Dockerfile.neox", "Dockerfile.megatron"])
def test_lines_of_engines_are_those_of_engine_install(install: ModuleType, name: str) -> None:
    """With the files' own default versions."""
    given = arguments(CONTAINER / name)
    table = ROOT / "trainkit" / "engines" / "requirements.toml"
    known = known_lines(given["ENGINE"], given["ENGINE_VERSION"])
    assert known
    found = install.engine_lines(table, given["ENGINE"], given["ENGINE_VERSION"])
    assert found == [line for line in known if package_of(line) != "torch"]


def test_an_unknown_engine(install: ModuleType) -> None:
    table = ROOT / "trainkit" / "engines" / "requirements.toml"
    with pytest.raises(install.InstallError, match=r"ENGINE=nemo .* has lines for gpt-neox 2"):
        install.engine_lines(table, "nemo", "1")


def test_constraints_without_what_is_chosen(install: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "all").write_text("# pinned\n\ntorch==2.13.0\nPy_YAML==6.0\nnumpy==2.4.6\n")
    install.write_constraints(tmp_path / "all", tmp_path / "some", {"torch", "py-yaml"})
    assert (tmp_path / "some").read_text() == "# pinned\n\nnumpy==2.4.6\n"


@pytest.mark.parametrize(
    ("python", "torch", "message"),
    [
        ((3, 10), "2.13.0", "base image's python3 is 3.10, trainkit needs 3.11"),
        ((3, 12), "2.7.0a0+7c8ec84dab.nv25.03", r"torch 2\.7\.0a0.*'TORCH=torch>=2\.11,<"),
        ((3, 12), "2.99.0", r"torch 2\.99\.0, trainkit was tried with torch>=2\.11,<"),
        ((3, 12), "unknown", r"torch unknown"),
    ],
)
def test_what_was_not_tried(
    install: ModuleType, python: tuple[int, int], torch: str, message: str
) -> None:
    with pytest.raises(install.InstallError, match=message):
        install.refuse_untried(python, torch, ROOT / "pyproject.toml")


def test_nvidias_versions_before_a_release_are_taken(install: ModuleType) -> None:
    install.refuse_untried((3, 12), "2.12.0a0+0291f960b6.nv26.05", ROOT / "pyproject.toml")


def test_without_a_torch(install: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH", " ")
    with pytest.raises(install.InstallError, match="TORCH= is 'base' or a requirement"):
        install.install_torch(ROOT)


def test_a_message_and_an_exit_code_instead_of_a_traceback(tmp_path: Path) -> None:
    shutil.copy(CONTAINER / "install.py", tmp_path)
    done = subprocess.run(
        [sys.executable, "-I", tmp_path / "install.py", "torch"],
        capture_output=True,
        text=True,
        check=False,
        env={"TORCH": ""},
    )
    assert done.returncode == 3
    assert done.stderr.startswith("install.py: --build-arg TORCH=")


def test_what_only_tests_read_goes(install: ModuleType, tmp_path: Path) -> None:
    """And not torch_shm_manager, which data loaders start."""
    gone = ["torch/test/a", "torch/bin/test_api", "torch/bin/protoc", "sympy/core/tests/b.py"]
    stays = ["torch/bin/torch_shm_manager", "torch/testing/a.py", "other/tests/c.py"]
    for name in [*gone, *stays]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    install.remove_unused(tmp_path)
    assert [name for name in gone if (tmp_path / name).exists()] == []
    assert [name for name in stays if not (tmp_path / name).exists()] == []


def test_compiled_files_are_the_same_whatever_the_times_are(
    install: ModuleType, tmp_path: Path
) -> None:
    """They hold a hash of their source (PEP 552); what is not Python 3 stays as it is."""
    found = []
    for n, name in enumerate(("one", "two")):
        folder = tmp_path / name / "package"
        folder.mkdir(parents=True)
        shutil.copy(CONTAINER / "install.py", folder / "module.py")
        (folder / "template.py").write_text("print 'python 2'\n")
        for path in folder.iterdir():
            os.utime(path, (1_000_000_000 + n, 1_000_000_000 + n))
        for part in range(install.PARTS):
            install.compile_part(folder, part)
        compiled = sorted(folder.rglob("*.pyc"))
        assert [path.name.split(".")[0] for path in compiled] == ["module"]
        found.append(compiled[0].read_bytes())
    flags = int.from_bytes(found[0][4:8], "little")
    assert flags == 0b01  # of a hash, and not compared with the source at each import
    names = [content.replace(b"one", b"two") for content in found]
    assert names[0] == names[1]
