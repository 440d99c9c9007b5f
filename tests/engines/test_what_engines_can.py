"""The table of docs/engines.md, "What each engine can": every cell is asked of the code that
decides it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.base.errors import ConfigError
from trainkit.cli.model.convert import TARGETS
from trainkit.engines.convert.formats import READ_FORMATS, SAMPLE_ORDERS
from trainkit.engines.options import load_table, newest_version, tables_of
from trainkit.engines.registry import ENGINES, PLACES, foreign_engine
from trainkit.engines.torchtitan.values import job_problems
from trainkit.jobs.job_tables import EngineSource
from trainkit.jobs.load import Jobs, load
from trainkit.plan.planner import make_plan

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(
    r"^\| ([^|]+) \|(.+)\|$",
    (ROOT / "docs" / "engines.md")
    .read_text()
    .partition("## What each engine can")[2]
    .split("\n#")[0],
    re.MULTILINE,
)
NAMES = [name.strip(" `") for name in ROWS[0][1].split("|")]
# of each engine a job that it plans as it is, but for the memory of a chip
BASE = {
    "native": "llama-8b",
    "megatron-lm": "azure-gpt3-857m",
    "gpt-neox": "gpt-neox-20b",
    "nemo": "nemo-gpt3-5b",
    "neuronx-nemo": "neuron-gpt3-23b",
    "torchtitan": "llama-8b",
    "megatron-bridge": "llama-8b",
}
# over that job, which has ZeRO 3
MORE = {"megatron-bridge": ("parallelism.zero_stage=1",)}
PLAIN = ("training.compile=false", "model.attention_dropout=0.0", "model.hidden_dropout=0.0")
P = "parallelism."
TENSOR = f"{P}tensor_model_parallel_size=2"
PIPELINE = f"{P}pipeline_model_parallel_size=2"
UNSTAGED = f"{P}pipeline_model_parallel_size=1"
LAYOUTS = {
    "tensor and sequence parallel": (TENSOR, f"{P}sequence_parallel=true"),
    "pipeline parallel": (PIPELINE,),
    "interleaved pipeline": (PIPELINE, f"{P}virtual_pipeline_model_parallel_size=2"),
    "context parallel": (f"{P}context_parallel_size=2",),
    "HSDP": (UNSTAGED, f"{P}zero_stage=2", f"{P}data_parallel_replicate_size=2"),
    "ZeRO 1": (UNSTAGED, f"{P}zero_stage=1"),
    "ZeRO 2": (UNSTAGED, f"{P}zero_stage=2"),
    "ZeRO 3": (UNSTAGED, f"{P}zero_stage=3"),
    "fp16": ('training.precision="fp16"',),
}
OWN_CODE = "native"  # no tree of somebody else's
ASKED: dict[str, Callable[[str], str]] = {
    "tables of options": lambda name: str(len(tables_of(name))) if name != OWN_CODE else "",
    "a version without a table, by its own parser": lambda name: yes(asks_parser(name)),
    "`import`": lambda name: yes(name in EngineSource.NAMES),
    "`convert` reads its checkpoints": lambda name: yes(name in {OWN_CODE, *READ_FORMATS}),
    "`convert` writes its format": lambda name: yes(name in TARGETS),
    "`init_from`": lambda name: yes(begins_with_folder(name)),
    "`diff-engines`": lambda name: yes(name in SAMPLE_ORDERS),
}


def yes(found: bool) -> str:
    return "yes" if found else "no"


def asks_parser(name: str) -> bool:
    """Whether `options = "from-source"` is taken."""
    try:
        EngineSource(name=name, source="/tree", options="from-source")
    except (ConfigError, ValueError):
        return False
    return True


def begins_with_folder(name: str) -> bool:
    return not any("init_from" in said for said in objections(JOBS, name, ('init_from="hf"',)))


JOBS = load(ROOT, environ={})


def objections(jobs: Jobs, engine: str, sets: tuple[str, ...]) -> set[str]:
    """What plan and engine say of a job, but for the memory of its chip."""
    own = [f'engine="{engine}"', *PLAIN, *MORE.get(engine, ()), *sets]
    job = jobs.resolve(BASE[engine], own).job
    found = make_plan(job, 50304, rules=ENGINES[engine].rules).objections
    said = {each.message for each in found if "GiB" not in each.message}
    if engine == "torchtitan":
        return said | {each.message for each in job_problems(job)}
    if engine == "native":
        return said | {each.message for each in ENGINES[engine].problems(job)}
    table = load_table(engine, newest_version(engine))
    return said | {each.message for each in foreign_engine(engine).option_problems(job, table)}


def test_it_has_every_engine() -> None:
    assert sorted(NAMES) == sorted(PLACES)


def test_it_has_every_engine_and_row() -> None:
    assert sorted(NAMES) == sorted(PLACES)
    assert [row.strip() for row, _ in ROWS[1:]] == [*LAYOUTS, *ASKED]


@pytest.mark.parametrize("engine", NAMES)
@pytest.mark.parametrize(("row", "cells"), [(row.strip(), cells) for row, cells in ROWS[1:]])
def test_a_cell(row: str, cells: str, engine: str) -> None:
    cell = cells.split("|")[NAMES.index(engine)].strip()
    if row in ASKED:
        assert cell == ASKED[row](engine)
        return
    said = objections(JOBS, engine, LAYOUTS[row]) - objections(JOBS, engine, ())
    assert cell == yes(not said), said
