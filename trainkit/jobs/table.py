"""What all tables of jobs.toml share: the base model, errors of rules between keys, kinds of
values."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue
from pydantic_core import PydanticCustomError

NAME = r"^[a-z0-9][a-z0-9_-]*$"


VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*"
# not strict: TOML and JSON have lists, not tuples
Strings = Annotated[tuple[str, ...], Field(strict=False)]
SecretNames = Annotated[
    tuple[Annotated[str, Field(pattern=VARIABLE + r"\??$")], ...], Field(strict=False)
]
# an option of another engine: what TOML and JSON can hold
EngineScalar = str | int | float | bool
EngineValue = EngineScalar | list[EngineScalar | list[EngineScalar]] | dict[str, JsonValue]


def _said_in_json(arguments: object) -> object:
    """Before each value is tried as each kind that it may be of, and refused as often."""
    for name, value in arguments.items() if isinstance(arguments, dict) else ():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            raise wrong(
                name, f"{name} = {value}: no engine is given nan, inf or a time; write it as text"
            ) from None
    return arguments


EngineArguments = Annotated[dict[str, EngineValue], BeforeValidator(_said_in_json)]
# what the launcher says to every rank, over all that a table says
OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE"),
)


def wrong(key: str, message: str) -> PydanticCustomError:
    """An error of a rule between keys, reported where `key` was written."""
    return PydanticCustomError("rule", "{message}", {"key": key, "message": message})


def needs(key: str, message: str) -> PydanticCustomError:
    """As `wrong`, for a rule that something is missing: not asked of a table that others extend."""
    return PydanticCustomError("needs", "{message}", {"key": key, "message": message})


def _without_rank_variables(env: dict[str, str]) -> dict[str, str]:
    for name in OF_RANKS:
        if name in env:
            raise wrong(
                name, f"{name} has no effect here: the launcher sets it for every rank; remove it"
            )
    return env


Environment = Annotated[
    dict[Annotated[str, Field(pattern=VARIABLE + "$")], str],
    AfterValidator(_without_rank_variables),
]


# the context in which a table of jobs.toml is validated, and nothing that is recorded: a rule that
# came later does not make a run unreadable
AS_WRITTEN = {"written": True}


class Table(BaseModel):
    """A table of jobs.toml: immutable, unknown keys refused."""

    # built when it is first asked for: not for each table again, and then within those that have it
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, defer_build=True
    )
    planned: ClassVar[tuple[str, ...]] = ()  # keys that a later version will take
