"""Specs of units as JSON: stamps hash them, so their keys stay what they were, and one reader gives
back what one writer wrote."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainkit.data.fetch.recipe import FetchRecipe, FetchSpec, ListingSpec, fetch_spec_from_json
from trainkit.data.fetch.retry import RemoteFileInfo
from trainkit.data.text.filters import FilterSettings
from trainkit.data.unit_specs import (
    CheckSpec,
    EncodingSettings,
    MergeShard,
    MergeSpec,
    ReadingSettings,
    TextRecipe,
    TextSpec,
    TokenizerSettings,
    TokenizerSpec,
    TokensSpec,
)

HERE = Path("/data/d")
RECIPE = FetchRecipe(
    "https://h/a.jsonl", HERE / "a.jsonl", RemoteFileInfo(3, "e"), listing=HERE / "listing.json"
)
READING = ReadingSettings("text", filters=FilterSettings({"meta.set": ("a",)}))
ENCODING = EncodingSettings("<eod>")
SHARD = MergeShard("00000", HERE / "s", {"path": "a"}, {"tokens": HERE / "t"}, (0, 2, 0, 1))
READING_KEYS = (
    "text_key text_separator drop min_document_bytes max_document_bytes fix_text on_error"
    " max_reject_fraction"
)
SPECS: list[tuple[Any, Any, str]] = [
    (FetchSpec(RECIPE), fetch_spec_from_json, "do recipe"),
    (ListingSpec(HERE, {"files": []}), fetch_spec_from_json, "do path listing"),
    (
        TextSpec("stdlib", {"v": "3"}, TextRecipe(HERE, ("a.py",)), HERE / "a", "text"),
        TextSpec.from_json,
        "do source identity recipe path text_key",
    ),
    (
        TokensSpec(
            "00000", HERE / "a", RECIPE, 3, READING, ENCODING, HERE / "t", HERE / "p", HERE / "r"
        ),
        TokensSpec.from_json,
        f"do name first shard recipe size tokenizer prefix rejects {READING_KEYS}"
        " eod_token append_eod encoder special_tokens",
    ),
    (
        TokenizerSpec(
            TokenizerSettings("bpe", "<eod>", 300), HERE / "t", READING, (HERE / "a",), 3, ()
        ),
        TokenizerSpec.from_json,
        "type vocab_size path vocab_file merge_file url vocab_url merge_url training_bytes"
        f" eod_token append_eod special_tokens tokenizer {READING_KEYS} shards total_bytes given",
    ),
    (
        MergeSpec("d", HERE / "t", "<eod>", (SHARD,), False, {}, None, HERE / "m", HERE / "r"),
        MergeSpec.from_json,
        "name tokenizer eod_token shards shuffle declared prefix former manifest rejects",
    ),
    (
        CheckSpec("d", HERE / "t", "<eod>", (HERE / "p",), HERE / "m"),
        CheckSpec.from_json,
        "name tokenizer eod_token prefixes manifest",
    ),
]


@pytest.mark.parametrize(("spec", "read", "keys"), SPECS, ids=lambda value: type(value).__name__)
def test_a_spec_is_written_with_the_keys_that_stamps_know(spec: Any, read: Any, keys: str) -> None:
    value = json.loads(json.dumps(spec.to_json()))
    assert set(value) == set(keys.split())
    assert read(value) == spec


def test_a_recipe_and_a_shard_too() -> None:
    assert set(RECIPE.to_json()) == {
        "url",
        "shown",
        "path",
        "known",
        "token",
        "endpoint",
        "anonymous",
        "keep",
        "listing",
    }
    assert set(SHARD.to_json()) == {"name", "prefix", "source", "stamps", "kept"}


def test_programs_of_units_start_without_the_schema() -> None:
    """Thousands of them start, each in an interpreter of its own: pydantic would be a third of
    that. What a supervisor imports leaves out the stages, which it never makes."""
    for program, left_out in (
        ("trainkit.data.tokenize.shard_worker", {"pydantic", "torch"}),
        ("trainkit.stages.array_task", {"pydantic", "numpy"}),
        ("trainkit.launch.main", {"trainkit.stages.registry", "numpy", "torch"}),
    ):
        code = f"import sys, {program}; print(*sys.modules)"
        argv = [sys.executable, "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert not left_out & set(done.stdout.split()), program
