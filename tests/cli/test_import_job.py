"""`invoke import`: files of other engines become jobs."""

from __future__ import annotations

from pathlib import Path

import tomli

from tests.conftest import Project

SCRIPT = (
    "torchrun --nproc_per_node 2 pretrain_gpt.py --num-layers 2 --hidden-size 32"
    " --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 --global-batch-size 8"
    " --train-iters 20 --lr 1e-2 --mock-data --vocab-size 128 --tokenizer-type NullTokenizer\n"
)


def test_a_script_is_written_checked_and_planned(project: Project) -> None:
    (project.path / "run_me.sh").write_text(SCRIPT)
    text = (project.path / "jobs.toml").read_text()
    (project.path / "jobs.toml").write_text('include = ["imported.toml"]\n' + text)
    (project.path / "imported.toml").unlink(missing_ok=True)
    said = project.invoke(
        "import", "run_me.sh", "--out", "imported.toml", "--cluster", "here", "--name", "mine"
    )
    assert "wrote" in said.stdout and "nproc_per_node" in said.stdout
    tables = tomli.loads((project.path / "imported.toml").read_text())
    assert tables["jobs"]["mine"]["engine"] == "megatron-lm"
    assert project.document("check")["problems"] == []
    assert project.document("plan", "mine")["feasible"]
    project.invoke("import", "run_me.sh", "--out", "imported.toml", exit=3)


def test_a_file_is_printed_and_what_is_not_taken_with_it(project: Project) -> None:
    (project.path / "Run 1.sh").write_text(SCRIPT.replace("--mock-data", "--mock-data --odd 1"))
    said = project.invoke("import", "Run 1.sh").stdout
    assert "[jobs.run-1]" in said
    assert "# not taken: --odd" in said
    found = project.document("import", "Run 1.sh")
    assert tomli.loads(found["toml"]) == tomli.loads(said)
    assert any("--odd" in each for each in found["not_taken"])


def test_what_cannot_be_imported_is_said(project: Project, tmp_path: Path) -> None:
    assert "cannot be read" in project.invoke("import", "no.sh", exit=3).stderr
    (project.path / "x.sh").write_text("echo\n")
    assert "nothing in it runs" in project.invoke("import", "x.sh", exit=3).stderr
    version = project.invoke("import", "x.sh", "--version", "core-0.12", exit=3).stderr
    assert "core-0.12.0" in version
    engine = project.invoke("import", "x.sh", "--engine", "megatron", exit=3).stderr
    assert "megatron-lm" in engine
