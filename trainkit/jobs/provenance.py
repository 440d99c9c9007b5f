"""A table of values that remember where each was written and what it overrode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trainkit.base.errors import SourceLocation
from trainkit.base.lazy_dataclasses import dataclass, field, replace

BUILT_IN = SourceLocation("built-in default")
SET = SourceLocation("--set")


@dataclass(frozen=True)
class SourcedValue:
    """One value (a scalar or a whole array) and where it comes from.

    Args:
        value: the value.
        place: file and line of its key, or BUILT_IN, or SET.
        path: its key as written there, ("jobs", "demo", "nodes"); for --set the path of the
            resolved job.
        overrode: what it replaced, newest first.
    """

    value: Any
    place: SourceLocation
    path: tuple[str, ...] = ()
    overrode: tuple[SourcedValue, ...] = ()

    def over(self, older: SourcedValue) -> SourcedValue:
        """This value, having replaced `older`."""
        return replace(
            self, overrode=(*self.overrode, replace(older, overrode=()), *older.overrode)
        )

    def to_json(self) -> dict[str, object]:
        """As kept in job.json, newest first."""
        return {**_as_json(self), "overrode": [_as_json(older) for older in self.overrode]}


def _as_json(origin: SourcedValue) -> dict[str, object]:
    return {"value": origin.value, "place": str(origin.place)}


@dataclass(frozen=True)
class SourcedTable:
    """A table whose leaves are Origins.

    Args:
        place: file and line of its header.
        path: its key as written there.
        entries: its values and tables.
        is_array: it is an array of tables, whose keys are "0", "1", ..
    """

    place: SourceLocation
    path: tuple[str, ...] = ()
    entries: dict[str, SourcedTable | SourcedValue] = field(default_factory=dict)
    is_array: bool = False

    def plain(self) -> Mapping[str, object] | Sequence[object]:
        """The values alone."""
        values = {
            key: node.plain() if isinstance(node, SourcedTable) else node.value
            for key, node in self.entries.items()
        }
        return list(values.values()) if self.is_array else values

    def with_entry(self, key: str, node: SourcedTable | SourcedValue) -> SourcedTable:
        """This table with one entry more, or another in its place."""
        return replace(self, entries={**self.entries, key: node})

    def without(self, key: str) -> SourcedTable:
        """This table without an entry."""
        return replace(self, entries={k: node for k, node in self.entries.items() if k != key})

    def sections(self) -> Iterator[tuple[str, SourcedTable]]:
        """The tables in it, by name."""
        return ((key, node) for key, node in self.entries.items() if isinstance(node, SourcedTable))

    def value(self, key: str) -> Any:
        """The value of a leaf; None where there is none."""
        node = self.entries.get(key)
        return node.value if isinstance(node, SourcedValue) else None

    def over(self, older: SourcedTable, *, keep_place: bool = False) -> SourcedTable:
        """This table laid over `older`: tables merge, scalars and arrays replace, also arrays of
        tables; what is laid over an array by its numbers merges.

        Args:
            older: the table below.
            keep_place: the result stands where `older` stood, as it does under an overlay.
        """
        if self.is_array:
            return self
        merged = dict(older.entries)
        for key, node in self.entries.items():
            below = older.entries.get(key)
            if isinstance(node, SourcedTable) and isinstance(below, SourcedTable):
                merged[key] = node.over(below, keep_place=keep_place)
            elif isinstance(node, SourcedValue) and isinstance(below, SourcedValue):
                merged[key] = node.over(below)
            else:
                merged[key] = node
        home = older if keep_place else self
        return SourcedTable(home.place, home.path, merged, older.is_array)
