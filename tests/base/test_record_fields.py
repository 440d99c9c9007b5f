"""Records: what is written is what is read, and what is wrong is named with its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from trainkit.base.errors import ConfigError
from trainkit.base.records import INLINE, OMIT_NONE, UNWRITTEN, FieldError, Record
from trainkit.jobs.schema import Tokenizer

FileRead = tuple[str, int, str | None]
Kind = Literal["text", "tokens"]
TOKENIZER = Tokenizer(name="t", type="bpe", vocab_size=300, eod_token="<eod>")


@dataclass(frozen=True)
class Place:
    folder: Path
    files: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Settings(Record):
    text_key: str
    fraction: float = 0.5


@dataclass(frozen=True)
class Spec(Record):
    SCHEMA = "spec/1"
    do: Literal["tokens"] = field(default="tokens", init=False)
    place: Place
    settings: Settings = field(metadata=INLINE)
    kind: Kind
    tokenizer: Tokenizer
    stamps: Mapping[str, Path] = field(default_factory=dict)
    read: tuple[FileRead, ...] = ()
    failure_class: str = field(default="infra", metadata={"key": "class"})
    kept: tuple[int, int] | None = field(default=None, metadata=OMIT_NONE)
    found: int = field(default=0, metadata=UNWRITTEN)
    source: Any = None


SPEC = Spec(
    Place(Path("/d"), (Path("/d/a"),)),
    Settings("text"),
    "text",
    TOKENIZER,
    {"text": Path("/s")},
    (("/d/a", 3, None),),
    kept=(1, 2),
    source={"rows": [1]},
)


def test_what_is_written_is_what_is_read() -> None:
    wire = json.loads(json.dumps(SPEC.to_json()))
    keys = "schema do place text_key fraction kind tokenizer stamps read class kept source"
    assert " ".join(wire) == keys
    assert wire["place"] == {"folder": "/d", "files": ["/d/a"]}
    assert wire["read"] == [["/d/a", 3, None]]
    assert Spec.from_json(wire) == SPEC == Spec.from_json({**wire, "of a newer version": 1})


def test_an_older_document_may_say_less() -> None:
    wire = {name: SPEC.to_json()[name] for name in ("schema", "place", "text_key", "kind")}
    read = Spec.from_json({**wire, "tokenizer": TOKENIZER.model_dump(mode="json")})
    assert read == Spec(SPEC.place, SPEC.settings, "text", TOKENIZER)
    assert "kept" not in read.to_json()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"schema": "spec/2"}, "Spec: 'spec/2' is not 'spec/1'"),
        ({"place": {"folder": 1}}, "Spec: place: folder: expected text, got 1"),
        ({"place": {}}, "Spec: place: folder is missing"),
        ({"text_key": None}, "Spec: text_key: expected text, got None"),
        ({"kind": "other"}, "Spec: kind: expected one of 'text', 'tokens', got 'other'"),
        ({"stamps": {"a": 1}}, "Spec: stamps.a: expected text, got 1"),
        ({"read": [["a", 1]]}, "Spec: read[0]: expected 3 values, got ['a', 1]"),
        ({"read": [["a", "1", None]]}, "Spec: read[0][1]: expected a whole number, got '1'"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(changes: dict[str, object], why: str) -> None:
    with pytest.raises(FieldError) as error:
        Spec.from_json({**SPEC.to_json(), **changes})
    assert str(error.value) == why


def test_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps(SPEC.to_json()))
    assert Spec.from_file(path) == SPEC
    path.write_text(json.dumps({**SPEC.to_json(), "kind": 1}))
    with pytest.raises(ConfigError, match=f"{path}: kind: expected one of"):
        Spec.from_file(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        Spec.from_file(path)
