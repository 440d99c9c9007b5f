"""The rules of the house, kept by tests: import order, quick listing, small files, a trainer that can be read in an afternoon."""

from __future__ import annotations

import ast
import re
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


# Every file of trainkit/train, without its subfolders, stands in one of these.
MODEL = ("model", "attention", "rotary", "loss")
PARALLELISM = ("mesh", "tensor_group", "tensor_parallel", "vocab_parallel", "shards", "replicas", "data_parallel", "pipeline", "pipeline_stage", "torch_compat")
LOOP = ("build", "initialize", "recompute", "schedule", "begin", "agree", "step", "loop", "spread")
BESIDE = {
    "the arithmetic of an update": ("optimizer", "loss_scale", "guard"),
    "samples": ("feed",),
    "checkpoints": ("checkpoint", "storage", "saver", "staging"),
    "reports": ("heartbeat", "memory", "profiling", "readback", "recheck", "report", "timers", "utilization", "wandb_log"),
    "programs and what is done with a trained model": ("main", "replay", "trained", "sharded", "evaluate", "generate", "sampling"),
}
MOST_LINES = 2500


def test_model_parallelism_and_loop_can_be_read_in_an_afternoon() -> None:
    """Lines of all that makes a job a loop over steps in any layout: comments and docstrings count, blank lines do not. Left out is what stands in BESIDE: an
    update's arithmetic (optimizer, loss scale, guard), the feed of samples, checkpoints, reports, programs."""
    train, read = PACKAGE / "train", (*MODEL, *PARALLELISM, *LOOP)
    others = [name for names in BESIDE.values() for name in names]
    assert sorted([*read, *others]) == sorted(p.stem for p in train.glob("*.py") if p.stem != "__init__")
    lines = {
        str(path): sum(bool(line.strip()) for line in path.read_text().splitlines()) for path in (PACKAGE / "jobs/ranks.py", *(train / f"{n}.py" for n in read))
    }
    assert sum(lines.values()) <= MOST_LINES, lines


OF_PARALLELISM = re.compile(
    r"\branks?\b|\bmesh|\bcollective|\bgroup\b|\bdist(ributed)?\b|\bworld\b|shard|dtensor|fsdp|pipeline|\bstages?\b|micro_batch|replica"
    r"|all_?(reduce|gather)|reduce_?scatter|parallelism|(tensor|sequence|data|model|vocab)[ _-]?parallel",
    re.IGNORECASE,
)


def test_the_model_has_no_word_of_parallelism() -> None:
    """It is put around it from outside. (`parallel_residual` is the shape of a block.)"""
    found = [
        f"{name}.py:{number}: {line.strip()}"
        for name in MODEL
        for number, line in enumerate((PACKAGE / f"train/{name}.py").read_text().splitlines(), start=1)
        if OF_PARALLELISM.search(line)
    ]
    assert not found, "\n".join(found)
    assert OF_PARALLELISM.search("only this rank's rows") and OF_PARALLELISM.search("x = TensorParallelHead()")
