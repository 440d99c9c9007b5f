"""The locator against tomli: the same paths, each where its key is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tomli
from hypothesis import given, settings, strategies as st

from trainkit.base.errors import ConfigError
from trainkit.jobs.toml_positions import KeyPath, TomlPosition, locate, parse


def paths_in(value: Any, path: KeyPath = ()) -> dict[KeyPath, Any]:
    """Every path of a parsed document, with its value."""
    inner: list[tuple[Any, Any]] = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    found = {} if path == () else {path: value}
    for key, item in inner:
        found |= paths_in(item, (*path, key))
    return found


def agrees(text: str) -> None:
    """Check positions of a valid document against tomli's values."""
    spots, values = locate(text), paths_in(tomli.loads(text))
    assert set(spots) == set(values)
    lines = text.replace("\r\n", "\n").split("\n")
    for path, spot in spots.items():
        rest = "\n".join([lines[spot.line - 1][spot.column - 1 :], *lines[spot.line :]])
        if isinstance(path[-1], str):
            key = re.match(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""", rest)
            assert key and tomli.loads(f"{key.group()} = 1") == {path[-1]: 1}, (path, rest)
        elif isinstance(values[path], dict):
            assert rest[0] in "{["
        elif isinstance(values[path], list):
            assert rest[0] == "["
        else:
            assert any(
                rest.startswith(word) and tomli.loads(f"x = {word}")["x"] == values[path]
                for word in SCALARS
            ), (path, rest)


keys = st.sampled_from(
    ["a", "b", "c-1", "9", '"a"', '"q.\\"x"', "'l # ='", '"\\u0062"', '""', "''"]
)
dotted = st.lists(keys, min_size=1, max_size=3).flatmap(
    lambda parts: st.sampled_from([".", " . "]).map(lambda dot: dot.join(parts))
)
SCALARS = [
    *(
        "1",
        "-1_000",
        "0xff",
        "1.5e-3",
        "true",
        '"s # ] } = \\" \\\\"',
        "'l\\'",
        '"""m\n"q" ""\\\n # x"""',
        '"""""x"""""',
        "'''m\n'' [x]\n'''",
        "''''''",
    ),
    *(
        '""',
        "1979-05-27",
        "1979-05-27 07:32:00",
        "1979-05-27T07:32:00.5Z",
        "07:32:00",
        '"[a]"',
        '"""\\""""',
    ),
]
scalars = st.sampled_from(SCALARS)
gaps = st.sampled_from(["", " ", "\t", "\n", " # a ] } , \" ''' comment\n", "\r\n"])


def inline(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    def joined(parts: list[str], gap: str, comma: bool) -> str:
        return gap + f"{gap},{gap}".join(parts) + (gap + "," if comma and parts else "") + gap

    arrays = st.builds(
        lambda *args: f"[{joined(*args)}]", st.lists(values, max_size=3), gaps, st.booleans()
    )
    pairs = st.builds(lambda key, value: f"{key} = {value}", dotted, values)
    tables = st.builds(
        lambda *args: "{" + joined(*args) + "}", st.lists(pairs, max_size=3), gaps, st.booleans()
    )
    return arrays | tables


statements = st.one_of(
    st.builds(
        lambda key, value, gap: f"{key} ={gap}{value}",
        dotted,
        st.recursive(scalars, inline, max_leaves=6),
        st.sampled_from(["", " ", "\t"]),
    ),
    dotted.map(lambda key: f"[{key}]"),
    dotted.map(lambda key: f"[[ {key} ]]  # comment"),
    st.sampled_from(["", "  # comment = [x]", "\t"]),
)


def is_toml(text: str) -> bool:
    try:
        tomli.loads(text)
    except tomli.TOMLDecodeError:
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.lists(statements, max_size=12), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_every_path_of_a_document_has_its_spot(lines: list[str], newline: str) -> None:
    text = ""
    for line in lines:  # what would redefine something is left out
        text = text + line + newline if is_toml(text + line + newline) else text
    agrees(text)
    agrees(text.rstrip())


def test_spots_are_lines_and_columns_from_one() -> None:
    text = '[a.b]\nx = 1\n  y.z = [ 2,\n 3 ]\n[[t]]\n[[t]]\nk = { m = "=" }\n[a]\n'
    assert locate(text) == {
        ("a",): TomlPosition(8, 2),  # its own header, though it is mentioned before
        ("a", "b"): TomlPosition(1, 4),
        ("a", "b", "x"): TomlPosition(2, 1),
        ("a", "b", "y"): TomlPosition(3, 3),
        ("a", "b", "y", "z"): TomlPosition(3, 5),
        ("a", "b", "y", "z", 0): TomlPosition(3, 11),
        ("a", "b", "y", "z", 1): TomlPosition(4, 2),
        ("t",): TomlPosition(5, 3),
        ("t", 0): TomlPosition(5, 1),
        ("t", 1): TomlPosition(6, 1),
        ("t", 1, "k"): TomlPosition(7, 1),
        ("t", 1, "k", "m"): TomlPosition(7, 7),
    }


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a = 1\nb = \n", 2),
        ("a = 1\n\n[t\n", 3),
        ("a = 1\na = 2\n", 2),
        ('a = """\n\n', 3),
        ("a = 'x", 1),
        ("[x]\n[x]", 2),
    ],
)
def test_a_document_that_is_no_toml_is_refused_with_its_line(text: str, line: int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "jobs.toml")
    (problem,) = caught.value.list
    assert problem.message.startswith("not TOML: ")
    assert problem.place and (problem.place.file, problem.place.line) == ("jobs.toml", line)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ConfigError, match="nested too deeply"):
        parse("a = " + "[" * 5000, "jobs.toml")
