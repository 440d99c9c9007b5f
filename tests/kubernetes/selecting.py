"""Label and field selectors, as lists and watches take them."""

from __future__ import annotations

import re
from collections.abc import Callable

from tests.kubernetes.kinds import Object
from tests.kubernetes.problems import Refused

Matches = Callable[[Object], bool]


def matches_labels(selector: Object, labels: Object) -> bool:
    """Whether labels match a LabelSelector (matchLabels and matchExpressions)."""
    wanted: Object = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(matches_expression(each, labels) for each in selector.get("matchExpressions") or [])


def matches_expression(expression: Object, labels: Object) -> bool:
    """Whether labels match one requirement of a selector, of pods or of nodes."""
    key, operator = expression["key"], expression["operator"]
    values = expression.get("values") or []
    if operator == "In":
        return bool(labels.get(key) in values)
    if operator == "NotIn":
        return bool(labels.get(key) not in values)
    if operator in ("Exists", "DoesNotExist"):
        return bool((key in labels) == (operator == "Exists"))
    if operator in ("Gt", "Lt"):
        if key not in labels:
            return False
        have, bound = int(labels[key]), int(values[0])
        return bool(have > bound if operator == "Gt" else have < bound)
    raise ValueError(f"no operator {operator}")


def label_selector(text: str) -> Matches:
    """From `a=b,c!=d,e in (f,g),h,!i`."""
    expressions = [_expression(each) for each in re.split(r",(?![^(]*\))", text) if each.strip()]

    def matches(obj: Object) -> bool:
        labels = obj["metadata"].get("labels") or {}
        return all(matches_expression(each, labels) for each in expressions)

    return matches


def _expression(text: str) -> Object:
    text = text.strip()
    if found := re.fullmatch(r"(\S+)\s+(in|notin)\s+\((.*)\)", text):
        operator = "In" if found[2] == "in" else "NotIn"
        values = [each.strip() for each in found[3].split(",")]
        return {"key": found[1], "operator": operator, "values": values}
    if found := re.fullmatch(r"([^=!]+?)\s*(!=|==|=)\s*(.*)", text):
        operator = "NotIn" if found[2] == "!=" else "In"
        return {"key": found[1], "operator": operator, "values": [found[3]]}
    if re.fullmatch(r"!?[\w./-]+", text):
        operator = "DoesNotExist" if text.startswith("!") else "Exists"
        return {"key": text.lstrip("!"), "operator": operator}
    raise Refused(400, f"unable to parse requirement: found '{text}'")


def field_selector(text: str) -> Matches:
    """From `metadata.name=x,status.phase!=Running`."""
    wanted = []
    for each in filter(None, text.split(",")):
        found = re.fullmatch(r"([\w.]+)(!=|==|=)(.*)", each)
        if found is None:
            raise Refused(400, f"invalid selector: '{each}'; can't understand '{each}'")
        wanted.append((found[1].split("."), found[2] != "!=", found[3]))

    def matches(obj: Object) -> bool:
        return all((_value(obj, path) == value) == equal for path, equal, value in wanted)

    return matches


def _value(obj: Object, path: list[str]) -> str:
    value: object = obj
    for word in path:
        value = value.get(word) if isinstance(value, dict) else None
    return "" if value is None else str(value)
