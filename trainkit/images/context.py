"""Which files of a context go into an image: what COPY and ADD name, less what .dockerignore
takes out.

Patterns are matched as moby/patternmatcher does it (patternmatcher.go), which docker, BuildKit,
podman and buildah share.
"""

from __future__ import annotations

import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.base.errors import ConfigError, Exit, Problem, SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.images.dockerfile import CopiedFiles

IGNORE = ".dockerignore"
CONTAINER_IGNORE = ".containerignore"  # of podman and buildah, before the other
_WILD = re.compile(r"[*?\[\\]")


@dataclass(frozen=True)
class IgnorePattern:
    """One line of .dockerignore.

    Args:
        text: the pattern, cleaned, without "!".
        included: it begins with "!": what it matches is taken again.
        regex: of paths relative to the context, with "/".
    """

    text: str
    included: bool
    regex: re.Pattern[str]


@dataclass(frozen=True)
class IgnoreRules:
    """A .dockerignore."""

    patterns: tuple[IgnorePattern, ...] = ()

    def ignores(self, path: str) -> bool:
        """Whether a file or folder is left out: the last pattern that matches it, or a folder
        above it, says so."""
        parts = path.split("/")
        above = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
        left_out = False
        for pattern in self.patterns:
            # one that would change nothing is not asked
            if pattern.included == left_out and any(map(pattern.regex.fullmatch, above)):
                left_out = not pattern.included
        return left_out

    def may_hold_more(self, folder: str) -> bool:
        """Whether something below a folder that is left out may be taken again."""
        for pattern in self.patterns:
            if pattern.included:
                fixed = _WILD.split(pattern.text, maxsplit=1)[0]
                wild = fixed != pattern.text
                if f"{fixed}/".startswith(f"{folder}/"):
                    return True
                if wild and f"{folder}/".startswith(fixed):
                    return True
        return False


def pattern_regex(text: str) -> re.Pattern[str]:
    """A cleaned pattern as a regular expression (patternmatcher.go, Pattern.compile). Raises
    re.error for one that is none."""
    said = ""
    at = 0
    while at < len(text):
        sign = text[at]
        at += 1
        if sign == "*" and text[at : at + 1] == "*":
            at += 1
            if text[at : at + 1] == "/":
                at += 1
            said += ".*" if at == len(text) else "(?:.*/)?"
        elif sign == "*":
            said += "[^/]*"
        elif sign == "?":
            said += "[^/]"
        elif sign == "\\":
            said += re.escape(text[at : at + 1] or "\\")
            at += 1
        elif sign in "[]":
            said += sign
        elif sign in "-^":  # of a class, where there is one
            said += sign if "[" in said.rpartition("]")[2] else re.escape(sign)
        else:
            said += re.escape(sign)
    return re.compile(said, re.DOTALL)


def read_ignore(path: Path | None) -> IgnoreRules:
    """The rules of an ignore file; None: there is none. Raises ConfigError (exit 6) with its
    line."""
    if path is None:
        return IgnoreRules()
    text = path.read_bytes().decode("utf-8-sig", "surrogateescape")
    found = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("#") or not line.strip():
            continue
        pattern = line.strip()
        included = pattern.startswith("!")
        cleaned = _cleaned(pattern.removeprefix("!").strip())
        try:
            if not cleaned:
                raise re.error("it is empty")
            found.append(IgnorePattern(cleaned, included, pattern_regex(cleaned)))
        except re.error as error:
            problem = Problem(f"'{line.strip()}' is not a pattern: {error}", _place(path, number))
            raise ConfigError([problem], exit=Exit.STAGE_FAILED) from None
    return IgnoreRules(tuple(found))


def _cleaned(pattern: str) -> str:
    """As filepath.Clean, without the "/" before it."""
    if not pattern:
        return ""
    cleaned = posixpath.normpath(pattern)
    return cleaned.lstrip("/") if len(cleaned) > 1 else cleaned


def _place(path: Path, line: int) -> SourceLocation:
    return SourceLocation(str(path), line)


def ignore_file(dockerfile: Path, context: Path, builder: str) -> Path | None:
    """The ignore file that a builder reads: DOCKERFILE.dockerignore beside the Dockerfile, then
    the context's own."""
    names = [context / IGNORE]
    if builder in ("podman", "buildah"):
        names.insert(0, context / CONTAINER_IGNORE)
    else:
        names.insert(0, dockerfile.with_name(dockerfile.name + IGNORE))
    return next((path for path in names if path.is_file()), None)


@dataclass(frozen=True)
class ContextFiles:
    """What a build takes of its context.

    Args:
        files: regular files, in order.
        links: what symbolic links point to, by their names in the context.
        modes: permissions that are not the usual ones (644), in octal, by name in the context.
    """

    files: tuple[Path, ...]
    links: Mapping[str, str]
    modes: Mapping[str, str]


def context_files(
    context: Path, rules: IgnoreRules, copied: Sequence[CopiedFiles], dockerfile: Path
) -> ContextFiles:
    """The files that COPY and ADD take.

    Args:
        context: the folder.
        rules: of its ignore file.
        copied: what the Dockerfile takes.
        dockerfile: for messages.

    Raises ConfigError (exit 6) with the Dockerfile's line for a name that is not there.
    """
    walk = _Walk(context, rules)
    for each in copied:
        excluded = IgnoreRules(
            tuple(
                IgnorePattern(text, False, pattern_regex(_cleaned(text)))
                for text in each.excludes
                if _cleaned(text)
            )
        )
        for source in each.sources:
            objection = walk.take(source, excluded)
            if objection:
                problem = Problem(objection, _place(dockerfile, each.line))
                raise ConfigError([problem], exit=Exit.STAGE_FAILED)
    return walk.result()


@dataclass
class _Walk:
    """Collects files of a context."""

    context: Path
    rules: IgnoreRules
    found: dict[str, os.stat_result] = field(default_factory=dict)

    def take(self, source: str, excluded: IgnoreRules) -> str:
        """Add what a source of COPY names; returns what is wrong with it."""
        name = _cleaned(source)
        if name == ".." or name.startswith("../"):
            return f"{source} is outside of the context {self.context}"
        if name in ("", ".", "/"):
            self._below("", excluded)
            return ""
        if _WILD.search(name):
            for match in self._matches(name):
                self._add(match, excluded)
            return ""
        if not os.path.lexists(self.context / name):
            return f"{source} is not in the context {self.context}"
        if self.rules.ignores(name) and not self.rules.may_hold_more(name):
            return f"{source} is left out of the context by its ignore file"
        self._add(name, excluded)
        return ""

    def _matches(self, pattern: str) -> Iterator[str]:
        """Names that a pattern with wildcards matches, as filepath.Match level by level."""
        first = _WILD.split(pattern, maxsplit=1)[0].rpartition("/")[0]
        try:
            regex = pattern_regex(pattern)
        except re.error:
            return
        depth = pattern.count("/")
        yield from self._matching(first, regex, None if "**" in pattern else depth)

    def _matching(self, folder: str, regex: re.Pattern[str], depth: int | None) -> Iterator[str]:
        for entry in _entries(self.context / folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if regex.fullmatch(name):
                yield name
            elif entry.is_dir(follow_symlinks=False) and (depth is None or name.count("/") < depth):
                yield from self._matching(name, regex, depth)

    def _add(self, name: str, excluded: IgnoreRules) -> None:
        """A source itself: a link there is followed, in the context."""
        path = self.context / name
        if path.is_symlink():
            self._file(name, excluded)
            target = os.path.realpath(path)
            inside = os.path.relpath(target, os.path.realpath(self.context))
            if inside.startswith("..") or not os.path.exists(target):
                return
            name = inside
        if (self.context / name).is_dir():
            self._below(name, excluded)
        else:
            self._file(name, excluded)

    def _below(self, folder: str, excluded: IgnoreRules) -> None:
        for entry in _entries(self.context / folder):
            name = f"{folder}/{entry.name}" if folder else entry.name
            if not entry.is_dir(follow_symlinks=False):
                self._file(name, excluded)
            elif not self.rules.ignores(name) or self.rules.may_hold_more(name):
                self._below(name, excluded)

    def _file(self, name: str, excluded: IgnoreRules) -> None:
        if not self.rules.ignores(name) and not excluded.ignores(name):
            self.found[name] = os.lstat(self.context / name)

    def result(self) -> ContextFiles:
        files = []
        links = {}
        modes = {}
        for name, status in sorted(self.found.items()):
            mode = stat.S_IMODE(status.st_mode)
            if stat.S_ISLNK(status.st_mode):
                links[name] = os.readlink(self.context / name)
            elif stat.S_ISREG(status.st_mode):
                files.append(self.context / name)
                if mode != 0o644:
                    modes[name] = f"{mode:o}"
        return ContextFiles(tuple(files), links, modes)


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(
            f"cannot read {folder}, which the image takes: {error.strerror}",
            exit=Exit.STAGE_FAILED,
        ) from None
