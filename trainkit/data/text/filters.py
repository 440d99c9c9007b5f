"""Which documents are left out, and what is done to those that stay."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainkit.base.errors import Exit
from trainkit.base.extras import MissingExtra
from trainkit.data.text.documents import TextDocument, get_field


@dataclass
class DocumentFilter:
    """The filters of a dataset, in this order: drop, ftfy, length.

    Args:
        drop: field path -> values; a document with one of them is left out, as SlimPajama's
            extraction drops its books. A value that is no text is compared as JSON writes it:
            "true", "3".
        min_document_bytes: documents of less text in UTF-8 are left out; at 0 empty ones stay.
        fix_text: repair mojibake with ftfy.

    Attributes:
        dropped: {reason: documents} so far. present: {field path of drop: documents that have
        it} so far; of those left out by another path not counted.

    Raises ConfigError (exit 6): fix_text without ftfy.
    """

    drop: Mapping[str, Sequence[str]] = field(default_factory=dict)
    min_document_bytes: int = 0
    fix_text: bool = False
    dropped: dict[str, int] = field(default_factory=dict)
    present: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.present = dict.fromkeys(self.drop, 0)
        self._fix: Callable[[str], str] | None
        if self.fix_text:
            self._fix = _ftfy()
        else:
            self._fix = None
        self._drop = [(path, frozenset(values)) for path, values in self.drop.items()]

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
        raise MissingExtra(
            "fix_text = true needs ftfy, which is not installed", "data", exit=Exit.STAGE_FAILED
        ) from None
    fix: Callable[[str], Any] = ftfy.fix_text
    return lambda text: str(fix(text))
