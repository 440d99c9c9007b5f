"""The rules of the house, kept by tests: import order, quick listing, small files, a trainer
that can be read in a day."""

from __future__ import annotations

import ast
import graphlib
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path
from typing import get_type_hints

import pytest

import trainkit
from benchmarks.readability import measure
from tests.conftest import Project
from trainkit.runs.metrics import MetricsRow

PACKAGE = Path(trainkit.__file__).parent
ORDER = {  # of a folder's rooms and its files of their own: each imports only what stands before it
    "trainkit": (
        "base families jobs ops images plan runs reports data train engines stages launch"
        " experiment scaling rehearse cli"
    ),
    "trainkit.images": (
        "contract builders dockerfile context programs leftovers build squashfs stripe importers"
    ),
    "trainkit.data": "fetch sums text unit_specs tokenizer curate indexed sources order tokenize",
    "trainkit.train": (
        "metrics torch_compat torch_compiler proved_graphs ready_graphs"
        " compiled_graphs model decoding parallel checkpoint rank_agreement"
        " batches update coordinate_check huggingface preflight step_log validation text_samples"
        " rehearsal trainer main parent inference"
    ),
    "trainkit.launch": (
        "programs protocol hosts agent containers session launchers run_inputs supervise"
        " local_ranks remote_units array_units cluster_care stage_lines preparation"
        " scheduler_contract job_plan session_preview start direct slurm kubernetes"
        " scheduler_registry main"
    ),
    "trainkit.experiment": "options hosts start prepare graph follow cancel sweep diff_engines api",
    "trainkit.scaling": "law points isoflop report picture ladder",
    "trainkit.rehearse": "scene place_checks data_checks rank_checks rehearse harm drill",
    "trainkit.cli": (
        "completion parameters options tables wrapper config host_options run hosts"
        " model inspect checkout tasks_config tasks_run tasks_inspect tasks_hosts"
        " tasks program"
    ),
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = ("trainkit", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports_of(path: Path, known: Collection[str]) -> set[str]:
    """Modules of trainkit that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative imports hide the order"
            module = node.module or ""
            names = {f"{module}.{alias.name}" for alias in node.names}
            found |= names & set(known) or {module}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            found |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return found & set(known)


def test_imports_go_one_way() -> None:
    """Between rooms as ORDER says, and in no circle of files anywhere."""
    files = modules()
    edges = {name: imports_of(path, files) - {name} for name, path in files.items()}
    wrong = []
    for folder, words in ORDER.items():
        level = {f"{folder}.{word}": number for number, word in enumerate(words.split())}
        there = {
            ".".join(name.split(".")[: folder.count(".") + 2])
            for name in files
            if name.startswith(f"{folder}.")
        }
        assert there - {"trainkit.__main__", "trainkit._index"} == set(level), (
            f"rooms of {folder} that ORDER and the folder do not share"
        )
        for name, others in edges.items():
            own, room = level.get(name), None
            for room, number in level.items():
                if name == room or name.startswith(f"{room}."):
                    own = number
                    break
            if own is None:
                continue
            for other in others:
                target = next(
                    (
                        number
                        for place, number in level.items()
                        if other == place or other.startswith(f"{place}.")
                    ),
                    None,
                )
                if target is not None and target > own:
                    wrong.append(f"{name} imports {other}")
    assert not wrong, "\n".join(wrong)
    order = graphlib.TopologicalSorter(edges)
    order.prepare()  # raises CycleError, which names the circle


# where an engine's name stands besides its own files: the schema and the registries
NAMES_ENGINES = {"jobs/schema.py", "jobs/job_tables.py", "engines/registry.py"}
NAMES_ONE = {  # and the few that remain, each with its reason
    "plan/split.py": "Megatron-LM's arguments for layers of a stage, which every layout asks for",
    "engines/rank/readers.py": "the registry of what runs beside ranks, in images with Python 3.8",
    "engines/convert/formats.py": "the registry of formats of weights, called like their engines",
    "cli/model/convert.py": "the formats that `convert` writes",
    "engines/extract_options.py": "reads trees for engines/option_tables, by hand",
    "jobs/models.py": "a family of models of that name",
    "engines/neuronx_nemo/engine.py": "nemo is a package of its tree",
    "engines/megatron_bridge/engine.py": "Megatron-LM is a submodule of its tree",
    "launch/supervise/host_consistency.py": "imports native: which torch the trainer takes",
    "stages/precompile.py": "imports native: the stage is the trainer's own",
}


def test_an_engine_is_named_in_its_own_files_alone() -> None:
    """Else a new engine is forgotten where another one's name is compared."""
    from trainkit.engines.registry import PLACES

    files = modules()
    folders = {name: name.replace("-", "_") for name in PLACES}
    found = set()
    compared = []
    for path in files.values():
        text = path.read_text()
        if not any(word in text for word in (*folders, *folders.values(), "engine")):
            continue
        place = str(path.relative_to(PACKAGE))
        nodes = list(ast.walk(ast.parse(text)))
        words = [node.value for node in nodes if isinstance(node, ast.Constant)]
        # "native" is a word of sample orders too
        named = {name for name in folders if name != "native" and name in words}
        if not place.startswith("engines/"):
            named |= {
                name for name, folder in folders.items() if f"trainkit.engines.{folder}" in text
            }
        if any(not re.search(rf"\b{folders[name]}\b", place) for name in named):
            found.add(place)
        compared += [
            f"{place}:{node.lineno}"
            for node in nodes
            if isinstance(node, ast.Compare)
            and ast.unparse(node.left).rpartition(".")[2] == "engine"
            and any(
                isinstance(each, ast.Constant) and each.value in folders
                for each in ast.walk(node.comparators[0])
            )
        ]
    assert found <= NAMES_ENGINES | set(NAMES_ONE), found - NAMES_ENGINES - set(NAMES_ONE)
    assert set(NAMES_ONE) <= found, f"no longer needed: {set(NAMES_ONE) - found}"
    others = [each for each in compared if not each.startswith(("jobs/schema.py", "plan/split.py"))]
    assert not others, f"compared, where Engine or Job.is_native says it: {others}"


def test_base_needs_only_the_standard_library() -> None:
    for path in (PACKAGE / "base").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = (
                [a.name for a in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
            for name in names:
                top = name.split(".")[0]
                assert top in sys.stdlib_module_names or name.startswith("trainkit.base"), (
                    f"{path.name} imports {name}"
                )


def test_listing_imports_nothing_heavy(project: Project) -> None:
    """`invoke --list` imports neither torch nor pydantic nor rich."""
    argv = [sys.executable, "-X", "importtime", "-m", "invoke", "--list"]
    done = subprocess.run(argv, cwd=project.path, capture_output=True, text=True, check=True)
    imported = {
        line.rpartition("|")[2].strip().split(".")[0]
        for line in done.stderr.splitlines()
        if line.startswith("import time:")
    }
    assert "trainkit" in imported and "prep-data" in done.stdout
    assert not imported & {"torch", "pydantic", "rich", "numpy", "tokenizers", "tomli"}


def test_a_fresh_image_needs_no_readers_of_data() -> None:
    """They and the web's protocols are a tenth of the time in which build-container says so."""
    code = "import sys, trainkit.cli.run.images; print(*sys.modules)"
    argv = [sys.executable, "-c", code]
    said = subprocess.run(
        argv, capture_output=True, text=True, check=True, cwd=PACKAGE.parent
    ).stdout
    heavy = {"trainkit.data.sources", "http.client", "numpy", "torch"}
    assert not heavy & set(said.split())


def test_rows_of_metrics_are_found_by_key() -> None:
    """No file looks for the text of a row: other keys may come to stand between those it knows."""
    keys = "|".join(("%b", "%s", *get_type_hints(MetricsRow)))
    text_of_a_row = re.compile(rf'"({keys})"\s*:')
    for path in modules().values():
        tree = ast.parse(path.read_text())
        docstrings = {
            id(node.body[0].value)
            for node in ast.walk(tree)
            if hasattr(node, "body") and isinstance(node.body, list) and node.body
            if isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and id(node) not in docstrings:
                value = node.value
                words = value.decode("latin-1") if isinstance(value, bytes) else str(value)
                found = text_of_a_row.search(words)
                assert not found, f"{path}:{node.lineno}: {found} in a row's text"


def test_no_file_of_tests_hides_a_package() -> None:
    """pytest puts folders of tests in front of the path: a megatron.py there had tests of the real
    one left out."""
    packages = {*importlib.metadata.packages_distributions(), *sys.stdlib_module_names}
    folders = {path.parent for path in Path(__file__).parent.rglob("test_*.py")}
    files = (path for folder in folders for path in folder.glob("*.py"))
    assert not [path for path in files if path.stem in packages]


def test_cpp_is_formatted() -> None:
    formatter = Path(sys.executable).with_name("clang-format")
    if not formatter.exists():
        pytest.skip("no clang-format beside this Python; the test extra has it")
    files = [str(path) for path in sorted((PACKAGE.parent / "csrc").rglob("*.*"))]
    argv = [str(formatter), "--dry-run", "--Werror", *files]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + "\nrun: clang-format -i csrc/*/*"


def test_the_code_is_easy_to_read() -> None:
    """The table of CONTRIBUTING.md is what is measured: a little more, so that not every change
    changes it. `python benchmarks/readability.py --worst --names` says where it is exceeded."""
    found = measure(PACKAGE).figures
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text().partition("## How the code reads")[2]
    rows = re.findall(r"^\| ([^|]+) \| ([\d., ]+) \| [^|]*\|$", text.partition("## ")[0], re.M)
    assert [name for name, _ in rows] == list(found), "the table's rows are readability.py's"
    for name, words in rows:
        most = [float(number.replace(",", "")) for number in words.split(", ")]
        for value, limit in zip(found[name], most, strict=True):
            assert value <= limit, f"{name}: {value:g} where CONTRIBUTING.md has at most {limit:g}"
            lowest = limit - max(1.0, limit / 10)
            assert value >= lowest, f"{name}: {value:g}, so lower {limit:g} in CONTRIBUTING.md"
    assert not measure(PACKAGE.parent / "benchmarks").circles


def test_only_registries_import_by_name() -> None:
    """Elsewhere it hides a circle, and what a file needs."""
    by_name = re.compile(r"\bimport_module\(|\b__import__\(")
    found = {
        str(path.relative_to(PACKAGE))
        for path in modules().values()
        if by_name.search(path.read_text())
    }
    assert found == {"__init__.py", "engines/registry.py", "launch/scheduler_registry.py"}


# What makes a job a loop over steps in any layout: all of these rooms of trainkit/train, and these
# files.
READ = ("model", "parallel")
READ_TOO = [
    "jobs/ranks",
    *(
        f"train/{name}"
        for name in (
            "torch_compat",
            "preflight",
            "rank_agreement",
            "trainer",
            "validation",
        )
    ),
    *(f"train/update/{name}" for name in ("build", "schedule", "step")),
]
MOST_LINES = 5210


def test_model_parallelism_and_loop_can_be_read_in_a_day() -> None:
    """Lines of all that makes a job a loop over steps in any layout: comments and docstrings
    count, blank lines do not. Without experts, latents, context parallelism and a further token
    it was an afternoon's reading. Left out are an update's arithmetic (optimizer, loss scale,
    guard), the feed of samples, checkpoints, metrics, inference."""
    paths = [path for room in READ for path in (PACKAGE / "train" / room).glob("*.py")] + [
        PACKAGE / f"{name}.py" for name in READ_TOO
    ]
    lines = {
        str(path): sum(bool(line.strip()) for line in path.read_text().splitlines())
        for path in paths
    }
    assert sum(lines.values()) <= MOST_LINES, lines


OF_PARALLELISM = re.compile(
    r"\branks?\b|\bmesh|\bcollective|\bgroup\b|\bdist(ributed)?\b|\bworld\b|shard|dtensor|fsdp|pipeline|\bstages?\b|micro_batch|replica"
    r"|all_?(reduce|gather)|reduce_?scatter|parallelism|(tensor|sequence|data|model|vocab)["
    r" _-]?parallel",
    re.IGNORECASE,
)


def test_the_model_has_no_word_of_parallelism() -> None:
    """It is put around it from outside. (`parallel_residual` is the shape of a block.)"""
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in (PACKAGE / "train/model").glob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if OF_PARALLELISM.search(line)
    ]
    assert not found, "\n".join(found)
    assert OF_PARALLELISM.search("only this rank's rows") and OF_PARALLELISM.search(
        "x = TensorParallelHead()"
    )
