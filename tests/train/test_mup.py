"""muP: what its rules are, that the base is the standard model bit for bit, and that activations
stay as they are at any width. Layouts are compared in tests/train/parallel/test_layout_matrix.py.
"""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.conftest import Project
from tests.train.hf_support import TOKENS_BS, VOCAB, equal, loaded, ours, save, write
from tests.train.plain_loop import TRAINING, job_of
from trainkit.jobs.optimizers import rate_factor, role_of
from trainkit.jobs.schema import Model, Training
from trainkit.train.coordinate_check import check_coordinates, of_width
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.initialize import initial_value, initialize
from trainkit.train.parallel.shards import sharded_parameters
from trainkit.train.update.muon import Matrices
from trainkit.train.update.optimizer import UPDATES, Optimizer

SHAPE: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 32,
}
STANDARD = Model(**SHAPE)
ONE, GO = torch.ones(()), torch.zeros(())


def mup(base: int, **more: Any) -> Model:
    return Model(**{**SHAPE, "parametrization": "mup", "mup_base_hidden_size": base, **more})


def trained(model: Model, optimizer: str, steps: int = 3) -> dict[str, Tensor]:
    """Weights after some steps on one batch."""
    training = Training(**{**TRAINING, "optimizer": optimizer})
    module = Transformer(model, 31)
    initialize(module, model, 1)
    sharded = sharded_parameters(module, 1)
    parameters = {name: each.parameter for name, each in sharded.items()}
    matrices = []
    if UPDATES[training.optimizer].of_matrices:
        whole = {n: s for n, s in sharded.items() if role_of(n, len(s.layout.shape)) == "matrix"}
        matrices = [Matrices(model, whole)]
    update = Optimizer(parameters, training, matrices=matrices, width_factor=model.width_factor)
    ids_BS = torch.arange(2 * 33).view(2, 33) % 31
    for _ in range(steps):
        losses = module(ids_BS[:, :-1], Labels(ids_BS[:, 1:], 0.0, 1 / 64))
        assert isinstance(losses, Losses)
        losses.objective.backward()  # type: ignore[no-untyped-call]
        update.step(torch.tensor(1e-2), ONE, GO)
        update.zero_grad()
    return {name: p.detach() for name, p in module.named_parameters()}


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_the_base_is_the_standard_model_bit_for_bit(optimizer: str) -> None:
    standard, base = (trained(model, optimizer) for model in (STANDARD, mup(64)))
    assert all(torch.equal(standard[name], base[name]) for name in standard)
    wider = trained(mup(16), optimizer)
    assert not any(torch.equal(standard[name], wider[name]) for name in standard)


def test_logits_are_divided_and_matrices_begin_smaller() -> None:
    """Table 8 of Yang et al. 2022: logits by the factor m, deviations of matrices by its root; of
    the same weights nothing else changes."""
    module = Transformer(STANDARD, 31).double()
    same = Transformer(mup(16), 31).double()
    same.load_state_dict(module.state_dict())
    ids_BS = torch.arange(64).view(2, 32) % 31
    torch.testing.assert_close(same(ids_BS), module(ids_BS) / 4, rtol=1e-13, atol=0)
    for name, parameter in module.named_parameters():
        shape = tuple(parameter.shape)
        standard, smaller = (initial_value(name, shape, m, 1) for m in (STANDARD, mup(16)))
        matrix = role_of(name, len(shape)) == "matrix"
        torch.testing.assert_close(smaller, standard / 2 if matrix else standard)


def test_scores_are_divided_by_the_channels_of_a_head() -> None:
    """Equal to the standard rule at the base's head, 1 / channels from there."""
    for channels in (16, 32, 64):
        model = mup(64, kv_channels=channels, mup_base_kv_channels=16)
        assert (model.score_scale or channels**-0.5) == math.sqrt(16) / channels


def test_rates_by_role() -> None:
    """Of a model 4 times as wide, as plain_loop.py does not say them: SGD's of Yang et al., table
    8; Muon's by what an update is multiplied with."""

    def factors(**keys: Any) -> list[float]:
        training = Training(**{**TRAINING, **keys})
        return [rate_factor(training, role, 4.0) for role in ("matrix", "table", "vector")]

    assert factors(optimizer="sgd") == [1, 4, 4]
    assert factors(optimizer="muon", muon_scale_mode="spectral") == [0.5, 1, 1]
    assert factors(optimizer="muon", muon_scale_mode="original") == [1, 1, 1]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("family", ["gpt", "gemma3"])
@torch.no_grad()
def test_other_programs_find_the_multiplier_in_the_last_norm(family: Any, tmp_path: Path) -> None:
    """An export has the same logits in transformers, and is read back: bit for bit where nothing
    is added to the norm's weight."""
    transformers: Any = importlib.import_module("transformers")
    own: dict[str, dict[str, Any]] = {
        "gpt": {"num_query_groups": None},
        "gemma3": {
            "sliding_window": 8,
            "query_pre_attn_scalar": 16,
            "embedding_scale": 8.0,  # what transformers multiplies with at this width
        },
    }
    model = mup(16, family=family, vocab_size=VOCAB, **own[family])
    module = ours(model)
    write(save(module, tmp_path / "saved"), model, tmp_path / "hf")
    there = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    equal(there(TOKENS_BS).logits, module(TOKENS_BS))
    back = loaded(tmp_path / "hf", model)
    equal(back(TOKENS_BS), module(TOKENS_BS))
    if family == "gpt":
        assert torch.equal(back.final_norm.weight, module.final_norm.weight)


@pytest.mark.parametrize("family", ["gpt", "gpt-neox", "qwen3", "olmo2", "gemma3"])
def test_sizes_stay_in_each_family(family: Any, tmp_path: Path) -> None:
    own: dict[str, dict[str, Any]] = {
        "gpt": {"num_query_groups": None},
        "gpt-neox": {"num_query_groups": None},
        "gemma3": {"sliding_window": 8, "embedding_scale": 4.0},
    }
    model = mup(64, family=family, init_method_std=0.05, **own.get(family, {}))
    job = job_of("gpt", 1, tmp_path, {}, lr=5e-3).model_copy(update={"model": model})
    found = check_coordinates(job, [64, 128, 256])
    assert found.growing() == found.shrinking() == []
    standard = model.model_copy(update={"mup_base_hidden_size": None})
    found = check_coordinates(job.model_copy(update={"model": standard}), [64, 128, 256])
    assert found.growing()


def test_experts_go_with_the_width(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "router_topk": 2, "ffn_hidden_size": 24}
    moe |= {"shared_expert_intermediate_size": 16}
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 16}
    model = Model.model_validate({**shape, "family": "qwen3-moe", "moe": moe})
    wide = of_width(model, 128).moe
    assert wide is not None
    assert (wide.ffn_hidden_size, wide.shared_expert_intermediate_size) == (96, 64)
    job = job_of("gpt", 1, tmp_path, {}, lr=5e-3).model_copy(update={"model": model})
    assert check_coordinates(job, [32, 64]).sizes["MLP"]


def test_sizes_stay_as_they_are_at_any_width(project: Project) -> None:
    """The coordinate check of Yang et al. 2022, appendix D.1, by the task."""
    with (project.path / "jobs.toml").open("a") as file:
        file.write(
            """
[models.width]
family = "llama"
num_layers = 2
hidden_size = 64
num_attention_heads = 4
seq_length = 32
vocab_size = 512
init_method_std = 0.05
[models.mup]
extends = "width"
parametrization = "mup"
mup_base_hidden_size = 32
[jobs.width]
extends = "random"
model = "width"
training.lr = 0.01
[jobs.mup]
extends = "width"
model = "mup"
"""
        )
    widths = ("--widths", "32,64,128")
    flat = project.document("coord-check", "mup", *widths, "--html", "mup.html")
    assert flat["growing"] == flat["shrinking"] == [] and flat["parametrization"] == "mup"
    assert "slope" in (project.path / "mup.html").read_text()
    growing = project.document("coord-check", "width", *widths)
    assert {"attention", "MLP", "last block"} <= set(growing["growing"])
    muon = ("--set", "training.optimizer=muon", "--set", "training.lr=0.005")
    flat = project.document("coord-check", "mup", *widths, *muon)
    assert flat["growing"] == flat["shrinking"] == []
    said = project.invoke("coord-check", "width", "--widths", "16,32").stdout
    assert "mup_base_hidden_size" in said and "grows" in said
    assert "6.25 heads" in project.invoke("coord-check", "mup", "--widths=64,100", exit=3).stderr
    diverged = ("coord-check", "mup", "--widths=32,64", "--set", "training.lr=1e30")
    assert "lower training.lr" in project.invoke(*diverged, exit=3).stderr
    for given in ("64", "0,64", "64,²"):
        assert (
            "two or more"
            in project.invoke("coord-check", "mup", f"--widths={given}", exit=3).stderr
        )
    wide = project.invoke("coord-check", "mup", "--widths=64,6400000", exit=3).stderr
    assert "width 6400000 needs" in wide and "narrower" in wide


MUP_16 = {"parametrization": "mup", "mup_base_hidden_size": 16}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"parametrization": "mup"}, "needs mup_base_hidden_size"),
        ({"mup_base_hidden_size": 64}, "is for parametrization = 'mup'"),
        ({"mup_base_kv_channels": 64}, "is for parametrization = 'mup'"),
        ({**MUP_16, "init_method": "small_init"}, "'small_init' follows the width by itself"),
        (
            {**MUP_16, "output_layer_init_method": "wang_init"},
            "'wang_init' follows the width by itself",
        ),
        ({**MUP_16, "family": "gemma3", "sliding_window": 8}, "under muP set embedding_scale"),
        ({**MUP_16, "mup_base_kv_channels": 24}, "16\\^2 / 24"),
        (
            {**MUP_16, "mup_base_kv_channels": 8, "query_pre_attn_scalar": 16},
            "not be given, too",
        ),
    ],
)
def test_what_contradicts_it(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Model(**{**SHAPE, **keys})
