"""What a Dockerfile reads: its base images, its build arguments, the files of its context.

Format: docs.docker.com/reference/dockerfile; details where that is silent are those of BuildKit's
frontend/dockerfile/parser (parser.go, split_command.go) and shell (lex.go). Nothing is executed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, field

SCRATCH = "scratch"  # FROM scratch: nothing, no image
# build arguments that builders know without ARG: docs.docker.com/reference/dockerfile,
# "Predefined ARGs"; the last of reproducible-builds.org
PREDEFINED = frozenset(
    [
        name
        for word in ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
        for name in (word, word.lower())
    ]
    + ["SOURCE_DATE_EPOCH"]
)
_DIRECTIVE = re.compile(r"#\s*([A-Za-z][A-Za-z0-9]*)\s*=\s*(.+?)\s*")
_HEREDOC = re.compile(r"<<(-?)\s*([\"']?)([A-Za-z_]\w*)\2")
_WITH_HEREDOC = ("RUN", "COPY", "ADD")
_DOCKERS_OWN = ("SHELL", "HEALTHCHECK")
_FLAG = re.compile(r"--([a-z][a-z-]*)(?:=(.*))?")
_VARIABLE = re.compile(
    r"\\(?P<escaped>.)|\$(?P<plain>[A-Za-z_]\w*)"
    r"|\$\{(?P<name>[A-Za-z_]\w*)(?:(?P<how>:?[-+?])(?P<word>[^}]*))?\}",
    re.DOTALL,
)
_REMOTE = re.compile(r"(https?|git|ssh)://|git@")


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Args:
        name: in upper case.
        rest: what stands after it, continued lines joined.
        line: where it begins, from 1.
    """

    name: str
    rest: str
    line: int


@dataclass(frozen=True)
class CopiedFiles:
    """What one COPY, ADD or RUN --mount=type=bind takes of the context.

    Args:
        sources: paths and patterns, relative to the context.
        excludes: patterns of --exclude.
        line: of the instruction.
    """

    sources: tuple[str, ...]
    excludes: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Dockerfile:
    """What a Dockerfile reads.

    Args:
        bases: images that it is built on, arguments filled in, without scratch; each once.
        arguments: names that ARG declares.
        copied: what is taken of the context.
        docker_format: it has SHELL or HEALTHCHECK, which images of OCI's format have not.
    """

    bases: tuple[str, ...]
    arguments: frozenset[str]
    copied: tuple[CopiedFiles, ...]
    docker_format: bool = False


def read_dockerfile(path: Path, build_args: Mapping[str, str]) -> Dockerfile:
    """What a Dockerfile reads when it is built with these arguments.

    Raises ConfigError (exit 6) with its line where it has no FROM, a FROM with a variable that
    nothing gives, or a line that is not an instruction.
    """
    try:
        text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    except OSError as error:
        raise ConfigError(
            f"cannot read the Dockerfile {path}: {error.strerror}",
            exit=Exit.STAGE_FAILED,
            hint="containers.X.dockerfile is relative to the folder of jobs.toml",
        ) from None
    return _Reader(path, build_args).read(text)


def instructions(text: str, path: Path) -> Iterator[Instruction]:
    """The instructions of a Dockerfile, comments left out, lines joined, heredocs skipped."""
    lines = text.split("\n")
    escape = _escape_sign(lines)
    continued = re.compile(rf"(?:^|(?<=[^{re.escape(escape)}])){re.escape(escape)}[ \t]*$")
    number = 0
    while number < len(lines):
        begin = number
        whole, number = _joined(lines, number, continued)
        if not whole.strip():
            continue
        name, _, rest = whole.strip().partition(" ")
        name, tab, behind = name.partition("\t")
        if tab:
            rest = f"{behind} {rest}"
        if not re.fullmatch(r"[A-Za-z]+", name):
            raise _wrong(path, begin + 1, f"'{name[:40]}' is not an instruction")
        found = Instruction(name.upper(), rest.strip(), begin + 1)
        yield found
        number = _after_heredocs(lines, number, found, path)


def _escape_sign(lines: list[str]) -> str:
    """What continues a line: parser directives stand before everything else."""
    for line in lines:
        found = _DIRECTIVE.fullmatch(line.strip())
        if found is None:
            break
        if found[1].lower() == "escape" and found[2] in ("`", "\\"):
            return found[2]
    return "\\"


def _joined(lines: list[str], number: int, continued: re.Pattern[str]) -> tuple[str, int]:
    """(the instruction that begins at this line or "", the number of the line after it). Comments
    and empty lines within it are not part of it."""
    whole = ""
    begun = False
    while number < len(lines):
        line = lines[number].rstrip("\r")
        number += 1
        if line.lstrip().startswith("#") or (begun and not line.strip()):
            if begun:
                continue
            return "", number
        shorter = continued.sub("", line)
        whole += shorter
        if shorter == line:
            break
        begun = True
    return whole, number


def _after_heredocs(lines: list[str], number: int, found: Instruction, path: Path) -> int:
    """The line after the heredocs that an instruction begins."""
    if found.name not in _WITH_HEREDOC:
        return number
    for heredoc in _HEREDOC.finditer(found.rest):
        ends = heredoc[3]
        while number < len(lines):
            line = lines[number].rstrip("\r")
            number += 1
            if (line.lstrip("\t") if heredoc[1] else line) == ends:
                break
        else:
            raise _wrong(path, found.line, f"the heredoc <<{ends} does not end")
    return number


def _wrong(path: Path, line: int, message: str, hint: str = "") -> ConfigError:
    problem = Problem(message, SourceLocation(str(path), line), hint)
    return ConfigError([problem], exit=Exit.STAGE_FAILED)


def fill_in(text: str, variables: Mapping[str, str]) -> str:
    """`text` with $NAME, ${NAME}, ${NAME:-WORD}, ${NAME:+WORD} filled in, as lex.go does it.
    Raises KeyError with the name of a variable that is not there."""

    def value(found: re.Match[str]) -> str:
        if found["escaped"] is not None:
            return found["escaped"]
        name = found["plain"] or found["name"]
        how = found["how"] or ""
        given = variables.get(name)
        if how.startswith(":") and given == "":
            given = None
        if how.endswith("+"):
            return "" if given is None else fill_in(found["word"], variables)
        if given is None and how.endswith("-"):
            return fill_in(found["word"], variables)
        if given is None:
            raise KeyError(name)
        return given

    return _VARIABLE.sub(value, text)


def _without_quotes(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        return text[1:-1]
    return text


def _assignments(rest: str) -> Iterator[tuple[str, str | None]]:
    """The NAME[=VALUE] of ARG and ENV; `ENV NAME VALUE` too."""
    words = re.findall(r"(?:\"(?:\\.|[^\"\\])*\"|'[^']*'|\\.|[^\s\"'\\])+", rest)
    if words and "=" not in words[0] and len(words) > 1:
        yield words[0], rest.partition(words[0])[2].strip()
        return
    for word in words:
        name, equals, value = word.partition("=")
        yield name, _without_quotes(value) if equals else None


@dataclass
class _Reader:
    """Goes through the instructions once."""

    path: Path
    build_args: Mapping[str, str]
    bases: list[str] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)
    arguments: set[str] = field(default_factory=set)
    copied: list[CopiedFiles] = field(default_factory=list)
    docker_format: bool = False
    before: dict[str, str] = field(default_factory=dict)  # of ARG before the first FROM
    here: dict[str, str] = field(default_factory=dict)  # ARG and ENV of the stage at hand

    def read(self, text: str) -> Dockerfile:
        begun = False
        for each in instructions(text, self.path):
            if each.name == "FROM":
                begun = True
                self._from(each)
            elif each.name == "ARG":
                self._arg(each, begun)
            elif not begun:
                raise _wrong(self.path, each.line, f"{each.name} stands before the first FROM")
            elif each.name in _DOCKERS_OWN:
                self.docker_format = True
            elif each.name == "ENV":
                self._env(each)
            elif each.name in ("COPY", "ADD"):
                self._copy(each)
            elif each.name == "RUN":
                self._run(each)
        if not begun:
            raise _wrong(self.path, 0, "the Dockerfile has no FROM")
        return Dockerfile(
            tuple(dict.fromkeys(self.bases)),
            frozenset(self.arguments),
            tuple(self.copied),
            self.docker_format,
        )

    def _from(self, each: Instruction) -> None:
        words = [word for word in each.rest.split() if not word.startswith("--")]
        if len(words) not in (1, 3) or (len(words) == 3 and words[1].lower() != "as"):
            raise _wrong(self.path, each.line, "FROM takes IMAGE [AS NAME]")
        try:
            image = _without_quotes(fill_in(words[0], self.before))
        except KeyError as error:
            name = error.args[0]
            key = "base" if name == "BASE_IMAGE" else f"build_args.{name}"
            raise _wrong(
                self.path,
                each.line,
                f"FROM {words[0]}: nothing gives {name} a value",
                f"give it in containers.X.{key}, or a default: ARG {name}=... before the first"
                " FROM",
            ) from None
        if not image:
            raise _wrong(self.path, each.line, f"FROM {words[0]} names no image: it is empty")
        self._base(image)
        self.stages.append(words[2].lower() if len(words) == 3 else "")
        self.here = {}

    def _base(self, image: str) -> None:
        """An image that is read, where it is not a stage of the file (a name, or a number)."""
        if image.lower() not in (SCRATCH, *filter(None, self.stages)):
            self.bases.append(image)

    def _arg(self, each: Instruction, begun: bool) -> None:
        for name, default in _assignments(each.rest):
            self.arguments.add(name)
            known = self.here if begun else self.before
            value = self.build_args.get(name, default)
            if value is None:
                value = self.before.get(name)
            elif name not in self.build_args:
                try:
                    value = fill_in(value, known)
                except KeyError:
                    value = None
            if value is not None:
                known[name] = value

    def _env(self, each: Instruction) -> None:
        for name, value in _assignments(each.rest):
            try:
                self.here[name] = fill_in(value or "", self.here)
            except KeyError:
                self.here.pop(name, None)

    def _copy(self, each: Instruction) -> None:
        flags, rest = _flags(each.rest)
        if "from" in flags:
            self._read_from(flags["from"][-1])
            return
        if rest.startswith("["):
            try:
                words = [str(word) for word in json.loads(rest)]
            except ValueError:
                words = rest.split()
        else:
            words = rest.split()
        if len(words) < 2:
            raise _wrong(self.path, each.line, f"{each.name} takes SOURCE... DESTINATION")
        sources = [source for source in words[:-1] if not source.startswith("<<")]
        if each.name == "ADD":
            sources = [source for source in sources if not _REMOTE.match(source)]
        self._take(sources, tuple(flags.get("exclude", ())), each.line)

    def _read_from(self, stage: str) -> None:
        """COPY --from=, --mount=from=: a stage by name or number, or another image."""
        try:
            stage = fill_in(stage, {**self.before, **self.here})
        except KeyError:
            return  # builders take no variables there either
        if not stage.isdecimal():
            self._base(stage)

    def _run(self, each: Instruction) -> None:
        """RUN --mount=type=bind reads the context, where it names no other stage."""
        flags, _ = _flags(each.rest)
        for text in flags.get("mount", ()):
            mount: dict[str, str] = {}
            for part in text.split(","):
                name, _, value = part.partition("=")
                mount[name] = value
            if "from" in mount:
                self._read_from(mount["from"])
            elif mount.get("type", "bind") == "bind":
                self._take([mount.get("source") or mount.get("src") or "."], (), each.line)

    def _take(self, sources: list[str], excludes: tuple[str, ...], line: int) -> None:
        """What is not known before the build may be anything in the context."""
        filled = []
        for source in sources:
            try:
                filled.append(_without_quotes(fill_in(source, self.here)))
            except KeyError:
                filled.append(".")
        if filled:
            self.copied.append(CopiedFiles(tuple(filled), excludes, line))


def _flags(rest: str) -> tuple[dict[str, list[str]], str]:
    """The --NAME[=VALUE] before the rest of an instruction."""
    flags: dict[str, list[str]] = {}
    while rest.startswith("--"):
        word, _, behind = rest.partition(" ")
        found = _FLAG.fullmatch(word.strip())
        if found is None:
            break
        flags.setdefault(found[1], []).append(found[2] or "")
        rest = behind.lstrip()
    return flags, rest
