"""The kinds of values that an engine's annotations ask for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from trainkit.engines.python_source import Kind, Tree, kind_of


@pytest.mark.parametrize(
    ("annotation", "kind"),
    [
        ("int", Kind("int")),
        ("Optional[int]", Kind("int")),
        ("int | None", Kind("int")),
        ("'str'", Kind("str")),
        ("Union[int, float, None]", Kind("int|float")),
        ("Union[str, List[str]]", Kind("str|list")),
        ("List[int]", Kind("int", nargs="+")),
        ("Dict[str, int]", Kind("dict")),
        ("Literal['a', 'b', None]", Kind("str", choices=("a", "b", None))),
        ("torch.dtype", Kind("any")),
        ("Callable[[int], int]", Kind("any")),
        ("Union[int, torch.dtype]", Kind("any")),
    ],
)
def test_an_annotation(annotation: str, kind: Kind, tmp_path: Path) -> None:
    assert kind_of(ast.parse(annotation, mode="eval").body, Tree(tmp_path)) == kind
