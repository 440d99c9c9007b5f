"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer: tests of everything that
calls it, in a process of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import trainkit

ROOT = Path(trainkit.__file__).parents[1]
FLAGS = (
    "-O1",
    "-g",
    "-fno-omit-frame-pointer",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
)
TESTS = (
    "tests/data/order/test_permutation.py",
    "tests/data/order/test_samples.py",
    "tests/data/order/test_loader.py",
    "tests/data/order/test_native_order.py",
    "tests/data/order/test_native_blend.py",
    "tests/data/order/test_megatron.py",
    "tests/data/order/test_megatron_blend.py",
    "tests/data/curate/test_rules.py::test_every_rule_decides_as_datatrove",
    "tests/data/curate/test_rules.py::test_words_of_english_are_spacys_whatever_is_joined",
    "tests/data/curate/test_fasttext.py",
    "tests/data/curate/test_steps.py",
    "tests/data/tokenize/test_shuffle.py",
    "tests/data/tokenize/test_encoders.py",
    "tests/data/tokenize/test_proved.py",
)


def _runtime(name: str) -> Path | None:
    """A sanitizer's library, as the compiler names it."""
    compiler = shutil.which("g++")
    if compiler is None:
        return None
    path = Path(
        subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
    )
    # a library that is not there comes back as its bare name
    return path.resolve() if path.is_absolute() else None


def _preloaded() -> str:
    """LD_PRELOAD for an interpreter that is not instrumented itself; skips where there is none.
    libstdc++ stands in it, or no exception is ever caught."""
    found = [_runtime(name) for name in ("libasan.so", "libubsan.so", "libstdc++.so")]
    if None in found:
        pytest.skip("no g++ with libasan.so and libubsan.so")
    return ":".join(str(path) for path in (found[0], found[2]))


def _compile(folder: Path) -> None:
    """A copy of the package with an instrumented extension in it."""
    shutil.copytree(
        ROOT / "trainkit", folder / "trainkit", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    shutil.copytree(ROOT / "tests", folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("csrc", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    for name in ("pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, folder / name)
    import pybind11

    from trainkit.base.install import csrc_sha256

    includes = [f"-I{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    sources = sorted(str(path) for path in (folder / "csrc/index").glob("*.cpp"))
    target = folder / "trainkit" / f"_index{sysconfig.get_config_var('EXT_SUFFIX')}"
    define = f'-DTRAINKIT_CSRC_SHA256="{csrc_sha256(folder)}"'
    plain = (
        "-std=c++17",
        "-fPIC",
        "-shared",
        "-pthread",
        "-fvisibility=hidden",
        "-ffp-contract=off",
    )
    subprocess.run(
        ["g++", *plain, *FLAGS, define, *includes, *sources, "-o", str(target)], check=True
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_extension_is_clean(tmp_path: Path) -> None:
    preloaded = _preloaded()
    _compile(tmp_path)
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        # the interpreter never frees what it keeps
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": str(tmp_path),
        "PYTHONMALLOC": "malloc",
    }
    words = "not memory_stays"  # what the sanitizer keeps is resident, too
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        words,
        *TESTS,
    ]
    done = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]
    assert " passed" in done.stdout
    argv = [sys.executable, "-c", "import trainkit._index as i; print(i.__file__)"]
    loaded = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip().startswith(str(tmp_path)), (
        "the tests ran against another extension"
    )


OVERFLOWING = """
#include <pybind11/pybind11.h>
PYBIND11_MODULE(_wrong, m) {
    m.def("read", [](int i) { volatile int three[3] = {1, 2, 3}; return three[i]; });
}
"""


@pytest.mark.slow
def test_an_access_out_of_bounds_is_found(tmp_path: Path) -> None:
    """The test above can fail: the same flags and environment find a wrong index."""
    preloaded = _preloaded()
    import pybind11

    (tmp_path / "wrong.cpp").write_text(OVERFLOWING)
    includes = [f"-I{path}" for path in (sysconfig.get_path("include"), pybind11.get_include())]
    target = tmp_path / f"_wrong{sysconfig.get_config_var('EXT_SUFFIX')}"
    subprocess.run(
        [
            "g++",
            "-std=c++17",
            "-fPIC",
            "-shared",
            *FLAGS,
            *includes,
            str(tmp_path / "wrong.cpp"),
            "-o",
            str(target),
        ],
        check=True,
    )
    environment = {
        **os.environ,
        "LD_PRELOAD": preloaded,
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(tmp_path),
    }
    argv = [sys.executable, "-c", "import sys, _wrong; _wrong.read(int(sys.argv[1]))"]
    assert (
        subprocess.run([*argv, "2"], env=environment, capture_output=True, check=False).returncode
        == 0
    )
    found = subprocess.run(
        [*argv, "3"], env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode != 0 and (
        "out of bounds" in found.stderr or "AddressSanitizer" in found.stderr
    )
