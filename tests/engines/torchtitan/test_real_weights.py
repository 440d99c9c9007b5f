"""Weights go from a checkpoint of ours to an unmodified torchtitan and back: its own adapter loads
the folder, its logits are ours, and its own checkpoint of them holds our tensors, bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch

from tests.engines.convert.real_logits import ROWS
from tests.engines.convert.support import converted, same
from tests.engines.convert.test_real_logits import MODELS, shaken
from tests.engines.real import RealEngine, parameters
from tests.train.hf_support import save
from trainkit.engines.convert import torchtitan
from trainkit.engines.convert.formats import RunWeights
from trainkit.engines.torchtitan.values import shape_of
from trainkit.jobs.schema import RopeScaling
from trainkit.train.huggingface.weights import CheckpointWeights

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_rank")]
LENGTH = 128  # of a block of FlexAttention


@pytest.mark.parametrize("name", ["llama", "llama-tied", "stretched", "qwen3", "qwen3-tied"])
@pytest.mark.parametrize("engine", parameters("torchtitan"))
@torch.no_grad()
def test_there_and_back(engine: RealEngine, name: str, tmp_path: Path) -> None:
    scaling = RopeScaling(type="llama3", factor=8.0, original_max_position_embeddings=32)
    models = {**MODELS, "stretched": MODELS["llama"].model_copy(update={"rope_scaling": scaling})}
    model = models[name].model_copy(update={"seq_length": LENGTH})
    module = shaken(model)
    source = RunWeights(CheckpointWeights(save(module, tmp_path / "ours"), model), model, 7)
    converted(source, "hf", tmp_path / "hf")
    tokens_BS = torch.randint(0, ROWS, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    torch.save(tokens_BS, tmp_path / "tokens.pt")
    (tmp_path / "shape.json").write_text(json.dumps(shape_of(model, ROWS)))
    places = ("shape.json", "hf", "tokens.pt", "logits.pt", "step-3")
    paths = (str(engine.fakecuda), str(ROOT), str(engine.tree))
    program = Path(__file__).with_name("titan_logits.py")
    done = subprocess.run(
        [engine.python, program, *(tmp_path / place for place in places)],
        env={**os.environ, **engine.environment, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "logits.pt")
    ours = module(tokens_BS)
    off = float((found - ours).abs().max() / ours.abs().max())
    print(f"{name}: {off:.1e} of the largest logit")
    assert off < 1e-6
    folder, step = torchtitan.choose(tmp_path, 3)
    same(torchtitan.read(folder, model, ROWS), source.weights)
    assert step == 3
