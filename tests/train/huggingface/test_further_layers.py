"""DeepSeek-V3's layer after the last, which predicts one token more, in Hugging Face folders."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed import finish
from tests.train.hf_support import (
    CASES,
    VOCAB,
    change_tensors,
    equal,
    loaded,
    ours,
    said,
    save,
    write,
)
from tests.train.plain_loop import job_of
from tests.train.support import new_run, start_ranks
from trainkit.jobs.schema import Model
from trainkit.train.huggingface import check_weights
from trainkit.train.parallel.shards import saved_tensors

HANGS = 600  # seconds; only against hanging
WITHOUT = CASES["deepseek-v3"][0]
MODEL = WITHOUT.model_copy(update={"mtp_num_layers": 1})
# DeepSeek-V3, README_WEIGHTS.md and model.safetensors.index.json; a block's names are CASES' own
OWN = {
    "enorm.weight": [32],
    "hnorm.weight": [32],
    "eh_proj.weight": [32, 64],
    "shared_head.norm.weight": [32],
    "embed_tokens.weight": [VOCAB, 32],
    "shared_head.head.weight": [VOCAB, 32],
}


@pytest.fixture
def folder(one_rank: None, tmp_path: Path) -> Path:
    """What is exported of a model with it."""
    write(save(ours(MODEL), tmp_path / "checkpoints"), MODEL, tmp_path / "out")
    return tmp_path / "out"


def tied(model: Model) -> Model:
    return model.model_copy(update={"untie_embeddings_and_output_weights": False})


def test_names_and_copies_are_the_published_ones(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    after = {
        name.removeprefix("model.layers.2."): list(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith("model.layers.2.")
    }
    block = {
        name.removeprefix("model.layers.1."): list(tensor.shape)
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    assert after == block | OWN
    for copy, of in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        assert torch.equal(tensors[f"model.layers.2.{copy}.weight"], tensors[f"{of}.weight"])
    assert json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"] == 1


@pytest.mark.parametrize("change", [lambda model: model, tied], ids=["untied", "tied"])
def test_what_is_exported_is_read_bit_for_bit(one_rank: None, tmp_path: Path, change: Any) -> None:
    model = change(MODEL)
    module = ours(model)
    write(save(module, tmp_path / "checkpoints"), model, tmp_path / "out")
    again = saved_tensors(loaded(tmp_path / "out", model))
    for name, tensor in saved_tensors(module).items():
        assert torch.equal(again[name], tensor), name


def test_transformers_reads_the_model_without_it(folder: Path) -> None:
    transformers: Any = importlib.import_module("transformers")

    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(VOCAB, (2, 16))
    with torch.no_grad():
        equal(theirs(ids).logits, loaded(folder, MODEL).eval()(ids))


def test_a_copy_that_differs_is_refused(folder: Path) -> None:
    name = "model.layers.2.shared_head.head.weight"
    folder = change_tensors(folder, lambda tensors: tensors | {name: tensors[name] + 1})
    found = said(check_weights(folder, MODEL, VOCAB))
    assert f"{name} is not lm_head.weight, one tensor in the job's model" in found
    assert "leave mtp_num_layers out" in found
    assert check_weights(folder, WITHOUT, VOCAB) == []


def test_a_folder_without_it_lacks_it(one_rank: None, tmp_path: Path) -> None:
    write(save(ours(WITHOUT), tmp_path / "checkpoints"), WITHOUT, tmp_path / "out")
    assert "lacks model.layers.2." in said(check_weights(tmp_path / "out", MODEL, VOCAB))
    assert "num_nextn_predict_layers" not in (tmp_path / "out/config.json").read_text()


def test_a_run_says_that_it_is_not_read(folder: Path, tmp_path: Path) -> None:
    job = job_of("deepseek", 1, tmp_path, {}, train_iters=1, global_batch_size=1, eval_iters=0)
    model = WITHOUT.model_copy(update={"vocab_size": VOCAB})
    run = new_run(job.model_copy(update={"model": model, "init_from": str(folder)}))
    assert finish(start_ranks(run, 1), HANGS) == [0]
    log = run.attempt(1).log(0).read_text()
    assert log.count("layers [2] are not read") == 1
