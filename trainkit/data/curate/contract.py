"""What a step of curation is: it sees one document after another, may change it, and says why one
is left out."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple, Protocol

from trainkit.base.errors import ConfigError, Exit
from trainkit.base.lazy_dataclasses import dataclass


class Dropped(NamedTuple):
    """Why a document is left out.

    reason: one of few words to count by: those of datatrove where it has the rule.
    value, limit: what was found, and what the rule allows.
    detail: what a person wants to see: a place, a name.
    """

    reason: str
    value: float = 0.0
    limit: float = 0.0
    detail: str = ""


@dataclass
class CrawledDocument:
    """A document on its way.

    Attributes:
        text: steps may change it.
        fields: everything else that was read of it; steps may add to it.
        key: 64 bits of text and fields as they were read: the same wherever it lies.
        copies: how often it is written.
    """

    text: str
    fields: dict[str, object]
    key: int
    copies: int = 1


class CurationStep(Protocol):
    """One step, made once for many documents. The same document, the same answer: nothing may
    hang on the documents before it."""

    def __call__(self, document: CrawledDocument) -> Dropped | None:
        """None: it stays, perhaps changed."""


def read_lists(paths: tuple[str, ...]) -> frozenset[str]:
    """The lines of some files, in lower case; what follows "#" at the start of a line is none.
    Raises ConfigError (exit 6): one is not UTF-8."""
    lines: list[str] = []
    for path in paths:
        try:
            lines += Path(path).read_text(encoding="utf-8").lower().split("\n")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path} is not UTF-8, at byte {error.start}: {error.object[error.start]:#x}",
                exit=Exit.STAGE_FAILED,
                hint="a list is a text file, an entry a line",
            ) from None
    entries = (line.strip() for line in lines)
    return frozenset(line for line in entries if line and not line.startswith("#"))
