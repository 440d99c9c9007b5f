"""Options that the tree's own parser says, where no table of ours has its version."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.conftest import Project
from tests.engines.megatron_lm.parser_tree import arguments, parser_tree
from tests.engines.real import RealEngine, environment_toml, parameters, write_job
from tests.stages.engine_trees import Bringer, job_of
from trainkit.base.errors import ConfigError, Exit, TrainkitError
from trainkit.engines.megatron_lm.engine import MegatronLm
from trainkit.engines.options import Option, OptionTable, load_table
from trainkit.jobs.containers import Container
from trainkit.jobs.job_tables import EngineSource
from trainkit.jobs.schema import Job
from trainkit.stages.engine_prebuild import EnginePrebuildStage

ENGINE = MegatronLm()
PARSER = "megatron/training/arguments.py"


@pytest.fixture
def stage() -> Bringer:
    return Bringer(EnginePrebuildStage())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return parser_tree(tmp_path / "tree")


def asking(tmp_path: Path, tree: Path, **job: Any) -> Job:
    source = {"source": str(tree), "options": "from-source", "python": sys.executable}
    return job_of(tmp_path / "root", source, parallelism={"zero_stage": 0}, **job)


def said(job: Job) -> list[str]:
    return [f"{each}" for each in ENGINE.problems(job)]


def plain(table: OptionTable) -> dict[str, tuple[object, ...]]:
    return {name: parts(option) for name, option in table.options.items()}


def parts(option: Option) -> tuple[object, ...]:
    kind = option.type if option.type in ("int", "float", "str", "bool") else "any"
    if kind == "any" and option.choices:
        kind = "str"
    return (kind, option.action, option.nargs, option.choices, option.aliases)


def test_a_version_without_a_table_is_checked_against_its_own_parser(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    """Nothing is said of options before they are known; then those of no table are taken."""
    new = {"newest-depth": 4, "newest_backend": "fused", "newest-constant": True}
    job = asking(tmp_path, tree, engine_args={**new, "export-anew": "x"})
    assert not said(job) and not ENGINE.notes(job)
    with pytest.raises(ConfigError, match="was not asked yet") as error:
        ENGINE.table_of(job)
    assert error.value.exit == Exit.STAGE_STALE
    assert "`invoke train j`" in error.value.list[0].hint
    stage.bring(job)
    assert not said(job) and not ENGINE.notes(job)
    table = ENGINE.table_of(job)
    assert (table.version, table.notice) == ("core-0.99.0", "")
    assert table.options["newest-depth"] == Option("newest-depth", "int", default=3)
    assert table.options["newest-backend"].choices == ("flash", "fused")
    wrong = asking(tmp_path, tree, engine_args={"newest-depht": 4, "newest-backend": "slow"})
    unknown, value = said(wrong)
    assert "core-0.99.0 has no option 'newest-depht'" in unknown and "newest-depth" in unknown
    assert "flash, fused" in value


def test_it_has_every_option_as_a_table_has_it(stage: Bringer, tmp_path: Path, tree: Path) -> None:
    job = asking(tmp_path, tree)
    stage.bring(job)
    asked = plain(ENGINE.table_of(job))
    table = plain(load_table("megatron-lm", "core-0.19.0"))
    new = {"newest-depth", "newest-share", "newest-backend", "newest-constant", "export-anew"}
    assert set(asked) == {*table, *new}
    assert {name: asked[name] for name in table} == table


def test_it_is_asked_again_where_the_tree_changed(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    job = asking(tmp_path, tree)
    assert "was never compiled" in stage.bring(job).because
    assert stage.bring(job).fresh
    changed = arguments('parser.add_argument("--newer-still", type=int)')
    (tree / PARSER).write_text(changed)
    assert stage.bring(job).because == f"{PARSER} changed since it was compiled"
    assert "newer-still" in ENGINE.table_of(job)
    (kept,) = (tmp_path / "root/engines/options").iterdir()
    kept.unlink()
    assert "is missing or changed" in stage.bring(job).because
    assert "newer-still" in ENGINE.table_of(job)


def test_jobs_with_a_table_and_without_share_a_tree(
    stage: Bringer, tmp_path: Path, tree: Path
) -> None:
    other = job_of(tmp_path / "root", {"source": str(tree), "python": sys.executable})
    stage.bring(other)
    job = asking(tmp_path, tree)
    assert not stage.bring(job).fresh
    assert "newest-depth" in ENGINE.table_of(job)
    assert "newest-depth" not in ENGINE.table_of(other)
    assert stage.verdict(other).fresh and stage.verdict(job).fresh


@pytest.mark.parametrize(
    ("text", "why", "hint"),
    [
        (
            "import not_there_at_all\n",
            "No module named 'not_there_at_all'",
            "install what it misses",
        ),
        ("def parse_args(provider):\n    pass\n", "exit 0", "set options = 'table'"),
        ("raise OSError('libcuda.so.1')\n", "OSError: libcuda.so.1", "engine-prebuild"),
    ],
)
def test_a_parser_that_cannot_be_asked_is_named(
    stage: Bringer, tmp_path: Path, tree: Path, text: str, why: str, hint: str
) -> None:
    (tree / PARSER).write_text(text if "parse_args" in text else text + arguments())
    job = asking(tmp_path, tree)
    with pytest.raises(TrainkitError, match="could not be asked") as error:
        stage.bring(job)
    assert error.value.exit == Exit.STAGE_FAILED
    assert why in str(error.value) and hint in str(error.value)
    assert not (tmp_path / "root/engines/options").exists()


def test_an_image_in_which_no_stage_runs_is_refused(tmp_path: Path, tree: Path) -> None:
    box = Container(name="box", image="/images/box.sif", runtime="apptainer")
    (problem,) = said(asking(tmp_path, tree, container=box))
    assert "no stage of jobs.j can ask the engine" in problem
    assert "containers.box.stages_in_container = true" in problem
    inside = box.model_copy(update={"stages_in_container": True})
    assert not said(asking(tmp_path, tree, container=inside))


def test_only_an_engine_with_a_parser_is_asked() -> None:
    with pytest.raises(ValidationError, match="from-source"):
        EngineSource(name="gpt-neox", source="/neox", options="from-source")


CLUSTER = """
[clusters.here]
ranks_per_node = 2
node_folder = "{folder}/node"
env = {environment}
"""


@pytest.mark.slow
@pytest.mark.parametrize("real", parameters("megatron-lm"))
def test_a_real_tree_trains_by_the_options_of_its_own_parser(
    tmp_path: Path, real: RealEngine
) -> None:
    """A tree of any version, with no table of ours in between."""
    tables = write_job(tmp_path, real, "here", 1).replace(
        "\npython =", '\noptions = "from-source"\npython ='
    )
    cluster = CLUSTER.format(folder=tmp_path, environment=environment_toml(real))
    (tmp_path / "jobs.toml").write_text(cluster + tables)
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    project = Project(tmp_path)
    project.invoke("train", "tiny")
    (run,) = project.runs()
    losses = project.losses(run)
    assert sorted(losses) == list(range(1, 13)) and losses[12] < losses[1]
    assert len(list((tmp_path / "engines/options").iterdir())) == 1
    refused = project.invoke("train", "tiny", "--set", "engine_args.no-such-option=1", exit=3)
    assert "has no option 'no-such-option'" in refused.stdout + refused.stderr
