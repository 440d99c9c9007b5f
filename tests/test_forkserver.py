"""What forked programs leave in the test that started them."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

from tests import forkserver


def test_one_that_is_forgotten_breaks_no_later_start(tmp_path: Path) -> None:
    """A test that fails forgets its programs, together with their connections."""
    script = tmp_path / "waits.py"
    script.write_text("import sys\nsys.stdin.read()\n")
    child = forkserver.Popen([sys.executable, str(script)], stdin=subprocess.PIPE)
    assert child._connection is not None, "it was not forked"
    circle = [child, child._connection]
    circle.append(circle)
    del child, circle
    gc.collect()
    subprocess.run(["true"], check=True)


def test_an_interpreter_is_known_by_another_way_to_it(tmp_path: Path) -> None:
    """As where the tests were begun with `../clone/.venv/bin/python`."""
    script = tmp_path / "says.py"
    script.write_text("print('here')\n")
    python = Path(sys.executable)
    way = f"{python.parent}/../{python.parent.name}/{python.name}"
    child = forkserver.Popen([way, str(script)], stdout=subprocess.PIPE)
    assert child._connection is not None, "it was not forked"
    assert child.communicate()[0] == b"here\n"
