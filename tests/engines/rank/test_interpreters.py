"""The program beside a rank, run by the Pythons of the images of others, the engine by the same."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.engines.rank.made_engine import MAIN, environment, spec_of
from tests.interpreters import TOO_OLD, found_or_skip
from tests.test_image_python import too_new
from trainkit.engines.rank import preflight
from trainkit.engines.rank.spec import RequiredModule

WHOLE = "for step in range(1, 5):\n    line(step)\nsave(4)\n"
SAYS_WHO = "print('%d.%d' % sys.version_info[:2], sys.executable)\n"


class Ranks:
    """Ranks of one interpreter, one folder each."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python = python
        self.folder = folder
        self.error: dict[str, Any] = {}
        self.beat: dict[str, Any] = {}

    def run(self, name: str, body: str, **changes: Any) -> subprocess.CompletedProcess[str]:
        """The program from its start to its end, with what it said of them."""
        folder = self.folder / name
        folder.mkdir()
        argv = (self.python, "pretrain_gpt.py", str(folder / "checkpoints"))
        spec = spec_of(folder, body, **{"argv": argv, **changes})
        done = subprocess.run(
            [self.python, "-I", "-S", str(MAIN), str(spec)],
            env=environment(folder),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        told = folder / "error.json"
        self.error = json.loads(told.read_text()) if told.exists() else {}
        self.beat = json.loads((folder / "beat.json").read_text())
        return done


def test_from_start_to_success_and_to_each_failure(image_python: str, tmp_path: Path) -> None:
    ranks = Ranks(image_python, tmp_path)
    modules = (RequiredModule("json", "never"),)
    done = ranks.run("whole", SAYS_WHO + WHOLE, modules=modules)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == image_python, "the engine ran with the same"
    assert ranks.beat["phase"] == "done" and not ranks.error
    rows = (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]

    done = ranks.run("early", "line(1)\nline(2)\nsave(2)\n")
    assert done.returncode == 9, "the engine's 0 proves nothing"
    assert ranks.error["type"] == "EngineEndedEarly"
    assert "after iteration 2 of 4" in ranks.error["message"]

    done = ranks.run("raises", "line(1)\nraise ValueError('vocab size 7 is too small')\n")
    assert (done.returncode, ranks.error["type"]) == (9, "ValueError")

    done = ranks.run("killed", "line(1)\nos.kill(os.getpid(), signal.SIGKILL)\n")
    assert done.returncode == -signal.SIGKILL

    modules = (RequiredModule("no_such_module", "pip install it"),)
    missing = str(tmp_path / "vocab.json")
    done = ranks.run("preflight", WHOLE, modules=modules, reads=(missing,))
    assert done.returncode == 7
    assert f"{image_python} on" in ranks.error["message"]
    assert "no module no_such_module: pip install it" in ranks.error["message"]
    assert f"{missing} is not there" in ranks.error["message"]
    assert "iteration" not in done.stdout


@pytest.mark.parametrize("version", TOO_OLD)
def test_a_python_that_is_too_old_says_so(tmp_path: Path, version: str) -> None:
    python = found_or_skip(version)
    argv = [python, "-I", "-S", str(MAIN), str(spec_of(tmp_path, ""))]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 7
    assert f"{python} is Python {version}" in done.stderr
    assert "3.8 or newer is needed: engines.X.python" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_the_engines_interpreter_is_asked_is_python_38() -> None:
    """A text, which no check of files sees."""
    assert not too_new(preflight.CODE)
