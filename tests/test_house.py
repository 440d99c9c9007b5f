"""The rules of the house, kept by tests: import order, quick listing, small files."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import trainkit
from tests.conftest import Project

PACKAGE = Path(trainkit.__file__).parent
ORDER = [{"base"}, {"jobs"}, {"plan"}, {"runs"}, {"data", "ops"}, {"train"}, {"engines"}, {"stages"}, {"launch"}, {"cli"}]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def imported_packages(path: Path) -> set[str]:
    """Subpackages of trainkit that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the order"
            names = [node.module or "", *(f"{node.module}.{a.name}" for a in node.names)]
        found |= {n.split(".")[1] for n in names if n.startswith("trainkit.")}
    return found & set(LEVEL)


def test_imports_go_one_way() -> None:
    files = [p for p in PACKAGE.rglob("*.py") if p.parent != PACKAGE]
    assert len(files) > 30
    wrong = []
    for path in files:
        own = path.relative_to(PACKAGE).parts[0]
        assert own in LEVEL, f"{path} is in no room of the house"
        wrong += [f"{path.relative_to(PACKAGE)} imports trainkit.{other}" for other in imported_packages(path) if other != own and LEVEL[other] >= LEVEL[own]]
    assert not wrong, "\n".join(wrong)


def test_base_needs_only_the_standard_library() -> None:
    for path in (PACKAGE / "base").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or name.startswith("trainkit.base"), f"{path.name} imports {name}"


def test_listing_imports_nothing_heavy(project: Project) -> None:
    """`invoke --list` imports neither torch nor pydantic nor rich."""
    argv = [sys.executable, "-X", "importtime", "-m", "invoke", "--list"]
    done = subprocess.run(argv, cwd=project.path, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip().split(".")[0] for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "trainkit" in imported and "prep-data" in done.stdout
    assert not imported & {"torch", "pydantic", "rich", "numpy", "tokenizers", "tomli"}


def test_files_stay_small() -> None:
    long = {str(p.relative_to(PACKAGE)): n for p in PACKAGE.rglob("*.py") if (n := p.read_text().count("\n")) > 500}
    assert not long
