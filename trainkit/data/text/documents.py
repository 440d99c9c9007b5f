"""What is read of a file of text: documents, lines that are none, members of archives that are
skipped; and the settings by which they are found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainkit.base.lazy_dataclasses import dataclass

SKIP_HINT = "see datasets.X.on_error to go on without such lines"


class TextDocument(NamedTuple):
    """One document.

    line: from 1, in its file or archive member; a row of a table, a piece of a .txt.
    text: one sequence, or several.
    where: the file, and the member of an archive behind "!".
    fields: everything that was read of it, for filters; of a JSON line and a row its text too.
    """

    line: int
    text: str | list[str]
    where: str
    fields: Mapping[str, Any]


class BadLine(NamedTuple):
    """A line that is not a document. `kind` is one of few words to count by; `around`: what stands
    there, cut."""

    line: int
    where: str
    kind: str
    reason: str
    around: str
    hint: str = SKIP_HINT


class SkippedMember(NamedTuple):
    """A member of an archive that is not text, by its ending; a record of a web archive without
    any."""

    where: str
    reason: str


@dataclass(frozen=True)
class ReadOptions:
    """How documents are found in a file.

    Args:
        text_key: the key that holds the text; dots go into objects.
        text_separator: what stands between the documents of a .txt; None: it is one document.
        max_document_bytes: of text, in UTF-8; longer ones are bad. A JSON line may have three times
            that.
        fields: further keys that are wanted, for columns; None: all, as they stand in the file
            (whole numbers beyond 64 bit too, which JSON lines else have as floats).
    """

    text_key: str = "text"
    text_separator: str | None = None
    max_document_bytes: int = 2**26
    fields: tuple[str, ...] | None = ()


ParsedItem = TextDocument | BadLine | SkippedMember
_MISSING = object()


def get_field(value: Any, path: str) -> Any:
    """What stands at "a.b" in {"a.b": ..}, or else in {"a": {"b": ..}}; None where nothing does."""
    if isinstance(value, Mapping) and path in value:
        return value[path]
    for key in path.split("."):
        value = value.get(key, _MISSING) if isinstance(value, Mapping) else _MISSING
        if value is _MISSING:
            return None
    return value


def without_field(value: Mapping[str, object], path: str) -> dict[str, object]:
    """`value` without what `get_field` finds in it at `path`."""
    if path in value:
        return {key: inner for key, inner in value.items() if key != path}
    key, _, rest = path.partition(".")
    inside = value.get(key)
    if rest and isinstance(inside, Mapping):
        return {**value, key: without_field(inside, rest)}
    return dict(value)
