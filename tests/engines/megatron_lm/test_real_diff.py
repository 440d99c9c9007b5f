"""An unmodified Megatron-LM beside the native trainer: `diff-engines` on real text in Megatron's
order of samples, from one model's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Project
from tests.engines.real import RealEngine, environment_toml, parameters, write_job

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("real", parameters("megatron-lm"))
def test_it_computes_what_native_computes(real: RealEngine, tmp_path: Path) -> None:
    tables = write_job(tmp_path, real, "here", 1)
    cluster = f'ranks_per_node = 2\nnode_folder = "{tmp_path}/node"\nenv = '
    ours = '[jobs.ours]\nextends = "tiny"\nengine = "native"\n'
    (tmp_path / "jobs.toml").write_text(
        f"[clusters.here]\n{cluster}{environment_toml(real)}\n{tables}\n{ours}"
    )
    (tmp_path / "tasks.py").write_text("from trainkit.cli.tasks import namespace\n")
    asked = ("diff-engines", "tiny", "--engines=ours,megatron-lm", "--steps=4")
    found = Project(tmp_path).document(*asked)
    compared = [(each["step"], each["number"]) for each in found["steps"]]
    assert len(compared) == 7 and (2, "lm_loss") not in compared  # a mean from core 0.16 on
    worst = max(each["relative"] for each in found["steps"])
    moved = max(each["parts"] for each in found["tensors"])
    print(f"{real.tree.name}: numbers {worst:.1e} apart, tensors {moved:.1e} of their way")
