"""The stage engine-prebuild: what a foreign engine would compile while its ranks wait is there.
As a program: the unit that compiles it, with the engine's own Python.

In a container it needs nothing unless stages run in the image: else its engine compiles when its
ranks start.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
import secrets
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainkit.base.documents import utc_now
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import TEMPORARY, sha256_file, write_json, write_text
from trainkit.base.git import head_commit
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import Record
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.engines.compiled import (
    QUIET_SECONDS,
    Interpreter,
    ask_interpreter,
    build_key,
    extensions_folder,
    left_locks,
    remove_dead_locks,
    tools_folder,
)
from trainkit.engines.options import OptionTable, dump_table
from trainkit.engines.own_parser import asks, options_file, parser_sources, read_options
from trainkit.engines.registry import foreign_engine
from trainkit.engines.sources import (
    engine_python,
    engines_root,
    in_image,
    source_of,
    source_tree,
)
from trainkit.jobs.schema import Job
from trainkit.stages.build_container import image_of
from trainkit.stages.contract import Need, Unit
from trainkit.stages.engine_install import run_logged

VERSION = 1
TAIL = 15  # lines of a compiler's that an error shows
KERNELS = Path("megatron/fused_kernels")

_IMPORT = (
    "import importlib.util as u, sys;"
    " s = u.spec_from_file_location(sys.argv[1], sys.argv[2]);"
    " s.loader.exec_module(u.module_from_spec(s))"
)
_HINTS = (
    ("Python.h", "install the headers of the engine's Python (Debian: python3-dev)"),
    ("pybind11", "install pybind11 into the engine's Python"),
    ("CUDA_HOME", "set CUDA_HOME to the CUDA toolkit that the engine's torch was made with"),
    ("Permission denied", "the tree cannot be written to: clone it by its URL, or name a copy"),
)


@dataclass(frozen=True)
class PrebuildSpec(Record):
    """The spec of the unit that compiles.

    Args:
        name: the [engines.X] table.
        engine: which engine it is.
        tree: its tree.
        python: its interpreter.
        extensions: TORCH_EXTENSIONS_DIR.
        tools: where python3 and python3-config of that interpreter go.
        record: what says what was compiled.
        kernels: whether the job needs the tree's own CUDA kernels, if it has any.
        shared: whether other hosts may compile there, too.
        image: which image the unit is in; "" outside of any. Its interpreter cannot be asked from
            outside: what it is follows from the image.
        options: where the options go that the tree's own parser has; None: it is not asked.
    """

    name: str
    engine: str
    tree: Path
    python: str
    extensions: Path
    tools: Path
    record: Path
    kernels: bool
    shared: bool
    image: str = ""
    options: Path | None = None

    def lock_folders(self) -> tuple[Path, ...]:
        """Where compilers leave locks."""
        return (self.extensions, self.tree / KERNELS / "build")


@dataclass(frozen=True)
class Compiled(Record):
    """What was compiled, as <root>/engines/prebuilt/KEY.json keeps it; with options that are asked
    for under their KEY: both kinds of jobs of a tree go on beside each other.

    Args:
        sources: SHA-256 of each source, by name.
        files: [size, mtime in ns] of what was made of them, by path.
        kernels: "made", "not needed", or why they were left to the ranks.
        python: the interpreter's version, suffix and torch.
        image: as of PrebuildSpec.
        made: when.
    """

    SCHEMA = "engine-prebuild/1"
    sources: Mapping[str, str]
    files: Mapping[str, list[int]]
    kernels: str
    python: list[str]
    image: str = ""  # of records before stages ran in images
    made: str = field(default_factory=utc_now)


class EnginePrebuildStage:
    """What an engine outside of containers compiles: one need."""

    name = "engine-prebuild"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        if job.is_native or job.engine_source is None:
            return []
        inside = job.container is not None and job.container.stages_in_container
        if job.container is not None and (not inside or in_image(job)):
            return []
        source = source_of(job)
        options = options_file(job) if asks(job) else None
        record = options.name if options else f"{build_key(job)}.json"
        spec = PrebuildSpec(
            source.name,
            job.engine,
            source_tree(job),
            str(engine_python(job)),
            extensions_folder(job),
            tools_folder(job),
            engines_root(job) / "prebuilt" / record,
            job.cluster.device_type == "cuda" and foreign_engine(job.engine).needs_kernels(job),
            not job.cluster.launcher_traits.one_machine,
            image_of(job),
            options,
        )
        unit = Unit(
            "compile",
            (sys.executable, "-I", "-m", "trainkit.stages.engine_prebuild"),
            spec.to_json(),
        )
        settings = {f"engines.{source.name}": str(spec.tree), "python": spec.python}
        return [
            Need(
                self.name,
                source.name,
                source.name,
                VERSION,
                settings,
                (),
                (),
                (unit,),
                evidence=lambda: _judge(spec),
            )
        ]

    def waits_for(self, job: Job) -> tuple[str, ...]:
        return ("build-container", "engine-source", "engine-install")


def _kernel_sources(spec: PrebuildSpec) -> list[Path]:
    """Sources of CUDA kernels that the job needs; none in trees that have none any more."""
    if not spec.kernels or not list((spec.tree / KERNELS).glob("*.cu")):
        return []
    kinds = ("*.cu", "*.cpp", "*.h", "*.py")
    return [path for kind in kinds for path in sorted((spec.tree / KERNELS).glob(kind))]


def helper_folder(spec: PrebuildSpec) -> Path | None:
    """The folder whose Makefile compiles the dataset helper; None where there is none."""
    folders = foreign_engine(spec.engine).helper_folders(spec.tree, spec.python)
    return next((folder for folder in folders if (folder / "Makefile").is_file()), None)


def _sources(spec: PrebuildSpec) -> dict[str, str]:
    """SHA-256 of everything that is compiled or asked, by its name in the tree."""
    folder = helper_folder(spec)
    paths = _kernel_sources(spec)
    if folder is not None:
        paths += [folder / "Makefile", *sorted(folder.glob("*.cpp"))]
    if spec.options is not None:  # what a parser is made of may stand in any of them
        paths += parser_sources(spec.tree)
    return {os.path.relpath(path, spec.tree): sha256_file(path) for path in paths}


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU and a compiler for it."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    nvcc = shutil.which("nvcc") or shutil.which(f"{home}/bin/nvcc")
    return bool(glob.glob("/dev/nvidia[0-9]*")) and nvcc is not None


def _judge(spec: PrebuildSpec) -> tuple[bool, str]:
    """Whether what the tree's sources say is compiled, and why or why not."""
    locks = [
        lock for folder in spec.lock_folders() for lock in left_locks(folder, shared=spec.shared)
    ]
    for lock in locks:
        if lock.dead:
            return False, f"{lock.path} was left by a compiler that was killed"
    try:
        record = Compiled.from_file(spec.record)
    except ConfigError:
        return False, "it was never compiled for this commit and Python"
    if changed := _other_python(spec, record):
        return False, changed
    sources = _sources(spec)
    for name in sorted({*sources, *record.sources}):
        if sources.get(name) != record.sources.get(name):
            return False, f"{name} changed since it was compiled"
    for name, identity in record.files.items():
        if _identity(Path(name)) != identity:
            return False, f"{name} is missing or changed"
    if record.kernels.startswith("left") and has_gpu():
        return False, "its kernels were left to a machine with a GPU, which this one is"
    because = f"compiled from these sources {record.made} (CUDA kernels: {record.kernels})"
    for lock in locks:
        because += f"; {_held_elsewhere(lock.path)}"
    return True, because


def _other_python(spec: PrebuildSpec, record: Compiled) -> str:
    """Why what was compiled is not of the interpreter that is meant; "" where it is."""
    if spec.image or record.image:
        return "" if spec.image == record.image else f"its image changed since {record.made}"
    asked = ask_interpreter(spec.python)
    if asked is None:
        return f"{spec.python} is not here, or does not run"
    if record.python != [asked.version, asked.suffix, asked.torch]:
        return f"its Python or torch changed since {record.made}"
    return ""


def _held_elsewhere(lock: Path) -> str:
    return (
        f"{lock} is held by nobody here: if no other host compiles, delete it, since everybody"
        " waits for it"
    )


def _identity(path: Path) -> list[int] | None:
    with contextlib.suppress(OSError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return None


def _remove_old(paths: Iterable[Path]) -> None:
    """Delete what compilers left that were killed long ago; another root may compile now."""
    for path in paths:
        if time.time() - path.stat().st_mtime > QUIET_SECONDS:
            path.unlink(missing_ok=True)


class _Prebuild:
    """Compiles for one engine."""

    def __init__(self, spec: PrebuildSpec) -> None:
        self.spec = spec
        asked = ask_interpreter(spec.python)
        if asked is None:
            raise TrainkitError(
                f"{spec.python}, the Python of engines.{spec.name}, is not on"
                f" {os.uname().nodename}, or does not run",
                exit=Exit.STAGE_FAILED,
                hint=(
                    "set engines.X.python or venv; where only nodes have it, give them the stage:"
                    " [clusters.X.stages.engine-prebuild]"
                ),
            )
        self.python: Interpreter = asked

    def run(self) -> tuple[Compiled, list[str]]:
        """What was compiled, and what a person should know."""
        spec = self.spec
        words = self._unlock()
        self._write_tools()
        spec.extensions.mkdir(parents=True, exist_ok=True)
        sources = _sources(spec)
        files: list[Path] = []
        if (folder := helper_folder(spec)) is not None:
            files.append(self._helper(folder))
        kernels = self._kernels()
        if spec.options is not None:
            files.append(self._options(spec.options))
        identities = {str(path): identity for path in files if (identity := _identity(path))}
        compiled = Compiled(
            sources,
            identities,
            kernels,
            [self.python.version, self.python.suffix, self.python.torch],
            spec.image,
        )
        write_json(spec.record, compiled.to_json())
        return compiled, words

    def _unlock(self) -> list[str]:
        words = []
        for folder in self.spec.lock_folders():
            removed, kept = remove_dead_locks(folder, shared=self.spec.shared)
            words += [f"removed {path}, which a killed compiler left" for path in removed]
            words += [_held_elsewhere(path) for path in kept]
        return words

    def _write_tools(self) -> None:
        """python3 and python3-config of the engine's interpreter: a venv has no python3-config,
        and that of another Python names files which the engine's cannot import."""
        python = shlex.quote(str(self.python.path))
        code = "import sysconfig as s; print(s.get_config_var('EXT_SUFFIX'))"
        texts = {
            "python3": f'#!/bin/sh\nexec {python} "$@"\n',
            "python3-config": (
                '#!/bin/sh\nif [ "$1" = --extension-suffix ]; then\n'
                f"  exec {python} -c {shlex.quote(code)}\nfi\n"
                'echo "python3-config of trainkit: only --extension-suffix" >&2\nexit 1\n'
            ),
        }
        for name, text in texts.items():
            write_text(self.spec.tools / name, text, permissions=0o777)

    def _environment(self) -> dict[str, str]:
        """The caller's, with the engine's Python first, and no make around this one."""
        left_out = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONHOME", "PYTHONPATH")
        kept = {key: value for key, value in os.environ.items() if key not in left_out}
        path = (str(self.spec.tools), str(self.python.path.parent), kept.get("PATH", os.defpath))
        return {
            **kept,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": str(self.spec.tree),
            "TORCH_EXTENSIONS_DIR": str(self.spec.extensions),
        }

    def _call(self, *argv: str, cwd: Path) -> tuple[int, str]:
        """(exit code, what it printed); that goes to the unit's log, too."""
        try:
            return run_logged(argv, cwd, self._environment())
        except FileNotFoundError:
            raise TrainkitError(
                f"{argv[0]} is not on PATH, and engines.{self.spec.name} is compiled with it",
                exit=Exit.STAGE_FAILED,
                hint="install make and a C++ compiler (Debian: build-essential)",
            ) from None

    def _failure(self, what: str, code: int, said: str) -> TrainkitError:
        lines = [line for line in said.splitlines() if line.strip()]
        first = next((line for line in lines if "error" in line.lower()), "".join(lines[-1:]))
        hints = [hint for word, hint in _HINTS if word in said]
        return TrainkitError(
            f"{what} could not be compiled (exit {code}): {first.strip()}",
            exit=Exit.STAGE_FAILED,
            hint="\n  ".join([*hints[:1], *lines[-TAIL:]]),
        )

    def _helper(self, folder: Path) -> Path:
        """The dataset helper for this interpreter: made now, or found newer than its sources,
        as make would, and able to be imported."""
        makefile = (folder / "Makefile").read_text(errors="replace")
        said = re.search(r"^LIBNAME\s*[:?]?=\s*([\w.-]+)\s*$", makefile, re.MULTILINE)
        library = said[1] if said else "helpers"
        target = folder / f"{library}{self.python.suffix}"
        if self._is_current(library, target, folder):
            return target
        _remove_old(folder.glob(f"{library}{TEMPORARY}*.so"))
        suffix = f"{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}.so"
        made = folder / f"{library}{suffix}"
        try:
            code, words = self._call("make", "-C", str(folder), f"LIBEXT={suffix}", cwd=folder)
            if code or not made.is_file():
                raise self._failure(f"{folder}/{library}", code, words)
            code, words = self._imports(library, made, folder)
            if code:
                raise self._failure(f"{folder}/{library}", code, words)
            os.replace(made, target)
        finally:
            made.unlink(missing_ok=True)
        return target

    def _is_current(self, library: str, target: Path, folder: Path) -> bool:
        newest = max(path.stat().st_mtime_ns for path in folder.glob("*.cpp"))
        if not target.is_file() or target.stat().st_mtime_ns < newest:
            return False
        return self._imports(library, target, folder)[0] == 0

    def _imports(self, library: str, path: Path, folder: Path) -> tuple[int, str]:
        return self._call(str(self.python.path), "-c", _IMPORT, library, str(path), cwd=folder)

    def _kernels(self) -> str:
        """What became of the tree's CUDA kernels."""
        if not _kernel_sources(self.spec):
            return "not needed"
        if not has_gpu():
            return "left to the ranks: no GPU and nvcc here"
        loads = foreign_engine(self.spec.engine).load_kernels
        code, said = self._call(str(self.python.path), "-c", loads, cwd=self.spec.tree)
        if code:
            raise self._failure(f"{self.spec.tree / KERNELS}", code, said)
        return "made"

    def _options(self, target: Path) -> Path:
        """The options that the tree's own parser has, written into `target`."""
        spec = self.spec
        engine = foreign_engine(spec.engine)
        assert engine.parser is not None, "only where the schema lets options be from-source"
        with tempfile.TemporaryDirectory(prefix="options-") as folder:
            found = Path(folder) / "options.json"
            words = (str(self.python.path), "-c", engine.parser.options, str(found))
            code, said = self._call(*words, cwd=spec.tree)
            if code or not found.is_file():
                last = (said.strip() or "it said nothing").splitlines()[-1]
                raise TrainkitError(
                    f"engines.{spec.name}.options = 'from-source': the parser of {spec.tree} could"
                    f" not be asked (exit {code}): {last}",
                    exit=Exit.STAGE_FAILED,
                    hint=(
                        f"install what it misses for {self.python.path}, or set options = 'table';"
                        " where only nodes have it, give them the stage:"
                        " [clusters.X.stages.engine-prebuild]"
                    ),
                )
            options = read_options(found.read_text(encoding="utf-8"))
        version = engine.version_in(spec.tree) or ""
        table = OptionTable(spec.engine, version, head_commit(spec.tree), options)
        write_text(target, dump_table(table))
        return target


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Compile. Returns {"files", "kernels", "notes"}."""
    compiled, words = _Prebuild(PrebuildSpec.from_json(value)).run()
    for line in words:
        print(line, file=sys.stderr)
    return {"files": list(compiled.files), "kernels": compiled.kernels, "notes": words}


if __name__ == "__main__":
    run_unit(work)
