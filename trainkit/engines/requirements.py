"""What pip installs for a foreign engine: the lines known for its version, and jobs.toml's over
them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError
from trainkit.base.git import holds_password, without_passwords
from trainkit.engines.rank.versions import bounded_package
from trainkit.jobs.job_tables import EngineSource

KNOWN = Path(__file__).with_name("requirements.toml")
# the name that a requirement begins with (PEP 508)
_NAME = re.compile(r"\s*([A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?)\s*(?=[\[<>=!~;@\s]|$)")
# what wheels of an engine's tree are built with
BUILT_WITH = ("torch", "wheel", "setuptools", "build", "pytest-runner", "pybind11")
# options of a requirements file that name another file
_FILE_OPTION = re.compile(r"\s*(-r|-c|--requirement|--constraint|-e|--editable)(?:\s+|\s*=\s*)(.+)")


def known_lines(engine: str, version: str) -> tuple[str, ...]:
    """Those of requirements.toml for a version of an engine; none where it has none."""
    fitting = {
        each["version"]: tuple(each["pip"])
        for each in tomllib.loads(KNOWN.read_text(encoding="utf-8"))["lines"]
        if each["engine"] == engine and version.startswith(each["version"])
    }
    return fitting[max(fitting, key=len)] if fitting else ()


def package_of(line: str) -> str | None:
    """The package that a line requires, in the spelling that names it once (PEP 503); None for
    an option, a path or a URL alone."""
    said = _NAME.match(line)
    return None if said is None else re.sub(r"[-_.]+", "-", said[1]).lower()


def merged_lines(known: Sequence[str], given: Sequence[str]) -> tuple[str, ...]:
    """`known` without the packages that `given` names, then `given`."""
    named = {package_of(line) for line in given} - {None}
    return (*(line for line in known if package_of(line) not in named), *given)


def required_versions(source: EngineSource, engine: str, version: str) -> tuple[str, ...]:
    """The lines for a version of an engine, with jobs.toml's over them, that bound a package's
    version.

    Args:
        source: the [engines.X] table.
        engine: its engine.
        version: of its tree.
    """
    lines = merged_lines(known_lines(engine, version), source.requirements)
    return tuple(line for line in lines if bounded_package(line) is not None)


def absolute_line(line: str, folder: Path) -> str:
    """A line whose file (-r, -c, -e, ./PATH) is found from `folder`, wherever pip reads it."""
    option = _FILE_OPTION.fullmatch(line)
    if option and "://" not in option[2]:
        return f"{option[1]} {folder / option[2]}"
    if line.startswith(("./", "../")):
        return str(folder / line)
    return line


def build_lines(lines: Sequence[str]) -> tuple[str, ...]:
    """Those of `lines` that wheels of a tree are built with, and pip's own options."""
    return tuple(
        line
        for line in lines
        if package_of(line) in BUILT_WITH or re.match(r"--|-[cfi]\b", line.strip())
    )


def refuse_lines(name: str, lines: Sequence[str]) -> None:
    """Raise ConfigError (exit 3) for lines of engines.NAME.requirements that are none, or that
    hold a password."""
    for line in lines:
        if "\n" in line or "\r" in line or not line.strip():
            raise ConfigError(
                f"engines.{name}.requirements has a line that is none: {line!r}",
                hint="one requirement, or one option of a requirements file, in each",
            )
        if holds_password(line):
            raise ConfigError(
                f"engines.{name}.requirements has a line with a user or password in its URL:"
                f" {without_passwords(line)}",
                hint="put it into pip's own configuration, or into ~/.netrc",
            )
