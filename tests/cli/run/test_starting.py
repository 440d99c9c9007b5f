"""What others see of a run between its first file and its supervisor's first word."""

from __future__ import annotations

from tests.conftest import Project, wait_for
from trainkit.runs.folder import RunFolder
from trainkit.runs.record import read_run_record


def test_a_run_that_is_just_beginning_has_not_failed(project: Project) -> None:
    typed = project.start("train", "random", "--detach")
    path = wait_for(lambda: next(iter(project.runs()), None), "a run")
    seen: list[str] = []

    def begun() -> bool:
        seen.append(read_run_record(RunFolder(path)).state)
        return seen[-1] not in ("starting", "failed")

    wait_for(begun, "its supervisor")
    out, err = typed.communicate(timeout=600)
    project.invoke("cancel", path.name, exit=15)
    assert typed.returncode == 0, out + err
    assert seen[0] == "starting" and seen[-1] == "running" and set(seen) == {"starting", "running"}
