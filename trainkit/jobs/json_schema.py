"""The JSON schema of a jobs.toml, for editors.

`python -m trainkit.jobs.json_schema > docs/jobs.schema.json` writes it. It differs from the
resolved Job's: references are names, tables may extend others, and nothing is required, because a
base or jobs.local.toml may give it. `invoke check` knows what is missing.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic.json_schema import models_json_schema

from trainkit.jobs.references import (
    ARRAYS_OF_TABLES,
    BLENDS,
    REFERENCES,
    TABLES_OF_REFERENCES,
)
from trainkit.jobs.schema import (
    NAME,
    TABLES,
    Defaults,
    NotifySettings,
    Table,
)

_REF = "#/definitions/"
_STRING_LIST = {"type": "array", "items": {"type": "string"}}
_INCLUDE = {
    "description": "file patterns: the tables of these files belong to this one",
    **_STRING_LIST,
}
_EXTENDS = {
    "description": "tables of the same kind that lie below this one",
    "anyOf": [{"type": "string"}, _STRING_LIST],
}


def json_schema() -> dict[str, Any]:
    """The schema, in JSON Schema draft 7, which editors' TOML plugins know."""
    models: list[type[Table]] = [*TABLES.values(), Defaults, NotifySettings]
    _, whole = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF + "{model}"
    )
    definitions = {
        name: _for_toml(definition) for name, definition in whole["$defs"].items() if name != "Part"
    }
    for kind, model in TABLES.items():
        properties = definitions[model.__name__]["properties"]
        del properties["name"]
        for key in REFERENCES.get(kind, {}):
            properties[key] = {"description": properties[key]["description"], "type": "string"}
        for key in TABLES_OF_REFERENCES.get(kind, {}):
            names = {"propertyNames": {"pattern": NAME}, "additionalProperties": {"type": "string"}}
            properties[key] = {
                "description": properties[key]["description"],
                "type": "object",
                **names,
            }
        for key in BLENDS if kind == "datasets" else ():
            weights = {
                "type": "object",
                "propertyNames": {"pattern": NAME},
                "additionalProperties": {"type": "number"},
            }
            properties[key] = {
                "description": properties[key]["description"],
                "anyOf": [weights, _STRING_LIST],
            }
        for key, references in ARRAYS_OF_TABLES.get(kind, {}).items():
            items = definitions[properties[key]["items"]["$ref"].removeprefix(_REF)]["properties"]
            for name in references:
                named = _STRING_LIST if "items" in items[name] else {"type": "string"}
                items[name] = {"description": items[name]["description"], **named}
        properties["extends"] = _EXTENDS
    groups: dict[str, object] = {
        kind: {
            "type": "object",
            "propertyNames": {"pattern": NAME},
            "additionalProperties": {"$ref": _REF + model.__name__},
        }
        for kind, model in TABLES.items()
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "jobs.toml of trainkit",
        "type": "object",
        "additionalProperties": False,
        "properties": {
            "include": _INCLUDE,
            "defaults": {"$ref": _REF + Defaults.__name__},
            "notify": {"$ref": _REF + NotifySettings.__name__},
            **groups,
        },
        "definitions": definitions,
    }


def _for_toml(value: Any, names: bool = False) -> Any:
    """pydantic's schema without what TOML or an editor has no use for: null, generated titles,
    required keys.

    Args:
        value: a schema, or a part of one.
        names: the keys of `value` are names of properties, not words of JSON Schema.
    """
    if isinstance(value, list):
        return [_for_toml(item) for item in value]
    if not isinstance(value, dict):
        return value
    if names:
        return {key: _for_toml(item) for key, item in value.items()}
    left = {
        key: item
        for key, item in value.items()
        if key not in ("title", "required") and not (key == "default" and item is None)
    }
    if isinstance(left.get("description"), str):
        left["description"] = " ".join(left["description"].split())  # docstrings are wrapped
    options = [option for option in left.get("anyOf", []) if option != {"type": "null"}]
    left.pop("anyOf", None)
    left |= {"anyOf": options} if len(options) > 1 else dict(*options)
    return {
        key: _for_toml(item, names=key in ("properties", "patternProperties"))
        for key, item in left.items()
    }


def main() -> None:
    """Print the schema."""
    print(json.dumps(json_schema(), indent=1))


if __name__ == "__main__":
    main()
