"""The few requests that kubectl sends as protobuf whatever the server would like."""

from __future__ import annotations

from collections.abc import Iterator

from tests.kubernetes.kinds import Object
from tests.kubernetes.problems import Refused

TYPE = "application/vnd.kubernetes.protobuf"
MAGIC = b"k8s\0"
ATTRIBUTES = {1: "namespace", 2: "verb", 3: "group", 4: "version", 5: "resource"}
ATTRIBUTES |= {6: "subresource", 7: "name"}


def _number(data: bytes, place: int) -> tuple[int, int]:
    """A varint, and where it ends."""
    value = shift = 0
    while True:
        byte = data[place]
        value |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if not byte & 0x80:
            return value, place


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of a message's fields of text or messages."""
    place = 0
    while place < len(data):
        tag, place = _number(data, place)
        value, place = _number(data, place)
        if tag & 7 == 2:
            yield tag >> 3, data[place : place + value]
            place += value


def _texts(data: bytes, names: dict[int, str]) -> Object:
    found = {names[number]: text.decode() for number, text in _fields(data) if number in names}
    return {key: text for key, text in found.items() if text}


def read(body: bytes) -> Object:
    """A Self…Review of kubectl's `auth`, or an Eviction of its `drain`, whose grace is not
    read."""
    content = dict(_fields(body.removeprefix(MAGIC)))
    head = _texts(content[1], {1: "apiVersion", 2: "kind"})
    spec: Object = {}
    if head["kind"] == "Eviction":
        return head
    if not head["kind"].startswith("Self"):
        text = f"the stand-in does not read a {head['kind']} of protobuf: use kubectl create -f"
        raise Refused(415, text)
    for number, value in _fields(dict(_fields(content[2])).get(2, b"")):
        if head["kind"] == "SelfSubjectRulesReview":
            spec["namespace"] = value.decode()
        elif number == 1:
            spec["resourceAttributes"] = _texts(value, ATTRIBUTES)
        elif number == 2:
            spec["nonResourceAttributes"] = _texts(value, {1: "path", 2: "verb"})
    return {**head, "metadata": {}, "spec": spec}
