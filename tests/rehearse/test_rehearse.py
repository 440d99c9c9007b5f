"""`invoke rehearse`: what would fail on the nodes fails here, with the way out."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import TASKS, Project
from tests.distributed import call
from tests.once import once
from tests.rehearse.traced import LAYOUTS
from tests.rehearse.traps import FOREIGN, JOBS, OWN, PUBLISHED, UNSEEN, Trap, look_at
from tests.stages.engine_trees import MEGATRON, write_files
from trainkit.base.errors import ConfigError, Exit
from trainkit.data.indexed.dataset import IndexedWriter
from trainkit.experiment.options import RehearseOptions
from trainkit.jobs.load import load
from trainkit.rehearse.place_checks import check_parser
from trainkit.rehearse.rehearse import RehearsalReport
from trainkit.rehearse.scene import NotLookedAt, scene_of
from trainkit.train.rehearsal.trace import (
    RankTrace,
    distinct_ranks,
    further_ranks,
    shortened,
    traced_micro_batches,
)

CHECKOUT = Path(__file__).resolve().parents[2]


def make_project(folder: Path) -> Path:
    """A project with prepared data, and a pair of files that another tokenizer wrote."""
    names = [f"b{number}" for number in range(256)]
    vocabulary = {name: number for number, name in enumerate([*names, "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "hosts").write_text("node1 slots=8\nnode2 slots=8")  # no newline at its end (trap 10)
    for name, more in (("made", 0), ("elsewhere", 300)):
        with IndexedWriter(folder / f"{name}_text_document", np.uint16) as writer:
            for document in range(40):
                writer.add_document(np.arange(60, dtype=np.uint16) + document + more)
    (folder / "dashed").write_text("".join(f"compute1-dy-queue1-i1-{n} slots=8\n" for n in (1, 2)))
    for number in range(3):
        (folder / f"train_chunk_{number}.jsonl").write_text('{"text": "a"}\n')
    (folder / "jobs.toml").write_text(JOBS.format(folder=folder))
    (folder / "tasks.py").write_text(TASKS)
    Project(folder).invoke("prep-data", "--job", "small")
    return folder


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return once(tmp_path_factory, "rehearse", make_project)


@pytest.mark.parametrize("name", [*OWN, *FOREIGN, *PUBLISHED])
def test_a_trap_is_caught(name: str, prepared: Path) -> None:
    trap: Trap = {**OWN, **FOREIGN, **PUBLISHED}[name]
    checks = look_at(prepared, trap, CHECKOUT)
    caught = [check for check in checks if (check.name, check.state) == (trap.check, trap.state)]
    assert caught, [(check.name, check.state, check.message) for check in checks]
    said = " ".join(f"{check.message} {check.hint}" for check in caught)
    assert all(words in said for words in trap.words), said
    assert all((check.exit > 1) == (check.state == "failed") for check in checks)


def test_what_was_not_looked_at_is_no_success(prepared: Path) -> None:
    trap = Trap("ranks", (), sets=["dataset=fetched"])
    report = RehearsalReport("small", look_at(prepared, trap, CHECKOUT), 1.0)
    seen = RehearsalReport("small", [each for each in report.checks if each.state == "held"], 1.0)
    assert not report.count("failed") and "tokenizer" in str(report.to_json()["not_known"])
    assert (report.exit, seen.exit) == (Exit.NOT_KNOWN, Exit.DONE)


def test_every_published_trap_is_caught_or_cannot_be_seen() -> None:
    caught = {int(number) for name in PUBLISHED for number in name.partition(":")[0].split(",")}
    assert caught.isdisjoint(UNSEEN)
    assert caught | set(UNSEEN) == set(range(1, 29))


def test_a_right_job_passes(prepared: Path) -> None:
    """The whole task, with its ranks."""
    done = Project(prepared).document("rehearse", "small")
    assert done["schema"] == "rehearsal/1"
    assert done["failed"] == 0
    by_name = {check["name"]: check for check in done["checks"]}
    assert by_name["batches"]["message"].startswith("one of each of 2 ranks")
    assert by_name["collectives"]["state"] == "held"
    assert not (prepared / "runs").exists()
    guide = (CHECKOUT / "docs" / "rehearse.md").read_text()
    assert re.findall(r"^\| `(.+?)` \|", guide, re.MULTILINE) == list(by_name)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_of_a_layout_agree(layout: str, prepared: Path) -> None:
    assert call("tests.rehearse.traced:disagreements", str(prepared), layout) == []


def test_a_branch_on_the_rank_is_a_hang(prepared: Path) -> None:
    found = call("tests.rehearse.traced:with_a_branch", str(prepared))
    (of_tensor, *_) = [words for words in found if "ranks 0, 1:" in words]
    assert "rank 0 does allreduce of 1 float64 (" in of_tensor
    assert "tests/rehearse" not in of_tensor and "update/step.py" in of_tensor
    assert "rank 1 has no more" in of_tensor


def test_a_checkpoint_of_another_width(prepared: Path, tmp_path: Path) -> None:
    """By its tensors; and `rehearse --resume` of a run passes only where it fits."""
    project = Project(tmp_path / "project")
    shutil.copytree(prepared, project.path)
    text = (project.path / "jobs.toml").read_text()
    (project.path / "jobs.toml").write_text(text.replace(str(prepared), str(project.path)))
    # a node of its own: runs of other tests hold this machine's
    alone = f'cluster.node_folder="{project.path}/node"'
    one = ("--set", "cluster.ranks_per_node=1", "--set", alone)
    project.invoke("train", "small", *one)
    (run,) = project.runs()
    (checkpoint,) = (run / "checkpoints").glob("step-*")
    wider, same = call("tests.rehearse.traced:of_another_width", str(project.path), str(checkpoint))
    assert "model.embed_tokens.weight is [257, 32] there and [257, 64] in the job" in wider
    assert "go on with the model that it was saved with" in wider and not same
    longer = ("--set", "training.train_iters=8")
    done = project.document("rehearse", "small", "--resume", run.name, *longer)
    by_name = {check["name"]: check["message"] for check in done["checks"]}
    assert by_name["checkpoint"].startswith("step 4: ") and done["failed"] == 0
    assert by_name["batches"].endswith("from 32")
    changed = ("--set", "model.hidden_size=64")
    done = project.document("rehearse", "small", "--resume", run.name, *changed, exit=3)
    assert "hidden_size" in done["checks"][0]["message"]


def test_train_rehearses_where_it_is_asked_to(prepared: Path) -> None:
    """A failed check ends it before there is a run; the job may ask for it as well."""
    project = Project(prepared)
    done = project.invoke("train", "elsewhere", "--rehearse", exit=3, timeout=600)
    assert "the rehearsal of elsewhere failed: tokenizer" in done.stderr
    assert not project.runs()
    done = project.invoke("train", "elsewhere", "--set", "rehearse=true", exit=3)
    assert "the rehearsal of elsewhere failed" in done.stderr


def test_ranks_of_a_large_world_are_few(prepared: Path) -> None:
    """512 ranks: of each of 16 stages the first, of four kinds of stages the last tensor-parallel
    one, and at the ends another data-parallel one."""
    sets = [
        "nodes=64",
        "parallelism={ tensor_model_parallel_size = 8, pipeline_model_parallel_size = 16 }",
    ]
    job = load(prepared).resolve("large", sets).job
    ranks = distinct_ranks(job, 51200)
    assert len(ranks) == 22 and ranks[0] == 0 and ranks[-1] == 504
    short = shortened(job)
    assert short.model.num_layers == 16 and traced_micro_batches(job) == 17
    same = [RankTrace(rank, 1, 1, {}, ()) for rank in ranks]
    assert further_ranks(job, 51200, same) == []
    # a middle stage that holds something else than the first of its kind
    other = [RankTrace(rank, 1 + (rank == 448), 1, {}, ()) for rank in ranks]
    assert further_ranks(job, 51200, other) == [455]


PARSER = """
import argparse

def parse_args():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    return parser.parse_known_args()[0]

def validate_args(args, defaults):
    {body}
"""


@pytest.mark.parametrize(
    ("body", "words", "hint"),
    [
        ("pass", "parser and checks take all", ""),
        ("assert False, 'num-layers must be odd'", "must be odd", "correct model.num_layers"),
        ("import no_such_module", "further checks do not run here: ModuleNotFoundError", ""),
        ("import os; os._exit(3)", "further checks do not run here: it ended with 3", ""),
    ],
)
def test_an_engines_own_parser(
    body: str, words: str, hint: str, prepared: Path, tmp_path: Path
) -> None:
    """In its tree and interpreter; that of a real tree: tests/engines/megatron_lm."""
    tree = tmp_path / "tree"
    write_files(tree, {**MEGATRON, "megatron/training/arguments.py": PARSER.format(body=body)})
    text = (prepared / "jobs.toml").read_text()
    engine = f'[engines.megatron-lm]\nsource = "{tree}"\npython = "{sys.executable}"\n'
    (tmp_path / "jobs.toml").write_text(text + engine)
    scene = scene_of(
        load(tmp_path),
        "small",
        RehearseOptions(set=("engine=megatron-lm", "parallelism.zero_stage=0")),
    )
    try:
        said = check_parser(scene)
    except NotLookedAt as why:
        said = f"not looked at: {why}"
    except ConfigError as error:
        said = str(error)
        assert hint and hint in said
    assert words in said
