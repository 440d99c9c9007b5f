"""A table of values that remember where each was written and what it overrode."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from trainkit.base.errors import Place

BUILT_IN = Place("built-in default")
SET = Place("--set")


@dataclass(frozen=True)
class Origin:
    """One value (a scalar or a whole array) and where it comes from.

    Args:
        value: the value. place: file and line of its key, or BUILT_IN, or SET. path: its key as
        written there, ("jobs", "demo", "nodes"); for --set the path of the resolved job.
        overrode: what it replaced, newest first.
    """

    value: Any
    place: Place
    path: tuple[str, ...] = ()
    overrode: tuple[Origin, ...] = ()

    def over(self, older: Origin) -> Origin:
        """This value, having replaced `older`."""
        return replace(
            self, overrode=(*self.overrode, replace(older, overrode=()), *older.overrode)
        )

    def to_json(self) -> dict[str, Any]:
        """As kept in job.json, newest first."""
        return {**_as_json(self), "overrode": [_as_json(older) for older in self.overrode]}


def _as_json(origin: Origin) -> dict[str, Any]:
    return {"value": origin.value, "place": str(origin.place)}


@dataclass(frozen=True)
class Section:
    """A table whose leaves are Origins."""

    place: Place
    path: tuple[str, ...] = ()
    entries: dict[str, Section | Origin] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The values alone."""
        return {
            key: node.plain() if isinstance(node, Section) else node.value
            for key, node in self.entries.items()
        }

    def with_entry(self, key: str, node: Section | Origin) -> Section:
        """This table with one entry more, or another in its place."""
        return replace(self, entries={**self.entries, key: node})

    def without(self, key: str) -> Section:
        """This table without an entry."""
        return replace(self, entries={k: node for k, node in self.entries.items() if k != key})

    def sections(self) -> Iterator[tuple[str, Section]]:
        """The tables in it, by name."""
        return ((key, node) for key, node in self.entries.items() if isinstance(node, Section))

    def value(self, key: str) -> Any:
        """The value of a leaf; None where there is none."""
        node = self.entries.get(key)
        if isinstance(node, Origin):
            return node.value
        return None

    def over(self, older: Section, *, keep_place: bool = False) -> Section:
        """This table laid over `older`: tables merge, scalars and arrays replace.

        Args:
            older: the table below.
            keep_place: the result stands where `older` stood, as it does under an overlay.
        """
        merged = dict(older.entries)
        for key, node in self.entries.items():
            below = older.entries.get(key)
            if isinstance(node, Section) and isinstance(below, Section):
                merged[key] = node.over(below, keep_place=keep_place)
            elif isinstance(node, Origin) and isinstance(below, Origin):
                merged[key] = node.over(below)
            else:
                merged[key] = node
        if keep_place:
            home = older
        else:
            home = self
        return Section(home.place, home.path, merged)
