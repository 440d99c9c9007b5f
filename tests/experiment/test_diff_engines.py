"""`diff-engines` as a person types it: two jobs of one model; with torchtitan, tests/engines has
it."""

from __future__ import annotations

import pytest

from tests.conftest import Project

JOBS = """
[clusters.here]
ranks_per_node = 2

[models.tiny]
family = "llama"
num_layers = 2
hidden_size = 32
num_attention_heads = 4
seq_length = 32
vocab_size = 64

[jobs.one]
cluster = "here"
model = "tiny"
dataset = "mock"

[jobs.one.training]
micro_batch_size = 2
global_batch_size = 8
train_iters = 50
lr = 1e-2
lr_warmup_iters = 2

[jobs.same]
extends = "one"
training.micro_batch_size = 4

[jobs.rates]
extends = "one"
training.lr = 2e-2

[models.twin]
extends = "tiny"

[jobs.twin]
extends = "one"
model = "twin"

[jobs.wider]
extends = "one"
model = "wide"

[models.wide]
extends = "tiny"
hidden_size = 64
"""


@pytest.fixture
def project(project: Project) -> Project:
    place = f'[clusters.here]\nnode_folder = "{project.path}/node"'
    (project.path / "jobs.toml").write_text(JOBS.replace("[clusters.here]", place))
    return project


def test_one_engine_beside_itself(project: Project) -> None:
    found = project.document("diff-engines", "one", "--engines=native,same", "--steps=3")
    assert found["first"] == {"lm_loss": None, "grad_norm": None}
    assert [(each["step"], each["number"]) for each in found["steps"]] == [
        (step, number) for step in (1, 2, 3) for number in ("grad_norm", "lm_loss")
    ]
    assert all(each["relative"] < 1e-5 for each in found["steps"])
    assert found["first_tensor"] is None and max(each["parts"] for each in found["tensors"]) < 1e-2
    assert found["tensors"][0]["name"] == "embed_tokens.weight"


def test_other_rates_are_seen(project: Project) -> None:
    """The same first loss; then weights that have gone another way."""
    asked = ("diff-engines", "one", "--engines=one,rates", "--steps=3", "--tolerance=1e-6")
    shown = project.invoke(*asked, "--html=apart.html", exit=7).stdout
    assert "loss apart by more than 1e-06: at step 2" in shown
    assert "of its way: embed_tokens.weight" in shown
    assert "<svg" in (project.path / "apart.html").read_text()


def test_models_are_compared_by_what_they_say(project: Project) -> None:
    asked = ("diff-engines", "one", "--engines=one,twin", "--dry-run")
    assert "one and twin: 10 steps each" in project.invoke(*asked).stdout


@pytest.mark.parametrize(
    ("engines", "why"),
    [
        ("native", "is not two"),
        ("one,wider", "differ in model"),
        ("one,nemo", "native and nemo read no samples in the same order"),
        ("one,absent", "no job 'absent'"),
        ("one,twin --foreground", "--foreground is nothing that diff-engines does"),
        ("one,twin --no-stages", "--no-stages is nothing that diff-engines does"),
    ],
)
def test_refused(project: Project, engines: str, why: str) -> None:
    done = project.invoke("diff-engines", "one", *f"--engines={engines}".split(), exit=3)
    assert why in done.stderr + done.stdout
    assert not (project.path / "runs").exists()
