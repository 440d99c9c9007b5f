"""Paths in a table of jobs.toml made absolute: they are relative to its folder."""

from __future__ import annotations

import glob
import os
from pathlib import Path

from trainkit.base.lazy_dataclasses import dataclass, replace
from trainkit.jobs.curation import STEP_PATHS, STEP_PATTERNS
from trainkit.jobs.provenance import SourcedTable, SourcedValue

_PATHS = {  # keys that hold paths, relative to the folder of jobs.toml
    "clusters": ("root", "hostfile"),
    "datasets": ("paths", "prefixes"),
    "tokenizers": ("path", "vocab_file", "merge_file"),
    "jobs": ("init_from",),
    "engines": ("source", "venv"),
    "containers": ("dockerfile", "context"),
}


def _is_remote(value: str) -> bool:
    """Whether it names a model of the hub (jobs.X.init_from), or a git repository elsewhere
    (git-clone(1), "GIT URLS": with a scheme, or HOST:PATH)."""
    return value.startswith("hf:") or "://" in value or ":" in value.partition("/")[0]


def absolute_paths(section: SourcedTable, kind: str, root: Path) -> SourcedTable:
    """`section`, a table of a kind, with its paths made absolute; what is not a path is left to
    the schema.

    Args:
        section: the table.
        kind: "clusters", "jobs", ...
        root: the folder of jobs.toml.
    """
    folder = _Folder(root)
    for key in _PATHS.get(kind, ()):
        section = folder.with_absolute(section, key)
    evaluations = section.entries.get("evaluations") if kind == "jobs" else None
    if isinstance(evaluations, SourcedTable):
        for number, table in evaluations.sections():
            absolute = folder.with_absolute(table, "include_path")
            evaluations = evaluations.with_entry(number, absolute)
        section = section.with_entry("evaluations", evaluations)
    return folder.with_absolute_steps(section) if kind == "datasets" else section


@dataclass(frozen=True)
class _Folder:
    root: Path

    def with_absolute(self, section: SourcedTable, key: str) -> SourcedTable:
        """`section` with the path or paths under `key` made absolute; what is not a path is left to
        the schema."""
        node = section.entries.get(key)
        if not isinstance(node, SourcedValue):
            return section
        if isinstance(node.value, list):
            return section.with_entry(
                key, replace(node, value=[self._pattern(item) for item in node.value])
            )
        if isinstance(node.value, str) and _is_remote(node.value):
            return section
        return section.with_entry(key, replace(node, value=self._file(node.value)))

    def with_absolute_steps(self, section: SourcedTable) -> SourcedTable:
        """`section` with the paths of its curation's steps made absolute."""
        curate = section.entries.get("curate")
        steps = curate.entries.get("steps") if isinstance(curate, SourcedTable) else None
        if not isinstance(steps, SourcedValue) or not isinstance(steps.value, list):
            return section
        assert isinstance(curate, SourcedTable)
        whole = [
            {key: self._step_value(key, value) for key, value in step.items()}
            if isinstance(step, dict)
            else step
            for step in steps.value
        ]
        return section.with_entry("curate", curate.with_entry("steps", replace(steps, value=whole)))

    def _step_value(self, key: str, value: object) -> object:
        if key in STEP_PATTERNS and isinstance(value, list):
            return [*map(self._pattern, value)]
        if key not in STEP_PATHS:
            return value
        if isinstance(value, list):
            return [self._file(item) for item in value]
        return self._file(value)

    def _file(self, value: object) -> object:
        """Also of FILE:NAME."""
        if not isinstance(value, str) or not value:
            return value
        return os.path.abspath(self.root / os.path.expanduser(value))

    def _pattern(self, value: object) -> object:
        """A glob pattern made absolute: brackets in the folder's own name are not a pattern."""
        if not isinstance(value, str) or not value:
            return value
        return os.path.normpath(
            os.path.join(glob.escape(str(self.root)), os.path.expanduser(value))
        )
