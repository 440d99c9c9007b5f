"""Hosts that are suspected of failures: left out for a while. One file a host below
<root>/quarantine, so that every run on that root knows."""

from __future__ import annotations

import datetime
import time
from pathlib import Path

from trainkit.base.documents import read_document, utc_text
from trainkit.base.errors import ConfigError
from trainkit.base.files import write_json
from trainkit.base.lazy_dataclasses import dataclass
from trainkit.base.records import Record

FOLDER = "quarantine"


@dataclass(frozen=True)
class QuarantineEntry(Record):
    """One host's. Times are ISO 8601, in UTC.

    Args:
        host: its name, in small letters.
        since: when it was suspected last.
        until: when it may run again.
        why: what it did.
        run: the run that it failed in; "": a person left it out.
    """

    SCHEMA = "quarantine/1"
    host: str
    since: str
    until: str
    why: str
    run: str


def _path(root: Path, host: str) -> Path:
    return root / FOLDER / f"{host.lower()}.json"  # a hostfile's names hold no slash


def quarantine_host(root: Path, host: str, why: str, run: str, seconds: float) -> QuarantineEntry:
    """Leave `host` out of runs on this root for so many seconds from now."""
    now = time.time()
    since, until = (utc_text(moment, "seconds") for moment in (now, now + seconds))
    found = QuarantineEntry(host.lower(), since, until, why, run)
    write_json(_path(root, host), found.to_json())
    return found


def read_quarantine(root: Path, now: datetime.datetime | None = None) -> dict[str, QuarantineEntry]:
    """The hosts that are left out now, by name in small letters. Raises ConfigError where a file
    there is none of these."""
    now = now or datetime.datetime.now(datetime.UTC)
    found = {}
    for path in sorted((root / FOLDER).glob("*.json")):
        value = read_document(path, QuarantineEntry.SCHEMA)
        try:
            entry = QuarantineEntry.from_json(value)
            over = datetime.datetime.fromisoformat(entry.until) <= now
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"{path} is not a valid quarantine entry: {error}", hint="delete it"
            ) from None
        if not over:
            found[entry.host] = entry
    return found


def end_quarantine(root: Path, host: str) -> bool:
    """Let a host run again; whether it was left out."""
    there = host.lower() in read_quarantine(root)
    if there:  # only then the name is one of a file there, and of no other
        _path(root, host).unlink(missing_ok=True)
    return there
