"""The schema's complaints in the words of the person who wrote the TOML: which key, what it
holds, what it may hold."""

from __future__ import annotations

import difflib
import re
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from trainkit.base.errors import Problem, SourceLocation
from trainkit.jobs.provenance import SET, SourcedTable, SourcedValue
from trainkit.jobs.references import REFERENCES
from trainkit.jobs.schema import TABLES, Table

NOT_YET = "is planned, but not in this version of trainkit"
ENTRY = 3  # number, tag and key: where in an array of tagged tables an error is
NAME_RULE = "names match [a-z0-9][a-z0-9_-]*"
_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "string_type": "a string",
    "bool_type": "true or false",
    "model_type": "a table",
    "dict_type": "a table",
    "tuple_type": "an array",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "above"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "below"),
}

MOST_LISTED = 60  # words in a hint

# What other programs call it.
SYNONYMS = {
    "accumulate_grad_batches": "gradient_accumulation_steps",
    "batch_size": "global_batch_size",
    "block_size": "seq_length",
    "context_length": "seq_length",
    "dropout": "hidden_dropout",
    "dtype": "precision",
    "eval_every": "eval_interval",
    "eval_steps": "eval_interval",
    "grad_clip": "clip_grad",
    "gradient_clipping": "clip_grad",
    "intermediate_size": "ffn_hidden_size",
    "learning_rate": "lr",
    "max_iters": "train_iters",
    "max_grad_norm": "clip_grad",
    "max_lr": "lr",
    "max_position": "max_position_embeddings",
    "max_seq_len": "seq_length",
    "max_steps": "train_iters",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_query_groups",
    "n_layer": "num_layers",
    "n_layers": "num_layers",
    "num_heads": "num_attention_heads",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "num_nodes": "nodes",
    "num_steps": "train_iters",
    "pp": "pipeline_model_parallel_size",
    "random_seed": "seed",
    "rope_theta": "rotary_base",
    "save_every": "save_interval",
    "save_steps": "save_interval",
    "sequence_length": "seq_length",
    "steps": "train_iters",
    "tensor_parallel_size": "tensor_model_parallel_size",
    "tp": "tensor_model_parallel_size",
    "cp": "context_parallel_size",
    "train_steps": "train_iters",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
    "warmup_iters": "lr_warmup_iters",
    "warmup_steps": "lr_warmup_iters",
    "zero": "zero_stage",
}


def closest_name(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` probably means: the same in another spelling, what other
    programs call it, the most similar, else the only one that begins with it."""
    words = list(known)
    plain = word.lower().replace("-", "_")
    if same := next((each for each in words if plain in (each, each.replace("-", "_"))), None):
        return same
    if (meant := SYNONYMS.get(plain)) in words:
        return meant
    beginning = [each for each in words if word and each.startswith(word)]
    if len(beginning) > 1:
        return None  # which of them?
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6) or beginning
    return close[0] if close else None


def suggest(word: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint: the nearest known word, with `prefix` before it, else all known words, or a few of
    many."""
    words = sorted(known)
    close = closest_name(word, words)
    if close:
        return f"did you mean '{prefix}{close}'?"
    if (
        word
        and len(beginning := [f"'{prefix}{each}'" for each in words if each.startswith(word)]) > 1
    ):
        return f"did you mean {', '.join(beginning[:-1])} or {beginning[-1]}?"
    if len(words) > MOST_LISTED:
        near = difflib.get_close_matches(word, words, n=3, cutoff=0.4)
        return f"the nearest of {len(words)}: {', '.join(near)}" if near else ""
    if words:
        return f"known: {', '.join(words)}"
    return "no such table is defined"


def describe_value(value: Any) -> str:
    """A TOML value with its type."""
    match value:
        case bool():
            return f"the boolean {str(value).lower()}"
        case int():
            return f"the integer {value}"
        case float():
            return f"the number {value}"
        case str():
            return f"the string '{value}'"
        case list() | tuple():
            return "an array"
        case dict():
            return "a table"
    return f"the date or time {value}"


def dotted_key(node: SourcedTable | SourcedValue) -> str:
    """A key as its writer would say it: jobs.demo.training.lr, or training.lr from --set."""
    return ".".join(node.path)


def schema_problems(
    error: ValidationError, model: type[Table], section: SourcedTable
) -> Iterator[tuple[tuple[str | int, ...], str, Problem]]:
    """Everything pydantic found wrong with a table: (where in the table, pydantic's type of
    error, the problem).

    Args:
        error: what validating `section.plain()` raised.
        model: the schema's model of the table.
        section: the table, with places.
    """
    errors = error.errors(include_url=False)
    missing = {found["loc"] for found in errors if found["type"] == "missing"}
    # missing keys that a typo or a dotted name explains
    explained: set[tuple[str | int, ...]] = set()
    found_problems = []
    for found in errors:
        spot = _Spot(model, section, found["loc"])
        if found["type"] == "extra_forbidden":
            close = closest_name(spot.key, spot.model.model_fields)
            explained |= {(*spot.above, close)} if close else set()
            if spot.is_dotted_name():
                explained |= {loc for loc in missing if loc[:-1] == spot.above}
        problem = _problem_of_entry(found, spot) or _problem(found, spot)
        found_problems.append((found["loc"], found["type"], problem))
    return (each for each in found_problems if not (each[1] == "missing" and each[0] in explained))


class _Spot:
    """Where in a table an error is: the innermost table around it, that table's model, the key,
    and what was written."""

    def __init__(
        self, model: type[Table], section: SourcedTable, loc: tuple[str | int, ...]
    ) -> None:
        self.model = model
        self.section = section
        self.field: FieldInfo | None = None
        self.node: SourcedTable | SourcedValue | None = section
        self.key = ""
        self.above: tuple[str | int, ...] = ()
        self.inside: tuple[str | int, ...] = ()  # of an array: number of the entry, tag, key
        for depth, part in enumerate(loc):
            if part == "[key]" or not isinstance(self.node, SourcedTable):
                # inside an array, or about a key of `env`: the whole value is as near as it gets
                entry = len(loc) - depth == ENTRY and isinstance(part, int)
                self.inside = loc[depth:] if entry else ()
                break
            if part == "dict" and part not in self.node.entries:
                continue  # which of JSON's types pydantic took the table above for
            part = str(part)  # of an array of tables
            inner = _table_of(self.field) if self.field else self.model
            named = _named_tables(self.field)
            self.section = self.node
            self.key = part
            self.above = loc[:depth]
            self.node = self.section.entries.get(part)
            if named:
                self.model = named
                self.field = None
            elif inner:
                inner.model_rebuild()  # a field of what is written further down is known
                self.model = inner
                self.field = inner.model_fields.get(part)

    @property
    def place(self) -> SourceLocation:
        return (self.node or self.section).place

    @property
    def header(self) -> str:
        return f"[{dotted_key(self.section)}]"

    def is_dotted_name(self) -> bool:
        """Whether this is what TOML makes of [jobs.a.b]: a table b where job a has no such key."""
        return (
            isinstance(self.node, SourcedTable)
            and len(self.node.path) == 3
            and self.node.path[0] in TABLES
            and self.node.place != SET
        )


def _table_of(field: FieldInfo) -> type[Table] | None:
    """The model of a key that holds a table."""
    if isinstance(field.annotation, types.UnionType):
        options = typing.get_args(field.annotation)
    else:
        options = (field.annotation,)
    return next(
        (option for option in options if isinstance(option, type) and issubclass(option, Table)),
        None,
    )


def _named_tables(field: FieldInfo | None) -> type[Table] | None:
    """The model of the tables in a key that holds tables by name, or an array of them."""
    if field is None or typing.get_origin(field.annotation) not in (dict, tuple):
        return None
    kind = next(each for each in typing.get_args(field.annotation)[::-1] if each is not ...)
    return kind if isinstance(kind, type) and issubclass(kind, Table) else None


def _problem(found: ErrorDetails, spot: _Spot) -> Problem:
    kind = found["type"]
    value = found["input"]
    context = found.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(spot)
    if kind == "missing" and isinstance(found["loc"][-1], int):
        return Problem(
            f"{dotted_key(spot.node or spot.section)}: {len(value)} values are too few",
            spot.place,
            spot.field.description or "" if spot.field else "",
        )
    if kind == "missing":
        return _missing_key(spot)
    # of the schema's own: about the key it names, in the table it is at
    if kind in ("rule", "needs"):
        node: SourcedTable | SourcedValue | None = spot.node
        for part in str(context["key"]).split("."):
            node = node.entries.get(part) if isinstance(node, SourcedTable) else None
        about = dotted_key(spot.node or spot.section)
        return Problem(f"{about}: {context['message']}", (node or spot.node or spot.section).place)
    key = _key_of(found, spot)
    hint = spot.field.description or "" if spot.field else ""
    if kind in _EXPECTED:
        return _wrong_type(key, kind, value, spot, hint)
    if kind == "literal_error":
        allowed = _allowed(spot.field, context["expected"])
        return Problem(f"{key}: expected {allowed}, got {describe_value(value)}", spot.place)
    if kind in _BOUNDS:
        name, words = _BOUNDS[kind]
        bound = context[name]
        said = f"{bound:g}" if isinstance(bound, float) else bound
        return Problem(f"{key} = {value} must be {words} {said}", spot.place, hint)
    if kind == "string_pattern_mismatch":
        return Problem(
            f"{key}: {_toml(value)} does not match {context['pattern']}", spot.place, hint
        )
    if kind == "string_too_short":
        return Problem(f"{key} is empty", spot.place, hint)
    return Problem(f"{key}: {found['msg']}, got {describe_value(value)}", spot.place, hint)


def _unknown_key(spot: _Spot) -> Problem:
    key = dotted_key(spot.node) if spot.node else spot.key
    if spot.key in spot.model.planned:
        return Problem(f"{key} {NOT_YET}", spot.place, "remove it")
    known = [name for name in spot.model.model_fields if name != "name"]
    if spot.model in TABLES.values() and spot.place != SET:
        known.append("extends")
    table = key.rpartition(".")[0]
    if spot.place == SET:  # its paths are those of the resolved job
        return Problem(
            f"unknown key '{key}'",
            SET,
            suggest(spot.key, known, prefix=f"{table}." if table else ""),
        )
    message = f"unknown key '{spot.key}' in [{table}]"
    if (inside := _inner_table(spot)) and not closest_name(spot.key, known):
        return Problem(message, spot.place, f"'{inside[1]}' belongs into [{table}.{inside[0]}]")
    if spot.is_dotted_name() and not closest_name(spot.key, known):
        return Problem(
            message,
            spot.place,
            f"if [{key}] was meant as a name: {NAME_RULE}, without dots; for example"
            f" [{table}-{spot.key}]",
        )
    return Problem(message, spot.place, suggest(spot.key, known))


def _key_of(found: ErrorDetails, spot: _Spot) -> str:
    key = dotted_key(spot.node) if spot.node else ".".join(map(str, found["loc"]))
    return f"{key}[{spot.inside[0]}].{spot.inside[-1]}" if spot.inside else key


def _problem_of_entry(found: ErrorDetails, spot: _Spot) -> Problem | None:
    """What is wrong with the keys of a table in an array whose tables differ by a tag."""
    array = dotted_key(spot.node or spot.section)
    if found["type"] == "union_tag_not_found":
        key = found["ctx"]["discriminator"].strip("'")
        return Problem(f"{array}: a table without '{key}'", spot.place, f"add {key} = NAME")
    if found["type"] == "union_tag_invalid":
        tag = found["ctx"]["tag"]
        known = re.findall("'([^']+)'", found["ctx"]["expected_tags"])
        return Problem(f"{array}: there is no '{tag}'", spot.place, suggest(tag, known))
    if not spot.inside or found["type"] not in ("missing", "extra_forbidden"):
        return None
    number, tag, key = spot.inside
    if found["type"] == "missing":
        return Problem(f"{array}[{number}]: '{tag}' needs '{key}'", spot.place)
    message = f"{array}[{number}]: unknown key '{key}' of '{tag}'"
    tables = [table for table in _tables_in(spot.field) if _has_tag(table, tag)]
    return Problem(message, spot.place, suggest(str(key), tables[0].model_fields))


def _tables_in(field: FieldInfo | None) -> Iterator[type[Table]]:
    """The models of the tables in an array."""
    found: list[object] = [field.annotation if field else None]
    while found:
        kind = found.pop()
        if isinstance(kind, type) and issubclass(kind, Table):
            yield kind
        found += typing.get_args(kind)


def _has_tag(table: type[Table], tag: str | int) -> bool:
    return any(typing.get_args(field.annotation) == (tag,) for field in table.model_fields.values())


def _inner_table(spot: _Spot) -> tuple[str, str] | None:
    """(table, key) where a table inside this one has a key of that name, or of what other
    programs call by it."""
    for name, field in spot.model.model_fields.items():
        inner = _table_of(field)
        if inner and not any(name in references for references in REFERENCES.values()):
            found = next(
                (
                    key
                    for key in (spot.key, spot.key.lower(), SYNONYMS.get(spot.key.lower()))
                    if key in inner.model_fields
                ),
                None,
            )
            if found:
                return name, found
    return None


def _missing_key(spot: _Spot) -> Problem:
    if (
        spot.field
        and _table_of(spot.field)
        and not any(spot.key in references for references in REFERENCES.values())
    ):
        return Problem(f"missing table [{dotted_key(spot.section)}.{spot.key}]", spot.place)
    return Problem(
        f"missing key '{spot.key}' in {spot.header}",
        spot.place,
        f"{spot.key}: {spot.field.description}" if spot.field else "",
    )


def _wrong_type(key: str, kind: str, value: Any, spot: _Spot, hint: str) -> Problem:
    if spot.place == SET and kind == "string_type" and not isinstance(value, (dict, list)):
        hint = f"for a string: --set '{key}=\"{_toml(value)}\"'"
    if (
        isinstance(spot.node, SourcedValue)
        and isinstance(spot.node.value, list)
        and not isinstance(value, list)
    ):
        item = " in the array"
    else:
        item = ""
    return Problem(
        f"{key}: expected {_EXPECTED[kind]}{item}, got {describe_value(value)}", spot.place, hint
    )


def _allowed(field: FieldInfo | None, expected: str) -> str:
    """The values of a key; where it has others too, those that pydantic expected."""
    if field is None or typing.get_origin(field.annotation) is not typing.Literal:
        return expected
    values = [_toml(value) for value in typing.get_args(field.annotation)]
    if len(values) > 1:
        return " or ".join([", ".join(values[:-1]), values[-1]])
    return values[0]


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return f"'{value}'"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
