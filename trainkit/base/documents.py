"""The JSON forms: every document names its schema and version, `{"schema": "run/1", ...}`."""

from __future__ import annotations

import datetime
import json
import time
from pathlib import Path
from typing import Any

from trainkit.base.errors import ConfigError


def document(schema: str, **values: object) -> dict[str, object]:
    """A versioned document, to be written or printed."""
    return {"schema": schema, **values}


def check_schema(value: Any, schema: str, path: Path) -> dict[str, Any]:
    """Check that a document read from `path` is of the form `schema`. Raises ConfigError naming
    what it is instead."""
    found = value.get("schema") if isinstance(value, dict) else None
    if found != schema:
        raise ConfigError(
            f"{path} holds {found!r}, not {schema!r}",
            hint="it was written by another version of trainkit, or it is another file",
        )
    return dict(value)


def read_document(path: Path, schema: str) -> dict[str, Any]:
    """Read a document of the form `schema`. Raises ConfigError where the file is missing, is no
    JSON or is of another form."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    return check_schema(value, schema, path)


def canonical_json(value: Any) -> str:
    """One spelling for equal values: what is hashed and compared."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def utc_text(seconds: float, unit: str = "milliseconds") -> str:
    """Seconds since the epoch as ISO 8601 in UTC, down to this unit."""
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return moment.isoformat(timespec=unit).replace("+00:00", "Z")


def utc_now() -> str:
    """Now, down to milliseconds."""
    return utc_text(time.time())
