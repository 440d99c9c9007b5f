"""Which documents are left out, and what is done to those that stay."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.extras import MissingExtra
from trainkit.base.lazy_dataclasses import dataclass, field
from trainkit.base.records import Record
from trainkit.data.text.documents import TextDocument, get_field


@dataclass(frozen=True)
class FilterSettings(Record):
    """The filters of a dataset, keys of its table: what differs from these values changes the text
    that is encoded. A new one is a field here and of `Dataset`, and a step of `DocumentFilter`.

    Args:
        drop: field path -> values; a document with one of them is left out, as SlimPajama's
            extraction drops its books. A value that is not text is compared as JSON writes it:
            "true", "3".
        min_document_bytes: documents of less text in UTF-8 are left out; at 0 empty ones stay.
        fix_text: repair mojibake with ftfy.
    """

    drop: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    min_document_bytes: int = 0
    fix_text: bool = False

    @property
    def lacking(self) -> MissingExtra | None:
        """What they need and this Python does not have."""
        if self.fix_text and importlib.util.find_spec("ftfy") is None:
            return _no_ftfy()
        return None


class DocumentFilter:
    """Applies the filters of a dataset, in this order: drop, ftfy, length.

    Attributes:
        dropped: {reason: documents} so far. present: {field path of drop: documents that have
        it} so far; of those left out by another path not counted.

    Raises ConfigError (exit 6): fix_text without ftfy.
    """

    def __init__(self, settings: FilterSettings) -> None:
        self.dropped: dict[str, int] = {}
        self.present = dict.fromkeys(settings.drop, 0)
        self.min_document_bytes = settings.min_document_bytes
        self._fix = _ftfy() if settings.fix_text else None
        self._drop = [(path, frozenset(values)) for path, values in settings.drop.items()]

    def __call__(self, record: TextDocument) -> list[bytes] | None:
        """The document's sequences in UTF-8, or None: it is left out."""
        for path, values in self._drop:
            value = get_field(record.fields, path)
            self.present[path] += value is not None
            if (
                value is not None
                and (words := value if isinstance(value, str) else json.dumps(value, default=str))
                in values
            ):
                self._count(f"{path} = {words}")
                return None
        parts = [record.text] if isinstance(record.text, str) else record.text
        if self._fix is not None:
            parts = [self._fix(part) for part in parts]
        data = [part.encode() for part in parts]
        if self.min_document_bytes and sum(map(len, data)) < self.min_document_bytes:
            self._count(f"below {self.min_document_bytes} bytes")
            return None
        return data

    def _count(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1


def _ftfy() -> Callable[[str], str]:
    try:
        import ftfy
    except ImportError:
        raise _no_ftfy() from None
    fix: Callable[[str], Any] = ftfy.fix_text
    return lambda text: str(fix(text))


def _no_ftfy() -> MissingExtra:
    return MissingExtra(
        "fix_text = true needs ftfy, which is not installed", "data", exit=Exit.STAGE_FAILED
    )
