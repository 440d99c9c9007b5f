"""The loss of a split: every token once, the same whatever the micro-batch, and bytes counted
exactly."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

from tests.train.peers import random_model
from tests.trained import EOD, MODEL, TEXTS, prepare, text_job
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.data.indexed.dataset import IndexedDataset, IndexedWriter
from trainkit.data.tokenizer import end_of_document, load_tokenizer, train_bpe
from trainkit.jobs.schema import Dataset, Job
from trainkit.train.batches import data_folder
from trainkit.train.inference import evaluate as module
from trainkit.train.inference.evaluate import (
    ByteCounter,
    Evaluation,
    EvaluationFeed,
    evaluate,
    refuse_other_tokenizer,
)
from trainkit.train.model.transformer import Transformer

CPU = torch.device("cpu")
S = MODEL.seq_length


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the prepared text of `text_job`."""
    root = tmp_path_factory.mktemp("root")
    prepare(root, text_job(root).dataset)
    return root


def measure(
    job: Job, split: str = "valid", model: Transformer | None = None, **words: Any
) -> Evaluation:
    """The evaluation of the job's own data by a random model in fp64."""
    weights = (model or random_model(MODEL, torch.float64, vocab=301)).eval().requires_grad_(False)
    path = data_folder(job).tokenizer
    tokenizer = load_tokenizer(path)
    return evaluate(
        weights,
        EvaluationFeed(job, job.dataset, split, 301, CPU),
        tokenizer,
        end_of_document(tokenizer, EOD, path),
        **words,
    )


def tokens_of(job: Job) -> torch.Tensor:
    return torch.from_numpy(IndexedDataset(data_folder(job).prefix).tokens.astype(np.int64))


def windows_of(job: Job, split: str) -> range:
    """Numbers of a split's windows, from the definition of the split 80,20,0."""
    total = (len(tokens_of(job)) - 1) // S
    return {
        "train": range(total * 4 // 5),
        "valid": range(total * 4 // 5, total),
        "test": range(total, total),
    }[split]


@pytest.mark.parametrize("split", ["train", "valid"])
def test_equals_the_mean_over_every_token_of_the_split(root: Path, split: str) -> None:
    job = text_job(root)
    model, tokens, numbers = (
        random_model(MODEL, torch.float64, vocab=301),
        tokens_of(job),
        windows_of(job, split),
    )
    logits = torch.cat([model(tokens[None, k * S : k * S + S])[0] for k in numbers])
    labels = tokens[numbers.start * S + 1 : numbers.stop * S + 1]
    nats = F.cross_entropy(logits, labels, reduction="sum").item()
    found = measure(job, split)
    assert (found.samples, found.tokens) == (len(numbers), len(numbers) * S) and len(numbers) > 10
    assert found.loss == pytest.approx(nats / len(labels), rel=1e-12)
    assert found.perplexity == pytest.approx(math.exp(nats / len(labels)), rel=1e-10)
    tokenizer = load_tokenizer(data_folder(job).tokenizer)
    text = tokenizer.decode(labels.tolist())  # the end-of-document token is special: no bytes
    # a character may be cut at either end
    assert abs(found.bytes - len(text.encode())) <= 6 and EOD not in text
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / found.bytes, rel=1e-12)


def test_micro_batches_and_repetition_change_nothing(root: Path) -> None:
    losses = {measure(text_job(root, micro_batch_size=n)).loss for n in (1, 2, 7, 1000)}
    assert max(losses) - min(losses) < 1e-12
    assert measure(text_job(root)).loss == measure(text_job(root)).loss


def test_a_part_of_the_split_and_its_progress(root: Path) -> None:
    job, told = text_job(root), []
    part = measure(job, samples=4, progress=lambda done, total: told.append((done, total)))
    assert (part.samples, part.tokens, told) == (4, 4 * S, [(3, 4), (4, 4)])
    whole = measure(job)
    assert part.loss != whole.loss and measure(job, samples=10**9).loss == whole.loss


def test_the_order_is_that_of_the_text(root: Path) -> None:
    job = text_job(root)
    windows = EvaluationFeed(job, job.dataset, "train", 301, CPU)
    read = torch.cat([batch.tokens_BS.flatten() for batch in windows.batches(len(windows))])
    assert torch.equal(read, tokens_of(job)[: len(windows) * S])


def test_documents_are_masked_as_in_training(root: Path) -> None:
    # rotary positions would not show where a document begins
    learned = MODEL.model_copy(update={"family": "gpt"})
    job = text_job(
        root, learned, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True
    )
    model, tokens = random_model(learned, torch.float64, vocab=301), tokens_of(job)
    end = load_tokenizer(data_folder(job).tokenizer).token_to_id(EOD)
    nats, counted = 0.0, 0
    for k in windows_of(job, "valid"):
        window = tokens[k * S : k * S + S + 1].tolist()
        starts = [0, *(i + 1 for i in range(S) if window[i] == end), S]
        for start, stop in itertools.pairwise(starts):
            inputs, labels = window[start:stop], window[start + 1 : stop + 1]
            if inputs and inputs[-1] == end:  # what follows the end of a document has no loss
                labels = labels[:-1]
            if labels:
                logits = model(torch.tensor([inputs]))[0, : len(labels)]
                nats += F.cross_entropy(logits, torch.tensor(labels), reduction="sum").item()
                counted += len(labels)
    found = measure(job, model=model)
    assert found.tokens == counted < found.samples * S
    assert found.loss == pytest.approx(nats / counted, rel=1e-10)
    without_masks = measure(text_job(root), model=model)
    assert (
        found.loss != pytest.approx(without_masks.loss, rel=1e-3)
        and found.bytes < without_masks.bytes
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits(root: Path, dtype: torch.dtype) -> None:
    job = text_job(root)
    expected = measure(job).loss
    found = measure(job, model=random_model(MODEL, dtype, vocab=301)).loss
    assert found != expected and found == pytest.approx(expected, rel=0.02)


@settings(deadline=None, max_examples=100)
@given(
    documents=st.lists(st.text(min_size=1, max_size=40), max_size=6),
    cuts=st.lists(st.integers(0, 200), max_size=8).map(sorted),
    special=st.booleans(),
)
def test_bytes_are_those_of_the_documents(
    documents: list[str], cuts: list[int], special: bool
) -> None:
    tokenizer = train_bpe(iter(TEXTS), 300, EOD)
    tokenizer.encode_special_tokens = True
    end = end_of_document(tokenizer, EOD if special else "x", Path())
    if not special:
        documents = [d.replace("x", "y") or "y" for d in documents]
    ids = np.array(
        [i for d in documents for i in [*tokenizer.encode(d, add_special_tokens=False).ids, end]],
        dtype=np.int64,
    )
    text = ByteCounter(tokenizer, end)
    for part in np.split(ids, cuts):
        text.add(part)
    assert text.total() == sum(len(d.encode()) for d in documents)


def test_a_document_of_any_length_is_decoded_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_bpe(iter(TEXTS), 300, EOD)
    lengths: list[int] = []

    class Recorder:
        def decode(self, ids: list[int]) -> str:
            lengths.append(len(ids))
            return str(tokenizer.decode(ids))

    monkeypatch.setattr(module, "DECODED_AT_ONCE", 10)
    ids = np.array(tokenizer.encode("def f(a, b): return a + b; " * 20).ids, dtype=np.int64)
    text = ByteCounter(Recorder(), end=0)  # type: ignore[arg-type]
    for part in np.array_split(ids, 50):
        text.add(part)
    assert text.total() == 27 * 20
    assert max(lengths) < 10 + len(ids) // 50 + 1


def test_a_split_without_windows_and_words_that_are_none(root: Path) -> None:
    job = text_job(root)
    with pytest.raises(ConfigError, match="leaves the test split no sample of 16 tokens"):
        measure(job, "test")
    with pytest.raises(ConfigError, match="there is no split 'dev'\n  one of train, valid, test"):
        measure(job, "dev")
    with pytest.raises(ConfigError, match="random tokens"):
        EvaluationFeed(job, Dataset(name="mock", source="mock"), "valid", 301, CPU)
    other = job.dataset.model_copy(update={"name": "elsewhere"})
    with pytest.raises(ConfigError, match="prepare the data first: invoke prep-data") as error:
        EvaluationFeed(job, other, "valid", 301, CPU)
    assert error.value.exit == 6


def test_ids_beyond_the_vocabulary(root: Path, tmp_path: Path) -> None:
    job = text_job(tmp_path)
    folder = prepare(tmp_path, job.dataset)
    with IndexedWriter(folder.prefix, np.dtype("<u2")) as writer:
        writer.add_document(np.array([7] * 900 + [301] + [7] * 99))
    with pytest.raises(
        ConfigError, match=r"token id 301 in sample \d+ of the valid split of dataset 'code'"
    ) as error:
        measure(job)
    assert "but the model's vocabulary has 301" in str(error.value)


def test_weights_that_are_broken(root: Path) -> None:
    model = random_model(MODEL, vocab=301)
    with torch.no_grad():
        model.final_norm.weight.fill_(math.nan)
    with pytest.raises(TrainkitError, match="is nan") as error:
        measure(text_job(root), model=model)
    assert error.value.exit == 9


def test_perplexity_beyond_floating_point() -> None:
    found = module._summary(nats=1e6, tokens=1000, size=0, samples=1, seconds=0.0)
    assert (found.loss, found.perplexity, found.bits_per_byte) == (1000.0, None, None)


def test_tokenizers_are_compared_by_content(root: Path, tmp_path: Path) -> None:
    job = text_job(root)
    own = load_tokenizer(data_folder(job).tokenizer)
    table = job.dataset.tokenizer
    assert table is not None
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    own.save(str(same), pretty=False)  # other bytes, the same tokenizer
    assert same.read_bytes() != data_folder(job).tokenizer.read_bytes()
    train_bpe(iter(["something else entirely"]), 300, EOD).save(str(other))
    elsewhere = job.dataset.model_copy(
        update={"name": "elsewhere", "tokenizer": table.model_copy(update={"name": "renamed"})}
    )
    refuse_other_tokenizer(job, own, elsewhere, same)
    with pytest.raises(
        ConfigError,
        match=(
            r"'elsewhere' has another tokenizer than the run: .*other\.json and .*tokenizer\.json"
            r" differ"
        ),
    ):
        refuse_other_tokenizer(job, own, elsewhere, other)
    dots = elsewhere.model_copy(update={"tokenizer": table.model_copy(update={"eod_token": "."})})
    with pytest.raises(
        ConfigError,
        match=r"documents of dataset 'elsewhere' end with '\.', in the run with '<\|endoftext\|>'",
    ):
        refuse_other_tokenizer(job, own, dots, same)
