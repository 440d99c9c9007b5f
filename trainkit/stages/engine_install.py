"""The stage engine-install: the environment engines.X.venv has what the engine needs. As a
program: the unit that makes it.

A venv cannot be made under another name, its scripts hold its path. So a marker in it says
"making" until all is installed; one that was left at that is made from scratch, and a folder
without the marker is never touched.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from trainkit.base.documents import utc_now
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.base.files import remove, write_json, write_text
from trainkit.base.git import head_commit, without_passwords
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.locks import locked
from trainkit.base.process import die_with_parent_hook
from trainkit.base.records import Record
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.engines.registry import foreign_engine
from trainkit.engines.requirements import (
    absolute_line,
    build_lines,
    known_lines,
    merged_lines,
    refuse_lines,
)
from trainkit.engines.sources import (
    cluster_python,
    engine_python,
    source_of,
    source_tree,
    venv_folder,
)
from trainkit.jobs.schema import Job
from trainkit.stages.contract import Need, Unit

VERSION = 1
MARKER = "trainkit-venv.json"  # in the venv
LINES = "trainkit-requirements.txt"  # in the venv: what pip was given
TOOLS = "trainkit-build-requirements.txt"  # the same of what wheels of the tree are built with
SECONDS = 60.0  # that an interpreter may take to say its version
TAIL = 12  # lines of pip's that an error shows
_COLOR = re.compile(r"\x1b\[[0-9;]*[mK]")  # -fdiagnostics-color of the engines' Makefiles
# what pip says, and what helps; the first that is found
_HINTS = (
    (
        ("Temporary failure in name resolution", "NewConnectionError", "ConnectTimeout"),
        "there is no way to the package index from here: run it where there is one, or give pip"
        " another index (pip config, --find-links in requirements)",
    ),
    (
        ("No matching distribution found", "ResolutionImpossible"),
        "a line asks for what the index has not for this Python: change it in"
        " engines.X.requirements (a line there replaces the known one of the same package)",
    ),
    (
        ("error: command", "fatal error:", "Failed building wheel", "subprocess-exited-with-error"),
        "a package had to be compiled and could not be: install what it misses, or ask for a"
        " version with a wheel in engines.X.requirements",
    ),
    (("No space left on device",), "make room: the next call begins from scratch"),
)


@dataclass(frozen=True)
class InstallSpec(Record):
    """The spec of the unit that makes a venv.

    Args:
        name: the [engines.X] table.
        engine: which engine it is.
        tree: its tree.
        version: what jobs.toml says that is; None: the tree says it.
        requirements: jobs.toml's own lines.
        venv: the folder.
        python: the interpreter that it is made with.
    """

    name: str
    engine: str
    tree: Path
    version: str | None
    requirements: tuple[str, ...]
    venv: Path
    python: Path

    def lines(self) -> tuple[str, ...]:
        """What pip is given. Raises ConfigError where the tree does not say its version."""
        version = self.version or foreign_engine(self.engine).version_of_tree(self.tree)
        lines = merged_lines(known_lines(self.engine, version), self.requirements)
        found = tuple(absolute_line(line, self.tree) for line in lines)
        if not self.wheels:
            return found
        # a comment for pip: what the tree is now
        return (*found, f"# wheels of {', '.join(self.wheels)} at {head_commit(self.tree)}")

    @property
    def wheels(self) -> tuple[str, ...]:
        """Folders of the tree that are installed as wheels."""
        return foreign_engine(self.engine).wheels


@dataclass(frozen=True)
class Marker(Record):
    """What a venv of trainkit's says of itself.

    Args:
        state: "making" while it is not whole.
        lines: what pip was given.
        python: the version of its interpreter.
        at: when it was written.
    """

    SCHEMA = "engine-venv/1"
    state: Literal["making", "made"]
    lines: tuple[str, ...]
    python: str
    at: str = field(default_factory=utc_now)


def read_marker(venv: Path) -> Marker | None:
    """The marker; None where there is none that can be read."""
    try:
        return Marker.from_file(venv / MARKER)
    except ConfigError:
        return None


class EngineInstallStage:
    """An environment of the engine's own, where engines.X.venv asks for one."""

    name = "engine-install"

    def needs(self, job: Job, stamps: Path) -> list[Need]:
        if job.is_native or job.engine_source is None or not job.engine_source.venv:
            return []
        source = source_of(job)
        engine_python(job)  # refuses a venv beside an image
        refuse_lines(source.name, source.requirements)
        spec = InstallSpec(
            source.name,
            job.engine,
            source_tree(job),
            source.version,
            tuple(source.requirements),
            venv_folder(job),
            cluster_python(job),
        )
        _refuse_foreign(spec)
        unit = Unit(
            "install",
            (sys.executable, "-I", "-m", "trainkit.stages.engine_install"),
            spec.to_json(),
            (spec.venv / MARKER,),
            network=True,
        )
        settings = {
            f"engines.{source.name}.venv": str(spec.venv),
            f"engines.{source.name}.requirements": list(source.requirements),
        }
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
        """Which lines are known for it hangs on the version that its tree says."""
        return ("engine-source",)


def _refuse_foreign(spec: InstallSpec) -> None:
    """Raise TrainkitError (exit 6) for a folder that trainkit did not make: nothing of it is
    touched."""
    venv = spec.venv
    if not os.path.lexists(venv) or read_marker(venv) is not None:
        return
    if venv.is_dir() and not any(venv.iterdir()):
        return
    python = venv / "bin" / "python"
    if python.exists():
        hint = f'use it as it is: python = "{python}" instead of venv; or name another folder'
    else:
        hint = "name a folder that is not there yet"
    raise TrainkitError(
        f"engines.{spec.name}.venv = '{venv}' is there and was not made by trainkit: nothing is"
        " installed into it",
        exit=Exit.STAGE_FAILED,
        hint=hint,
    )


def python_version(python: Path) -> str:
    """What an interpreter says it is, "3.11.7"; "" where it does not run."""
    code = "import platform; print(platform.python_version())"
    try:
        done = subprocess.run(
            [str(python), "-I", "-S", "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _judge(spec: InstallSpec) -> tuple[bool, str]:
    """Whether the environment is whole and of these lines, and why or why not."""
    marker = read_marker(spec.venv)
    if marker is None:
        return False, f"{spec.venv} was never made"
    if marker.state != "made":
        return False, f"the making of {spec.venv} was interrupted"
    if not spec.tree.is_dir():
        return False, f"the engine's tree is not at {spec.tree} yet"
    try:
        lines = spec.lines()
    except ConfigError as error:
        return False, error.message
    if changed := _difference(marker.lines, lines):
        return False, changed
    now = python_version(spec.venv / "bin" / "python")
    if now != marker.python:
        return False, f"its Python was {marker.python} and is {now or 'gone'}"
    return True, f"{spec.venv} has its {len(lines)} requirements, for Python {now}"


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    """The first line that is gone or new; "" where they are the same."""
    more = [line for line in now if line not in before]
    gone = [line for line in before if line not in now]
    if more and gone:
        return f"requirement {gone[0]} changed to {more[0]}"
    if more:
        return f"requirement {more[0]} is new"
    if gone:
        return f"requirement {gone[0]} is gone"
    if list(before) != list(now):
        return "the order of the requirements changed"
    return ""


class _Install:
    """Makes one venv."""

    def __init__(self, spec: InstallSpec, progress: ProgressCallback) -> None:
        self.spec = spec
        self.progress = progress

    def run(self) -> Marker:
        venv = self.spec.venv
        lines = self.spec.lines()
        _refuse_foreign(self.spec)
        self._clear()
        venv.mkdir(parents=True, exist_ok=True)
        write_json(venv / MARKER, Marker("making", lines, "").to_json())
        write_text(venv / LINES, "".join(f"{line}\n" for line in lines))
        python = str(venv / "bin" / "python")
        count = 4 + (len(self.spec.wheels) + 2 if self.spec.wheels else 0)
        for number, argv in enumerate(self._steps(python, lines)):
            self.progress(number, count)
            if argv[-1] == "check":
                # packages that disagree may still work together: the log has it
                self._call(argv, may_fail=True)
            else:
                self._call(argv)
        marker = Marker("made", lines, python_version(Path(python)))
        write_json(venv / MARKER, marker.to_json())
        return marker

    def _steps(self, python: str, lines: Sequence[str]) -> Iterator[list[str]]:
        """The commands, each worked out when the ones before it are done."""
        venv = self.spec.venv
        pip = [python, "-I", "-m", "pip"]
        yield [str(self.spec.python), "-I", "-m", "venv", str(venv)]
        yield [*pip, "--version"]
        yield from self._wheel_steps(python, lines)
        yield [*pip, *_PIP, "install", *_QUIET, "-r", str(venv / LINES)]
        yield [*pip, *_PIP, "check"]

    def _wheel_steps(self, python: str, lines: Sequence[str]) -> Iterator[list[str]]:
        """As the engine's build.sh and its document have it: what they are built with, the
        wheels, and these before the other requirements, which lie over what they ask for."""
        spec = self.spec
        if not spec.wheels:
            return
        tools = spec.venv / TOOLS
        write_text(tools, "".join(f"{line}\n" for line in build_lines(lines)))
        install = [python, "-I", "-m", "pip", *_PIP, "install", *_QUIET]
        yield [*install, "-r", str(tools)]
        made = spec.venv / "wheels"
        for name in spec.wheels:
            remove(spec.tree / name / "build")
            build = [python, "-I", "-m", "build", "--no-isolation", "--wheel"]
            yield [*build, "--outdir", str(made), str(spec.tree / name)]
        yield [*install, *map(str, sorted(made.glob("*.whl")))]

    def _clear(self) -> None:
        """Take away what an earlier making left; the marker goes last, so that this is known as
        ours until then."""
        if not self.spec.venv.is_dir():
            return
        for path in self.spec.venv.iterdir():
            if path.name != MARKER:
                remove(path)
        (self.spec.venv / MARKER).unlink(missing_ok=True)

    def _call(self, argv: list[str], *, may_fail: bool = False) -> None:
        """Run a program; what it prints goes to the unit's log."""
        try:
            code, said = run_logged(argv, self.spec.tree, _environment())
        except OSError as error:
            raise TrainkitError(
                f"{argv[0]} cannot be run: {error.strerror}",
                exit=Exit.STAGE_FAILED,
                hint="it is the Python of clusters.X.python, or the one that runs trainkit",
            ) from None
        if code and not may_fail:
            raise self._failure(argv, code, said)

    def _failure(self, argv: list[str], code: int, said: str) -> TrainkitError:
        lines = [line for line in said.splitlines() if line.strip()]
        errors = [line for line in lines if "ERROR" in line or "error:" in line]
        first = errors[0].strip() if errors else "".join(lines[-1:])
        known = (hint for words, hint in _HINTS if any(word in said for word in words))
        hint = next(known, "the whole of it is in the unit's log")
        if "pip" not in argv:
            first = f"{self.spec.python} cannot make a venv: {first}"
            hint = "install its venv and ensurepip modules (Debian: python3-venv)"
        return TrainkitError(
            f"engines.{self.spec.name}.venv = '{self.spec.venv}' could not be made (exit {code}):"
            f" {first}",
            exit=Exit.STAGE_FAILED,
            hint="\n  ".join([hint, *lines[-TAIL:]]),
        )


def run_logged(
    argv: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> tuple[int, str]:
    """(exit code of a program, what it printed without passwords and colours); that goes to the
    unit's log, too. Raises OSError where it cannot be run."""
    done = subprocess.run(
        argv,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        preexec_fn=die_with_parent_hook(os.getpid()),
    )
    said = without_passwords(_COLOR.sub("", done.stdout.decode(errors="replace")))
    sys.stderr.write(said)
    return done.returncode, said


_PIP = ("--disable-pip-version-check", "--no-input")
_QUIET = ("--progress-bar", "off")


def _environment() -> dict[str, str]:
    """The caller's, without what leads Python to other packages. pip keeps its settings."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return {**kept, "PIP_REQUIRE_VIRTUALENV": "0"}


def work(value: Mapping[str, Any], progress: ProgressCallback) -> dict[str, object]:
    """Make a venv. Returns {"python", "lines"}."""
    spec = InstallSpec.from_json(value)
    # another root may name the same folder
    lock = spec.venv.with_name(f"{spec.venv.name}.lock")
    with locked(lock, {"venv": str(spec.venv)}, remove=True):
        marker = _Install(spec, progress).run()
    return {"python": marker.python, "lines": list(marker.lines)}


if __name__ == "__main__":
    run_unit(work)
