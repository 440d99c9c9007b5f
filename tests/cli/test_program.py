"""The program `trainkit`, which `./inv` is too: its help page, hints, completion; and that
`init` leads to a job that trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forkserver
from tests.conftest import Project

ROOT = Path(__file__).resolve().parents[2]


def trainkit(
    folder: Path, *words: str, exit: int = 0, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the program in a folder; fails unless it ends with `exit`."""
    argv = [sys.executable, "-P", "-m", "trainkit", *words]
    done = forkserver.run(
        argv,
        cwd=folder,
        env=Project(folder).environment(**more),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == exit, (
        f"trainkit {' '.join(words)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    assert "Traceback" not in done.stderr
    return done


def test_bare_it_shows_its_own_page(project: Project, tmp_path: Path) -> None:
    for words in ([], ["--help"]):
        page = trainkit(project.path, *words, COLUMNS="80").stdout
        assert page.startswith("usage: trainkit TASK") and "core-opts" not in page
        listed = json.loads(trainkit(project.path, "--list", "--list-format=json").stdout)
        assert all(f"\n  {task['name']} " in page for task in listed["tasks"])
        assert max(map(len, page.splitlines()[:-2])) <= 80
    ours = "@task\ndef mine(c):\n    'Ours.'\nnamespace.add_task(mine)\n"
    (tmp_path / "tasks.py").write_text(
        f"from invoke import task\nfrom trainkit.cli.tasks import namespace\n{ours}"
    )
    assert "Of this project:\n  mine             Ours.\n" in trainkit(project.path).stdout


def test_without_a_tasks_file_the_tasks_are_there(project: Project) -> None:
    (project.path / "tasks.py").unlink()
    assert trainkit(project.path / "corpus", "check").stdout.endswith("2 jobs, no problems\n")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["check", "--nosuch"], "check has no --nosuch", "its options: trainkit --help check"),
        (["jobs", "txt"], "'txt' is neither an argument of jobs nor a task", ""),
        (["train"], "train needs a JOB", "usage: trainkit train JOB [options]"),
        (["jobs", "--search-root"], "--search-root needs a value", ""),
        (["import", "--nosuch"], "import needs a FILE before", "invoke --help import"),
    ],
)
def test_a_usage_error_is_a_document_too(
    project: Project, words: list[str], message: str, hint: str
) -> None:
    refused = trainkit(project.path, words[0], "--json", *words[1:], exit=1)
    error = json.loads(refused.stdout)
    (problem,) = error["problems"]
    assert (error["schema"], error["exit"]) == ("error/1", 1)
    assert message in problem["message"] and problem["message"] in refused.stderr
    assert hint in problem["hint"]
    assert problem["hint"].replace("invoke ", "trainkit ") in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trian", "text"], "error: there is no task 'trian'\n  did you mean train?\n"),
        (["xyzzy"], "error: there is no task 'xyzzy'\n  trainkit --help lists the tasks\n"),
        (["--help", "trian"], "error: there is no task 'trian'\n  did you mean train?\n"),
        (
            ["prep-data", "lines"],
            (
                "error: prep-data takes 'lines' only after a flag\n"
                "  did you mean trainkit prep-data"
                " --dataset lines?\n"
            ),
        ),
        (
            ["prep-data", "random"],
            (
                "error: prep-data takes 'random' only after a flag\n"
                "  did you mean trainkit prep-data"
                " --job random?\n"
            ),
        ),
        (
            ["prep-data", "what"],
            (
                "error: 'what' is neither an argument of prep-data nor a task\n  usage:"
                " trainkit prep-data [options]\n"
            ),
        ),
        (
            ["train", "text", "--nods", "2"],
            "error: trainkit train has no --nods\n  did you mean --nodes?\n",
        ),
        (["train"], "error: train needs a JOB\n  usage: trainkit train JOB [options]\n"),
    ],
)
def test_what_is_not_known_gets_a_hint(project: Project, words: list[str], said: str) -> None:
    assert trainkit(project.path, *words, exit=1).stderr == said


def test_a_benchmark_needs_no_flag_before_it(project: Project) -> None:
    refused = trainkit(project.path, "bench", "nope", exit=3)
    assert "there is no benchmarks/nope.py" in refused.stderr


def test_help_of_a_task_before_or_behind_it(project: Project) -> None:
    pages = {
        trainkit(project.path, *words).stdout
        for words in (["--help", "train"], ["train", "--help"], ["train", "-h"])
    }
    (page,) = pages
    assert (
        page.startswith("usage: trainkit train JOB [options]\n\nPrepare what is stale")
        and "--set" in page
    )


def test_it_is_the_same_program(project: Project) -> None:
    """Words, documents, errors and exit codes are those of `invoke`."""
    for words, code in (
        (["jobs", "--json"], 0),
        (["show", "text", "--explain", "training.lr", "--json"], 0),
        (["train", "txt", "--json"], 3),
    ):
        there, here = project.invoke(*words, exit=code), trainkit(project.path, *words, exit=code)
        assert (there.stdout, there.stderr) == (here.stdout, here.stderr)
    assert "start one: trainkit train JOB" in trainkit(project.path, "runs").stdout
    assert "start one: trainkit train JOB" in trainkit(project.path, "why", "last", exit=3).stderr


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("./inv tra", ["train"]),
        ("./inv train ", ["random", "text"]),
        ("./inv train t", ["text"]),
        ("./inv train --cluster ", ["here"]),
        ("./inv train --nodes 2 r", ["random"]),
        ("./inv prep-data --dataset l", ["lines"]),
        ("./inv prep-data --job ", ["random", "text"]),
        ("./inv status ", ["20260101-000000-abcd", "last", "text"]),
        ("./inv fleet st", ["start", "status", "stop"]),
        ("./inv train text --set training.train_i", ["training.train_iters="]),
        ("./inv train text --set model.num_q", ["model.num_query_groups="]),
        ("./inv train text --no-s", ["--no-stages"]),
        ("./inv --list-f", ["--list-format"]),
    ],
)
def test_completion(project: Project, line: str, expected: list[str]) -> None:
    run = project.path / "runs" / "text" / "20260101-000000-abcd"
    run.mkdir(parents=True)
    (run / "job.json").write_text("{}")
    assert trainkit(project.path, "--complete", "--", *line.split(" ")).stdout.split() == expected


def test_completion_does_not_mind_a_broken_file(project: Project) -> None:
    (project.path / "jobs.toml").write_text("[jobs.a\n")
    assert trainkit(project.path, "--complete", "--", "inv", "train", "").stdout == ""


def test_bash_completes_for_the_command_that_was_typed(project: Project) -> None:
    """The script, in a real bash: COMP_WORDS as it is for `./inv train te`, with ./inv in the
    current folder."""
    (project.path / "inv").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m trainkit "$@"\n')
    (project.path / "inv").chmod(0o755)
    script = trainkit(project.path, "--print-completion-script", "bash").stdout
    drill = (
        f"{script}\ncomplete -p ./inv\nCOMP_WORDS=(./inv train te); COMP_CWORD=2;"
        ' _complete_trainkit; echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", drill], cwd=project.path, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["complete -o default -F _complete_trainkit ./inv", "text"]
    assert (
        "one of bash, zsh, fish"
        in trainkit(project.path, "--print-completion-script", "csh", exit=1).stderr
    )


@pytest.mark.parametrize(
    "words", [("--help",), ("--list",), ("--help", "train"), ("jobs",), ("jobs", "--json")]
)
def test_it_survives_a_reader_that_has_gone(project: Project, words: tuple[str, ...]) -> None:
    """`trainkit jobs | head`: no traceback, and the code of a program that SIGPIPE ended."""
    unread, out = os.pipe()
    os.close(unread)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainkit", *words],
        cwd=project.path,
        env=project.environment(),
        stdout=out,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    os.close(out)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_listing_and_completing_names_import_nothing_heavy(project: Project) -> None:
    for words in (["--help"], ["--complete", "--", "inv", "train", ""]):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-m", "trainkit", *words],
            cwd=project.path,
            capture_output=True,
            text=True,
            check=True,
        )
        imported = {
            line.rpartition("|")[2].strip().split(".")[0]
            for line in done.stderr.splitlines()
            if line.startswith("import time:")
        }
        assert "invoke" in imported and not imported & {
            "torch",
            "pydantic",
            "rich",
            "numpy",
            "tokenizers",
        }


# -- init


@pytest.mark.parametrize("found", [True, False])
def test_init_names_a_command_that_a_shell_finds(tmp_path: Path, found: bool) -> None:
    """The program's name where it is on PATH, else its path."""
    program = Path(sys.executable).with_name("trainkit")
    path = f"{program.parent}:/usr/bin:/bin" if found else "/usr/bin:/bin"
    said = subprocess.run(
        [program, "init", "--dry-run"],
        cwd=tmp_path,
        env={"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"next:\n  {'trainkit' if found else program} plan mine\n" in said


def test_init_writes_a_job_that_can_be_checked(tmp_path: Path) -> None:
    (tmp_path / "books").mkdir()
    book = {"id": "1", "content": "a longer text of a book, page by page " * 1000}
    (tmp_path / "books" / "a.jsonl").write_text(json.dumps(book) + "\n")
    said = trainkit(tmp_path, "init", "--text", "books/*.jsonl", "--dry-run").stdout
    assert (
        "would write" in said and [path.name for path in tmp_path.iterdir() if path.is_file()] == []
    )
    assert (
        "trainkit train mine"
        in trainkit(tmp_path, "init", "--text", "books/*.jsonl", "--vocab-size", "500").stdout
    )
    text = (tmp_path / "jobs.toml").read_text()
    assert (
        text.startswith("#:schema ./jobs.schema.json\n")
        and json.loads((tmp_path / "jobs.schema.json").read_text())["definitions"]
    )
    assert (
        'paths = ["books/*.jsonl"]\ntext_key = "content"\n' in text and "vocab_size = 500" in text
    )
    trainkit(tmp_path, "check")
    assert json.loads(trainkit(tmp_path, "plan", "mine", "--json").stdout)["schema"] == "plan/1"
    # tasks.py is there for invoke
    assert forkserver.run(
        [sys.executable, "-m", "invoke", "check"], cwd=tmp_path, capture_output=True, check=True
    )
    before = (tmp_path / "jobs.toml").stat().st_mtime_ns
    assert (
        "exists already" in trainkit(tmp_path, "init", exit=3).stderr
        and (tmp_path / "jobs.toml").stat().st_mtime_ns == before
    )


def test_what_init_writes_trains(tmp_path: Path) -> None:
    lines = [
        json.dumps({"text": f"line {i} of a small corpus, that is read once and then again"})
        for i in range(400)
    ]
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "a.jsonl").write_text("\n".join(lines) + "\n")
    trainkit(tmp_path, "init", "--vocab-size", "300")
    # slots of its own
    (tmp_path / "jobs.local.toml").write_text(f'[clusters.here]\nnode_folder = "{tmp_path}/node"\n')
    sets = (
        "training.train_iters=2",
        "training.eval_iters=1",
        "model.hidden_size=32",
        "model.seq_length=16",
        "training.lr_warmup_iters=1",
    )
    out = trainkit(
        tmp_path, "train", "mine", *(word for value in sets for word in ("--set", value))
    ).stdout
    assert "step 2/2" in out and "a sample from the model:" in out


@pytest.mark.parametrize("release", ["new", "../x"])
def test_what_is_no_release_of_torch(tmp_path: Path, release: str) -> None:
    said = trainkit(tmp_path, "test", "--torch", release, "tests/ops", exit=3).stderr
    assert f"--torch {release!r} is not a release of torch" in said
