"""docs/from-web-text.md is followed: its files are written as it says and its commands are typed,
in the environment of the tests; what was planted among its pages must be gone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.json
import pytest

from tests import forkserver

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/from-web-text.md"
PLANTED = 12  # of each kind


def files_and_commands() -> list[tuple[str, str]]:
    """In the page's order: ("make_pages.py", its text), or ("$", a command)."""
    found = []
    text = PAGE.read_text()
    for block in re.finditer(r"^```(python|toml|sh)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        language, content = block.groups()
        if language == "sh":
            lines = [line.split("  #")[0].strip() for line in content.splitlines()]
            found += [("$", line) for line in lines]
        else:
            name = re.findall(r"ave (?:it|this) as\s`([\w./]+)`", text[: block.start()])[-1]
            found.append((name, content))
    return found


def type_command(line: str, folder: Path) -> str:
    """What it prints."""
    program, *words = shlex.split(line)
    environment = {**os.environ, "TMPDIR": str(folder), "COLUMNS": "160"}
    if program == "./inv":
        argv = [sys.executable, "-P", "-m", "trainkit", "--search-root", str(folder), *words]
    else:
        assert program in ("python3", ".venv/bin/python"), line
        argv = [sys.executable, *words]
    done = forkserver.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert isinstance(done.stdout, str)
    return done.stdout


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("more", "before", "after"),
    [
        ("[jobs.tiny-on-pages.training]\ntrain_iters = 16\neval_interval = 8\n", 7.5, 7.3),
        pytest.param("", 7.5, 6.0, marks=pytest.mark.slow),
    ],
    ids=["16 steps", "all steps"],
)
def test_raw_pages_become_a_trained_model(
    tmp_path: Path, more: str, before: float, after: float
) -> None:
    """The training loss is above `before` at first, and below `after` in the last steps."""
    shutil.copy(ROOT / "jobs.toml", tmp_path)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs.local.toml").write_text(
        f'[clusters.here]\nnode_folder = "{tmp_path}/node"\n{more}'
    )
    printed = {}
    for name, content in files_and_commands():
        if name == "$":
            printed[content] = type_command(content, tmp_path)
        else:
            (tmp_path / name).write_text(content)
    check_funnel(tmp_path / "data/pages/curated")
    quiz = printed["./inv data-why pages quiz-3"]
    assert "contaminated (benchmark.jsonl:1 in line 9: which planet of" in quiz
    mirror = printed["./inv data-why pages mirror-0"]
    assert re.search(r"kept instead: \w{16}, .* about 0\.9\d alike\n---\nMirror 0\n", mirror)
    assert printed[".venv/bin/python read_pages.py"].startswith(
        "Write to email@example.com or call.\nhttps://contact-0.example.org/ en "
    )
    (run,) = tmp_path.glob("runs/tiny-on-pages/*")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [row["lm_loss"] for row in rows if "eval" not in row]
    assert losses[0] > before and sum(losses[-4:]) / 4 < after


def check_funnel(folder: Path) -> None:
    """What was planted is gone, for the reason that the page says; what is left is whole."""
    curation = json.loads((folder / "curation.json").read_text())
    steps = {step["step"]: step for step in curation["steps"]}
    left = rows(folder / "00000.jsonl.zst")
    kinds = [str(page["id"]).partition("-")[0] for page in left]
    dropped = [
        entry
        for number in range(curation["passes"])
        for entry in rows(folder / f"dropped/pass-{number}/00000.jsonl.zst")
    ]
    reasons = {entry["name"]: (entry["step"], entry["reason"]) for entry in dropped}
    assert curation["lines"] == len(left) + len(dropped)
    assert curation["documents"] == len(left) == steps["decontaminate"]["documents_out"]
    assert set(kinds) == {"article", "contact"} and kinds.count("article") > 50
    for number in range(PLANTED):
        assert reasons[f"german-{number}"] == ("language", "language")
        assert reasons[f"menu-{number}"] == ("fineweb", "line_punct_ratio")
        assert f"quiz-{number}" in reasons
    assert steps["decontaminate"]["reasons"]["contaminated"] >= PLANTED - 4
    assert steps["minhash"]["reasons"]["duplicate"] >= PLANTED
    text = "\n".join(str(page["text"]) for page in left)
    assert "docs.example.org" not in text and "privacy policy" not in text
    assert "email@example.com" in text


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl.zst."""
    found: list[dict[str, Any]] = pyarrow.json.read_json(path).to_pylist()
    return found
