"""The command line as a person meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests import forkserver
from tests.conftest import TASKS, Project

TASK_NAMES = [
    "attach",
    "average",
    "bench",
    "board",
    "build",
    "build-container",
    "cancel",
    "check",
    "checkpoints",
    "clean",
    "compare",
    "convert",
    "coord-check",
    "data-stats",
    "data-verify",
    "data-why",
    "diff-engines",
    "docs",
    "doctor",
    "drill",
    "evaluate",
    "export",
    "fleet",
    "generate",
    "graph",
    "import",
    "init",
    "jobs",
    "logs",
    "nodes",
    "plan",
    "precompile",
    "prep-data",
    "rehearse",
    "replay",
    "report",
    "resume",
    "runs",
    "scale",
    "scaling-law",
    "setup-hosts",
    "show",
    "status",
    "sweep",
    "tensorboard",
    "test",
    "train",
    "why",
]


def test_the_surface_is_frozen(project: Project) -> None:
    listed = json.loads(project.invoke("--list", "--list-format=json").stdout)
    assert sorted(task["name"] for task in listed["tasks"]) == TASK_NAMES
    assert all(task["help"] for task in listed["tasks"])


HELP = """
import sys
from invoke.main import program
sys.stdout.reconfigure(line_buffering=True)
for task in sys.argv[1:]:
    print(f"=== {task}")
    program.run(["invoke", "--help", task], exit=False)
"""


def test_every_task_has_help(project: Project) -> None:
    """Invoke's own program, all of them in one process."""
    argv = [sys.executable, "-c", HELP, *TASK_NAMES]
    out = subprocess.run(argv, cwd=project.path, capture_output=True, text=True, check=True).stdout
    pages = dict(zip(TASK_NAMES, out.split("=== ")[1:], strict=True))
    assert all(
        "Docstring:" in page and page.startswith(f"{task}\n") and f" {task} " in page
        for task, page in pages.items()
    )


def test_a_flag_is_no_job(project: Project) -> None:
    refused = project.invoke("train", "--help", exit=1)
    assert (
        refused.stderr
        == "error: train needs a JOB before '--help'\n  for its help: invoke --help train\n"
    )
    assert project.invoke("prep-data", "--dri-run", exit=1)


def test_a_number_out_of_range_is_a_document_too(project: Project) -> None:
    error = project.document("evaluate", "last", "--samples", "-4", exit=1)
    said = "--samples -4: it must be at least 0"
    assert (error["schema"], error["exit"]) == ("error/1", 1)
    assert error["problems"] == [{"message": said, "hint": "", "file": None, "line": None}]


def test_an_unknown_job_names_the_nearest(project: Project) -> None:
    refused = project.invoke("train", "txt", exit=3)
    assert (
        "has no job 'txt'" in refused.stderr and "'text'" in refused.stderr and refused.stdout == ""
    )
    error = project.document("train", "txt", exit=3)
    assert (
        error["schema"] == "error/1"
        and error["exit"] == 3
        and "txt" in error["problems"][0]["message"]
    )


def test_every_mistake_is_told_at_once_with_file_and_line(project: Project) -> None:
    path = project.path / "jobs.toml"
    given = path.read_text()
    # only once each: the file has two jobs
    text = given.replace("num_layers = 2", 'num_layers = "2"', 1)
    text = text.replace("lr_warmup_iters = 2", "lr_warmupiters = 2", 1)
    path.write_text(text)
    lines = text.splitlines()
    layer, warmup = (
        1 + next(i for i, line in enumerate(lines) if 'num_layers = "2"' in line),
        1 + next(i for i, line in enumerate(lines) if "lr_warmupiters" in line),
    )
    for words in (["check"], ["train", "text"], ["show", "text"]):
        refused = project.invoke(*words, exit=3).stderr
        assert (
            f"jobs.toml:{layer}: " in refused
            and f"jobs.toml:{warmup}: " in refused
            and "'lr_warmup_iters'" in refused
        )
    path.write_text(given)
    error = project.document("show", "text", "--set", "training.lrr=1", exit=3)
    (problem,) = error["problems"]
    assert (problem["file"], problem["line"]) == ("--set", None)
    assert not (project.path / "runs").exists() and not (project.path / "data").exists()


def test_a_part_of_a_blend_is_told_the_keys_of_its_own_table(project: Project) -> None:
    path = project.path / "jobs.toml"
    path.write_text(
        path.read_text().replace('dataset = "lines"', 'dataset = "mix"')
        + '[datasets.mix]\nsource = "blend"\nblend = ["part"]\n'
        '[datasets.part]\nsource = "files"\npaths = ["a"]\ntokenizer = "t"\n'
        '[tokenizers.t]\ntype = "file"\npath = "t.json"\nbanana = 1\n'
    )
    error = project.document("show", "text", exit=3)
    (hint,) = (each["hint"] for each in error["problems"])
    assert "append_eod" in hint and "prefixes" not in hint


def test_an_error_of_the_system_is_a_document_too(project: Project) -> None:
    run = project.path / "runs/text/20260101-000000-aaaa"
    (run / "attempts/1/events.jsonl").mkdir(parents=True)
    (run / "job.json").write_text("{}")
    (problem,) = project.document("runs", exit=6)["problems"]
    assert problem["message"].startswith("Is a directory: /")


def test_broken_toml_and_no_toml(project: Project, tmp_path: Path) -> None:
    (project.path / "jobs.toml").write_text("[jobs.a\n")
    assert "jobs.toml:1" in project.invoke("jobs", exit=3).stderr
    (project.path / "jobs.toml").unlink()
    assert "no jobs.toml" in project.invoke("jobs", exit=3).stderr


def test_json_is_one_document_and_prose_is_on_stderr(project: Project) -> None:
    for words, schema in (
        (["jobs"], "jobs/1"),
        (["show", "text"], "job/1"),
        (["show", "text", "--explain", "training.lr"], "explain/1"),
        (["show", "text", "--format", "json"], "job/1"),
        (["check"], "check/1"),
        (["runs"], "runs/1"),
        (["build"], "stages/1"),
        (["prep-data"], "stages/1"),
        (["train", "text", "--dry-run"], "dry-run/1"),
    ):
        assert project.document(*words)["schema"] == schema


def test_bare_prep_data_serves_the_default_job_and_says_so(project: Project) -> None:
    assert "for the job text, named in [defaults]" in project.invoke("prep-data").stdout
    assert "mock data needs no preparation" in project.invoke("prep-data", "--job", "random").stdout
    path = project.path / "jobs.toml"
    path.write_text(path.read_text().replace('[defaults]\njob = "text"', ""))
    assert "--job" in project.invoke("prep-data", exit=3).stderr


def test_runs_that_are_not_there(project: Project) -> None:
    assert "there are no runs" in project.invoke("status", "last", exit=3).stderr
    for words in (
        ["status", "x"],
        ["logs", "x"],
        ["resume", "x"],
        ["generate", "x"],
        ["report", "x"],
        ["attach", "x"],
        ["cancel", "x"],
        ["why", "x"],
    ):
        project.invoke(*words, exit=3)


def test_from_a_subfolder_and_from_elsewhere(project: Project) -> None:
    below = project.path / "corpus"
    for folder, words in ((below, []), (Path("/"), ["--search-root", str(project.path)])):
        done = forkserver.run(
            [sys.executable, "-m", "invoke", *words, "jobs", "--json"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["root"] == str(project.path)


def test_a_closed_pipe_is_no_error(project: Project) -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m invoke show text | true"],
        cwd=project.path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr and "Error" not in done.stderr


def test_tasks_file_is_one_line() -> None:
    assert TASKS.count("\n") == 1


BAD_NUMBERS = [
    (
        ["logs", "last", "--rank", "abc"],
        "--rank takes ranks such as 3 or 0,8-15, or the word failed, not 'abc'",
    ),
    (["logs", "last", "--rank", "3-1"], "not '3-1'"),
    (["train", "text", "--nodes", "-1"], "--nodes -1: it must be at least 0"),
    (["logs", "last", "--lines", "-1"], "--lines -1: it must be at least 0"),
    (["generate", "last", "--max-new-tokens", "0"], "--max-new-tokens 0: it must be at least 1"),
    (["generate", "last", "--temperature", "warm"], "--temperature takes a number"),
    (
        ["generate", "last", "--seed", "99999999999999999999"],
        "--seed 99999999999999999999 is too large: it must be below 2**63",
    ),
    (["generate", "last", "--seed", "9" * 400], "is too large"),
    (["generate", "last", "--seed", "-1"], "--seed -1: it must be at least 0"),
    (
        ["generate", "last", "--temperature", "inf"],
        "--temperature takes a finite number, not 'inf'",
    ),
    (
        ["generate", "last", "--temperature", "nan"],
        "--temperature takes a finite number, not 'nan'",
    ),
    (["tensorboard", "--port", "x"], "--port takes a whole number"),
]
EACH = """
import json, sys
from invoke.main import program
for words in json.loads(sys.argv[1]):
    print("===", file=sys.stderr, flush=True)
    try:
        program.run(["invoke", *words])
    except SystemExit as leave:
        print(f"exit {leave.code}", file=sys.stderr, flush=True)
"""


def test_a_bad_number_is_one_line(project: Project) -> None:
    """All in one process: a task that refuses its words has done nothing yet."""
    argv = [sys.executable, "-c", EACH, json.dumps([words for words, _ in BAD_NUMBERS])]
    told = subprocess.run(
        argv, cwd=project.path, capture_output=True, text=True, check=True
    ).stderr.split("===\n")[1:]
    for (words, said), text in zip(BAD_NUMBERS, told, strict=True):
        line, code, *more = text.splitlines()
        assert said in line and code == "exit 1" and not more, (words, text)


def test_a_root_that_cannot_be_written(project: Project) -> None:
    (project.path / "runs").write_text("a file where a folder should be")
    error = project.document("train", "random", exit=6)
    assert error["schema"] == "error/1" and "runs" in error["problems"][0]["message"]
