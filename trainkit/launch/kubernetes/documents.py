"""Reading the API's documents, of which any part may be missing."""

from __future__ import annotations

from collections.abc import Mapping

Document = dict[str, object]
Documents = list[Document]


def value_at(document: object, *path: str) -> object:
    """What is at a path of keys; None where nothing is."""
    for key in path:
        if not isinstance(document, Mapping):
            return None
        document = document.get(key)
    return document


def text_at(document: object, *path: str) -> str:
    """A text, or a number as one; "" where there is none."""
    found = value_at(document, *path)
    return "" if found is None or isinstance(found, Mapping | list) else str(found)


def table_at(document: object, *path: str) -> Document:
    """An object; an empty one where there is none."""
    found = value_at(document, *path)
    return found if isinstance(found, dict) else {}


def rows_at(document: object, *path: str) -> Documents:
    """The objects of an array; none where there is none."""
    found = value_at(document, *path)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def name_of(document: object) -> str:
    """The name of an object of the API."""
    return text_at(document, "metadata", "name")


def uid_of(document: object) -> str:
    """What tells an object from a later one of the same name."""
    return text_at(document, "metadata", "uid")


def condition(document: object, type: str) -> Document:
    """The condition of that type in the object's status; an empty one where there is none."""
    found = (row for row in rows_at(document, "status", "conditions") if row.get("type") == type)
    return next(found, {})


def is_true(document: object, type: str) -> bool:
    """Whether the object's status has this condition as true."""
    return condition(document, type).get("status") == "True"
