"""docs/jobs.schema.json: current, and true of this repository's jobs.toml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli

from trainkit.jobs.json_schema import json_schema
from trainkit.jobs.schema import TABLES

REPOSITORY = Path(__file__).parents[2]
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


def objections(
    value: Any, schema: dict[str, Any], whole: dict[str, Any], path: str = ""
) -> list[str]:
    """What the schema's structure (types, keys, constants) has against a value."""
    schema = whole["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    if "anyOf" in schema:
        return min((objections(value, option, whole, path) for option in schema["anyOf"]), key=len)
    if "type" in schema and not isinstance(value, TYPES[schema["type"]]):
        return [f"{path}: no {schema['type']}"]
    if ("const" in schema and value != schema["const"]) or (
        "enum" in schema and value not in schema["enum"]
    ):
        return [f"{path}: {value!r} is not allowed"]
    found: list[str] = []
    for key, item in value.items() if isinstance(value, dict) else ():
        inner = schema.get("properties", {}).get(key, schema.get("additionalProperties", {}))
        found += (
            objections(item, inner, whole, f"{path}.{key}")
            if isinstance(inner, dict)
            else [f"{path}.{key}: unknown"]
        )
    return found


def test_the_file_in_docs_is_current() -> None:
    written = json.loads((REPOSITORY / "docs" / "jobs.schema.json").read_text())
    assert written == json_schema(), (
        "run: python -m trainkit.jobs.json_schema > docs/jobs.schema.json"
    )


def test_it_accepts_our_jobs_toml_and_refuses_a_spoiled_one() -> None:
    schema = json_schema()
    jobs = tomli.loads((REPOSITORY / "jobs.toml").read_text())
    assert objections(jobs, schema, schema) == []
    jobs["jobs"]["demo"]["modle"] = "x"
    jobs["clusters"]["here"]["ranks_per_node"] = "2"
    jobs["clusters"]["here"]["extends"] = ["other"]
    assert sorted(objections(jobs, schema, schema)) == [
        ".clusters.here.ranks_per_node: no integer",
        ".jobs.demo.modle: unknown",
    ]


def test_it_has_no_name_no_null_and_help_for_every_key() -> None:
    schema = json_schema()
    assert '"null"' not in json.dumps(schema)
    for model in TABLES.values():
        properties = schema["definitions"][model.__name__]["properties"]
        assert "name" not in properties and "extends" in properties
        assert not set(model.planned) & set(properties)
        assert all(value.get("description") or "$ref" in value for value in properties.values())
