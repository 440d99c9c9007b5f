"""Text from a checkpoint, whatever layout wrote it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.train.support import new_run, tiny_job
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.schema import Dataset
from trainkit.jobs.schema import Tokenizer as TokenizerTable
from trainkit.runs.folder import RunFolder
from trainkit.train import checkpoint
from trainkit.train.feed import data_folder
from trainkit.train.generate import generate, load_model, sample


@pytest.fixture
def run(tmp_path: Path, saved_folder: Path) -> RunFolder:
    """A run on text whose checkpoint two ranks wrote."""
    table = TokenizerTable(name="t", type="bpe", vocab_size=301)
    job = tiny_job(2, tmp_path).model_copy(update={"dataset": Dataset(name="words", source="files", paths=("x",), tokenizer=table)})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        ["def a(b): return b " * 99], trainers.BpeTrainer(vocab_size=301, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet)
    )
    path = data_folder(job).tokenizer
    path.parent.mkdir(parents=True)
    tokenizer.save(str(path))
    run = new_run(job)
    shutil.copytree(saved_folder, run.checkpoints)
    return run


def test_text_is_reproducible(run: RunFolder) -> None:
    options = {"max_new_tokens": 12, "top_k": 0}
    greedy = generate(run, "def ", temperature=0.0, seed=1, **options)
    assert greedy and greedy == generate(run, "def ", temperature=0.0, seed=2, **options)
    warm = [generate(run, "def ", temperature=1.0, seed=seed, **options) for seed in (1, 1, 2)]
    assert warm[0] == warm[1] != warm[2]
    assert generate(run, "def ", temperature=1.0, seed=5, max_new_tokens=12, top_k=1) == greedy
    assert isinstance(generate(run, "", temperature=0.0, seed=1, **options), str)


def test_greedy_takes_the_likeliest_token_of_the_window(run: RunFolder) -> None:
    newest = checkpoint.newest_valid(run.checkpoints, pytest.fail)
    assert newest is not None
    model = load_model(tiny_job(2, run.root), newest)
    prompt = list(range(1, 31))  # longer than the 16 positions
    ids = sample(model, prompt, 16, 5, temperature=0.0, top_k=0, seed=0, end=-1)
    assert len(ids) == 5
    for i, token in enumerate(ids):
        assert token == int(model(torch.tensor([(prompt + ids[:i])[-16:]]))[0, -1].argmax())
    assert sample(model, prompt, 16, 5, temperature=0.0, top_k=0, seed=0, end=ids[2]) == ids[: ids.index(ids[2])]


def test_what_cannot_generate_says_why(run: RunFolder, tmp_path: Path) -> None:
    options = {"max_new_tokens": 1, "temperature": 0.0, "top_k": 0, "seed": 0}
    with pytest.raises(ConfigError, match="random tokens"):
        generate(new_run(tiny_job(2, tmp_path / "mock")), "a", **options)  # type: ignore[arg-type]
    shutil.rmtree(run.checkpoints)
    with pytest.raises(TrainkitError, match="no checkpoint yet") as error:
        generate(run, "a", **options)  # type: ignore[arg-type]
    assert error.value.exit == 16
    next(run.root.glob("data/*/*/tokenizer.json")).unlink()
    with pytest.raises(ConfigError, match="is gone"):
        generate(run, "a", **options)  # type: ignore[arg-type]
