"""The program beside a rank runs in images with Python 3.8 and nothing installed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import trainkit.engines.rank

FILES = sorted(Path(trainkit.engines.rank.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_parses_as_python_3_8(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 8))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_it_imports_the_standard_library_alone(path: Path) -> None:
    allowed = ("trainkit.engines.rank.", "trainkit.base.")
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            top = name.split(".")[0]
            assert top in sys.stdlib_module_names or f"{name}.".startswith(allowed), (
                f"{path.name} imports {name}"
            )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_annotations_are_not_evaluated(path: Path) -> None:
    """`int | None` is an error in Python 3.8 wherever it is evaluated."""
    tree = ast.parse(path.read_text())
    annotations = [
        getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")
    ]
    used = any(isinstance(each, ast.AST) and ast.unparse(each) != "None" for each in annotations)
    has = any(
        isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body
    )
    assert has or not used
