"""A configuration as hydra composes it of a command line, by its published rules and none of
trainkit's code: what hydra refuses is refused, and what this does not know is refused too.

Rules: hydra 1.1, "The Override Grammar" and "Extended override grammar"; OmegaConf 2.1, "Variable
interpolation", "Resolvers", "Struct flag" and its YAML loader (floats without a point, no dates).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml


class Refused(Exception):
    """What the engine would have ended with."""


MISSING = "???"
OPTION = re.compile(r"--(config-path|config-name|config-dir)(?:=(.*))?", re.DOTALL)
OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w.]*)(?:=(.*))?", re.DOTALL)
INTEGER = re.compile(r"[+-]?(0|[1-9](_?\d)*)")
FLOAT = re.compile(
    r"[+-]?((\d[\d_]*\.(\d[\d_]*)?|\.\d[\d_]*)([eE][+-]?\d[\d_]*)?|\d[\d_]*[eE][+-]?\d[\d_]*"
    r"|inf|nan)",
    re.IGNORECASE,
)
# characters of a value that needs no quotation marks
PLAIN = re.compile(r"(?:[A-Za-z0-9_/\-+.$%*@?|: ]|\\[\\()\[\]{}:=, \t])+")
REFERENCE = re.compile(r"\$\{([^${}]+)\}")


# --- The command line


def compose(words: list[str], script: Path) -> dict[str, Any]:
    """The configuration of `script WORDS...`, all interpolations resolved.

    Raises Refused.
    """
    folder = script.parent / "conf"
    name = "megatron_gpt_config"
    overrides = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        option = OPTION.fullmatch(word)
        if option is None:
            if word.startswith("-"):
                raise Refused(f"unrecognized arguments: {word}")
            overrides.append(word)
            continue
        if option[2] is None and not waiting:
            raise Refused(f"argument --{option[1]}: expected one argument")
        value = waiting.pop(0) if option[2] is None else option[2]
        if option[1] == "config-name":
            name = value
        elif option[1] == "config-path":
            # absolute, or relative to the file with the main function
            folder = script.parent / value
        else:
            raise Refused(f"--{option[1]} is none of the published command lines")
    path = folder / (name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if not path.is_file():
        raise Refused(f"Cannot find primary config '{name}'. Search path: {folder}")
    config = read_yaml(path)
    for word in overrides:
        override(config, word)
    found: dict[str, Any] = resolved(config, config, ())
    return found


def override(config: dict[str, Any], word: str) -> None:
    """Apply one word. Raises Refused for what is none, and for a key that is not there."""
    found = OVERRIDE.fullmatch(word)
    if found is None or (found[3] is None and found[1] != "~"):
        raise Refused(f"Error when parsing '{word}': no KEY=VALUE")
    sign, key = found[1] or "", found[2]
    *parents, last = key.split(".")
    table: Any = config
    for parent in parents:
        if not isinstance(table, dict) or parent not in table:
            if sign in ("", "~"):
                raise Refused(f"Could not override '{key}': Key '{parent}' is not in struct")
            table[parent] = {}
        table = table[parent]
    there = isinstance(table, dict) and last in table
    if sign == "~":
        if not there:
            raise Refused(f"Could not delete from config. '{key}' does not exist.")
        del table[last]
        return
    value = read_value(found[3])
    if sign == "" and not there:
        raise Refused(f"Could not override '{key}': Key '{last}' is not in struct; use +{word}")
    if sign == "+" and there and table[last] is not None and not isinstance(value, (dict, list)):
        raise Refused(f"Could not append to config. An item is already at '{key}'.")
    table[last] = value


def read_value(text: str) -> Any:
    """The right side of an override. Raises Refused."""
    text = text.strip(" ")
    value, rest = _element(text)
    if rest.startswith(","):
        raise Refused(f"Ambiguous value '{text}': a sweep; quote it, or [{text}]")
    if rest:
        raise Refused(f"mismatched input '{rest[:1]}' in '{text}'")
    return value


def _element(text: str) -> tuple[Any, str]:
    """(the value that `text` begins with, what follows it)."""
    if text.startswith("["):
        return _items(text, "]")
    if text.startswith("{"):
        return _items(text, "}")
    if text[:1] in ("'", '"'):
        end = re.match(rf"{text[0]}((?:\\{text[0]}|[^{text[0]}])*){text[0]}", text)
        if end is None:
            raise Refused(f"token recognition error at: {text}")
        return end[1].replace(f"\\{text[0]}", text[0]), text[end.end() :]
    if text.startswith("${"):
        reference = re.match(r"\$\{[^{}]+\}", text)
        if reference is None:
            raise Refused(f"token recognition error at: {text}")
        return reference[0], text[reference.end() :]
    plain = PLAIN.match(text)
    if plain is None:
        if text:
            raise Refused(f"token recognition error at: '{text[:1]}' in '{text}'")
        return "", ""
    return _primitive(plain[0].strip(" ")), text[plain.end() :]


def _items(text: str, closing: str) -> tuple[Any, str]:
    table: dict[str, Any] = {}
    items: list[Any] = []
    rest = text[1:].lstrip(" ")
    while not rest.startswith(closing):
        if not rest:
            raise Refused(f"missing '{closing}' in '{text}'")
        if closing == "}":
            key, colon, rest = rest.partition(":")
            if not colon or not re.fullmatch(r"[A-Za-z_][\w-]*", key.strip()):
                raise Refused(f"mismatched input in '{text}'")
            table[key.strip()], rest = _element(rest.lstrip(" "))
        else:
            item, rest = _element(rest)
            items.append(item)
        rest = rest.lstrip(" ")
        if rest.startswith(","):
            rest = rest[1:].lstrip(" ")
            if rest.startswith(closing):
                raise Refused(f"mismatched input '{closing}' in '{text}'")
        elif not rest.startswith(closing):
            raise Refused(f"mismatched input '{rest[:1]}' in '{text}'")
    return (table if closing == "}" else items), rest[1:]


def _primitive(text: str) -> Any:
    if "\\" in text:
        return re.sub(r"\\(.)", r"\1", text)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() == "null":
        return None
    if INTEGER.fullmatch(text):
        return int(text)
    if FLOAT.fullmatch(text):
        return float(text)
    return text


# --- The file


class Loader(yaml.SafeLoader):  # type: ignore[misc]
    """OmegaConf's: dates stay text, 1e-5 is a number, a key stands once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key) for key, _ in node.value]
        if len(set(keys)) != len(keys):
            raise Refused(f"found duplicate key in {keys}")
        found: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return found


Loader.yaml_implicit_resolvers = {
    first: [(tag, rule) for tag, rule in rules if tag != "tag:yaml.org,2002:timestamp"]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?\d[\d_]*[eE][-+]?\d+|[-+]?\d[\d_]*\.[\d_]*(?:[eE][-+]?\d+)?"),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> dict[str, Any]:
    """A file of the configuration. Raises Refused."""
    try:
        # a subclass of the safe loader
        value = yaml.load(path.read_text(), Loader)
    except yaml.YAMLError as error:
        raise Refused(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise Refused(f"{path} holds no table")
    for key in ("defaults", "hydra"):
        if key in value:
            raise Refused(f"{path}: this stand-in does not know '{key}' in a composed file")
    return value


# --- Interpolation


def resolved(value: Any, root: dict[str, Any], place: tuple[str, ...]) -> Any:
    """The value with all its interpolations resolved. Raises Refused."""
    if isinstance(value, dict):
        return {key: resolved(each, root, (*place, str(key))) for key, each in value.items()}
    if isinstance(value, list):
        return [resolved(each, root, (*place, str(at))) for at, each in enumerate(value)]
    if not isinstance(value, str):
        return value
    while (found := re.search(REFERENCE, value)) is not None:
        new, where = _reference(found[1], root, place)
        new = resolved(new, root, where)
        if found[0] == value:
            return new
        value = value.replace(found[0], "null" if new is None else str(new))
    if "${" in value:
        raise Refused(f"{'.'.join(place)}: GrammarParseError in '{value}'")
    return value


def _reference(
    text: str, root: dict[str, Any], place: tuple[str, ...]
) -> tuple[Any, tuple[str, ...]]:
    """(what is there, where that is)."""
    if ":" in text:
        name, _, arguments = text.partition(":")
        numbers = [_primitive(each.strip()) for each in arguments.split(",")]
        if name != "multiply" or len(numbers) != 2:
            raise Refused(f"Unsupported interpolation type {name}")
        return numbers[0] * numbers[1], place
    dots = len(text) - len(text.lstrip("."))
    table: Any = root
    target = tuple(text.split("."))
    if dots:
        target = (*place[: len(place) - dots], *text[dots:].split("."))
    for key in target:
        if not isinstance(table, dict) or key not in table:
            raise Refused(f"{'.'.join(place)}: Interpolation key '{text}' not found")
        table = table[key]
    return table, target
