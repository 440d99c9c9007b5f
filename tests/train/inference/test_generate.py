"""Text from a checkpoint: the cache changes nothing, transformers writes the same, and no prompt
depends on another."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st

from tests.train.peer_shapes import CASES, ONE_OF_EACH
from tests.train.peers import beside, random_model, random_tokens
from tests.trained import EOD, MODEL, new_run, prepare, text_job, write_checkpoint
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.schema import Cluster, Dataset
from trainkit.ops.kernels import Unavailable
from trainkit.runs.checkpoints import open_checkpoint
from trainkit.runs.folder import RunFolder
from trainkit.train.decoding.continuation import DecodingState, Generation, continuation
from trainkit.train.decoding.sampling import Sampling
from trainkit.train.inference.generate import generate
from trainkit.train.inference.load import choose_checkpoint, choose_device, load_model
from trainkit.train.model.transformer import Transformer
from trainkit.train.parallel.tensor_group import TensorGroup

GREEDY = Sampling(temperature=0)
NEVER = -1  # no token ends a document
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_the_cache_changes_no_logit(case: str, dtype: torch.dtype) -> None:
    model = random_model(CASES[case], dtype).eval()
    ids_1S = random_tokens(1, model.shape.positions)
    expected_SV = model(ids_1S)[0]
    reading, ids = DecodingState(model), ids_1S[0].tolist()
    for start, end, piece in (
        (0, 7, 3),
        (7, 8, 512),
        (8, 12, 4),
        *((i, i + 1, 512) for i in range(12, len(ids))),
    ):
        logits_V = reading.read(ids[start:end], piece)
        torch.testing.assert_close(logits_V, expected_SV[end - 1], rtol=0, atol=TOLERANCE[dtype])


@functools.cache
def uncut(case: str) -> tuple[Transformer, list[int], torch.Tensor]:
    """A model, a text, and its last logits read in one piece; the examples share them."""
    model, ids = random_model(CASES[case], torch.float64).eval(), random_tokens(1, 24)[0].tolist()
    with torch.no_grad():
        return model, ids, model(torch.tensor([ids]))[0, -1]


@settings(deadline=None, max_examples=30)
@given(
    cuts=st.lists(st.integers(1, 23), max_size=6, unique=True).map(sorted),
    piece=st.integers(1, 30),
    case=st.sampled_from(ONE_OF_EACH),
)
def test_any_cut_of_a_text_gives_the_same(cuts: list[int], piece: int, case: str) -> None:
    model, ids, expected_V = uncut(case)
    reading = DecodingState(model, 24)
    for start, end in zip([0, *cuts], [*cuts, 24], strict=True):
        logits_V = reading.read(ids[start:end], piece)
    torch.testing.assert_close(logits_V, expected_V, rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_greedy_equals_transformers(case: str) -> None:
    shape, ours, theirs = beside(case, torch.float32)
    prompt_1S = random_tokens(1, 6, seed=3)
    new = shape.positions - 6
    words = {
        "max_new_tokens": new,
        "do_sample": False,
        "use_cache": True,
        "attention_mask": torch.ones_like(prompt_1S),
        "pad_token_id": 0,
    }
    expected = theirs.generate(prompt_1S, **words)[0, 6:].tolist()
    found = continuation(ours, prompt_1S[0].tolist(), GREEDY, max_new_tokens=new, end=NEVER)
    assert found == expected and len(found) == new


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_the_window_slides(case: str) -> None:
    """Beyond its positions the model sees the last of them only, as if the text began there."""
    model = random_model(CASES[case], torch.float64).eval()
    window = model.shape.positions
    for prompt in (
        random_tokens(1, window - 3)[0].tolist(),
        random_tokens(1, window + 9)[0].tolist(),
    ):
        ids = continuation(model, prompt, GREEDY, max_new_tokens=8, end=NEVER)
        text = [*prompt, *ids]
        for i in range(8):
            seen = text[: len(prompt) + i][-window:]
            assert ids[i] == int(model(torch.tensor([seen]))[0, -1].argmax())


def test_it_ends_with_the_document() -> None:
    model = random_model(CASES["gpt"]).eval()
    prompt = random_tokens(1, 5)[0].tolist()
    ids = continuation(model, prompt, Sampling(seed=4), max_new_tokens=12, end=NEVER)
    assert len(ids) == 12
    end = ids[5]
    assert (
        continuation(model, prompt, Sampling(seed=4), max_new_tokens=12, end=end)
        == ids[: ids.index(end)]
    )


def test_a_document_apart_does_not_see_the_end_of_the_one_before() -> None:
    model = random_model(CASES["gpt"], torch.float64).eval()
    end = 11
    first, second = continuation(model, [end], GREEDY, max_new_tokens=2, end=end, apart=True)
    assert first == int(model(torch.tensor([[end]]))[0, -1].argmax())
    alone_V, together_V = (model(torch.tensor([ids]))[0, -1] for ids in ([first], [end, first]))
    assert second == int(alone_V.argmax()) and not torch.allclose(alone_V, together_V)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run on text with checkpoints of steps 3 and 5, of different weights."""
    job = text_job(tmp_path)
    prepare(tmp_path, job.dataset)
    run = new_run(job)
    for step in (3, 5):
        write_checkpoint(run, random_model(MODEL, seed=step, vocab=301), step)
    return run


def texts(
    run: RunFolder, prompts: list[str], sampling: Sampling = GREEDY, step: int | None = None
) -> list[str]:
    return [g.text for g in generate(run, prompts, sampling, max_new_tokens=12, step=step)[1]]


def test_text_is_reproducible(run: RunFolder) -> None:
    (greedy,) = texts(run, ["def "])
    assert greedy.startswith("def ") and greedy != "def "
    assert (
        texts(run, ["def "], Sampling(temperature=0, seed=2))
        == texts(run, ["def "], Sampling(temperature=1.0, top_k=1, seed=5))
        == [greedy]
    )
    assert texts(run, ["def "], Sampling(temperature=1.0, top_p=1e-9, seed=5)) == [greedy]
    warm = [
        texts(run, ["def "], Sampling(temperature=1.0, top_k=0, seed=seed)) for seed in (1, 1, 2)
    ]
    assert warm[0] == warm[1] != warm[2]


def test_no_prompt_depends_on_another(run: RunFolder) -> None:
    prompts = [
        "def ",
        "",
        "größer",
        "def f1(ä, b):\n    return ä ** 1 + b  # 日本語 and beyond the sixteen positions",
        "def ",
    ]
    sampling = Sampling(temperature=1.0, top_k=0, seed=7)
    together = texts(run, prompts, sampling)
    assert together == [texts(run, [prompt], sampling)[0] for prompt in prompts]
    assert (
        all(text.startswith(prompt) for text, prompt in zip(together, prompts, strict=True))
        and together[0] == together[4]
    )


def test_any_checkpoint_of_the_run(run: RunFolder) -> None:
    assert texts(run, ["def "], step=5) == texts(run, ["def "]) != texts(run, ["def "], step=3)
    assert [generate(run, [""], GREEDY, max_new_tokens=1, step=step)[0] for step in (None, 3)] == [
        5,
        3,
    ]
    with pytest.raises(
        TrainkitError, match=r"no checkpoint of step 0\n  it has those of steps 3, 5"
    ):
        texts(run, ["def "], step=0)
    with pytest.raises(
        TrainkitError, match=r"no checkpoint of step 4\n  it has those of steps 3, 5"
    ) as error:
        texts(run, ["def "], step=4)
    assert error.value.exit == 16
    write_checkpoint(run, random_model(MODEL, seed=0, vocab=301), 0)  # as save_first does
    assert generate(run, [""], GREEDY, max_new_tokens=1, step=0)[0] == 0


def test_a_damaged_checkpoint(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    file = run.checkpoints / "step-00000005/rank-00000.bin"
    file.write_bytes(b"\1" + file.read_bytes()[1:])
    with pytest.raises(TrainkitError, match=r"rank-00000\.bin does not have the hash") as error:
        texts(run, ["def "], step=5)
    assert error.value.exit == 16
    assert generate(run, ["def "], GREEDY, max_new_tokens=1)[0] == 3  # the newest that is whole
    assert "passed over: checkpoint" in capsys.readouterr().err


def test_counts_and_the_end_of_a_document(run: RunFolder, tmp_path: Path) -> None:
    """A model that knows one token: the one that ends a document, and then another."""
    model = random_model(MODEL, vocab=301)
    for token, count in ((0, 0), (5, 12)):  # EOD has id 0
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
            model.final_norm.weight.fill_(1.0)
            model.embed_tokens.weight.fill_(1.0)
            assert model.head is not None
            model.head.weight[token] = 1.0
        shutil.rmtree(run.checkpoints)
        write_checkpoint(run, model, 1)
        _, found = generate(run, ["def "], GREEDY, max_new_tokens=12)
        assert found[0].tokens == count
        assert count or found == [Generation("def ", "def ", 0)]
    assert EOD not in found[0].text


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)],
)
def test_a_model_is_read_in_the_precision_it_was_trained_in(
    tmp_path: Path, precision: str, dtype: torch.dtype
) -> None:
    job = text_job(
        tmp_path,
        MODEL.model_copy(update={"hidden_dropout": 0.5, "attention_dropout": 0.5}),
        precision=precision,
    )
    prepare(tmp_path, job.dataset)
    run = new_run(job)
    weights = random_model(MODEL, vocab=301)
    write_checkpoint(run, weights, 2)
    model = load_model(job, choose_checkpoint(run), torch.device("cpu"), dtype)
    assert not model.training  # no dropout
    for name, p in model.named_parameters():
        assert p.dtype == dtype and not p.requires_grad
        assert torch.equal(p, dict(weights.named_parameters())[name].to(dtype))
    assert texts(run, ["def "]) == texts(run, ["def "])


def test_what_cannot_generate_says_why(run: RunFolder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not Unicode"):
        texts(run, ["a", "\udcff"])
    broken = random_model(MODEL, vocab=301)
    with torch.no_grad():
        broken.final_norm.weight.fill_(math.nan)
    write_checkpoint(run, broken, 9)
    with pytest.raises(TrainkitError, match="highest logit is nan") as error:
        texts(run, ["a"])
    assert error.value.exit == 9
    shutil.rmtree(run.checkpoints)
    with pytest.raises(TrainkitError, match="no checkpoint yet") as error:
        texts(run, ["a"])
    assert error.value.exit == 16
    next(run.root.glob("data/*/*/tokenizer.json")).unlink()
    with pytest.raises(ConfigError, match="is gone"):
        texts(run, ["a"])
    mock = text_job(tmp_path / "mock").model_copy(
        update={"dataset": Dataset(name="mock", source="mock")}
    )
    with pytest.raises(ConfigError, match="random tokens"):
        texts(new_run(mock), ["a"])


def test_it_says_why_it_computes_without_the_fused_kernels(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def absent(_: str) -> None:
        raise Unavailable("they are not there", "compile them")

    monkeypatch.setattr("trainkit.ops.kernels.load", absent)
    saved, job = open_checkpoint(run.checkpoints / "step-00000005"), text_job(run.root)
    load_model(job, saved, torch.device("cpu"), torch.float32, TensorGroup(1, rank=1))
    assert capsys.readouterr().err == "", "one rank of a group says it for all"
    load_model(job, saved, torch.device("cpu"), torch.float32)
    said = capsys.readouterr().err
    assert said == "kernels: reference, because they are not there; compile them\n"


def test_a_checkpoint_of_another_model(run: RunFolder) -> None:
    saved = open_checkpoint(run.checkpoints / "step-00000005")
    other = text_job(run.root, MODEL.model_copy(update={"num_layers": 3, "ffn_hidden_size": 24}))
    with pytest.raises(
        TrainkitError,
        match=r"another model:\n(.*\n)*.*layers\.2\.attention\.qkv\.weight is not in it",
    ) as error:
        load_model(other, saved, torch.device("cpu"), torch.float32)
    assert (
        error.value.exit == 3
        and "model.layers.0.mlp.down.weight is [16, 64] float32 there, [16, 24] float32 here"
        in str(error.value)
    )
    headless = saved.manifest.model_copy(update={"tensors": {}})
    with pytest.raises(TrainkitError, match=r"model\.embed_tokens\.weight is not in it"):
        load_model(other, type(saved)(saved.folder, headless), torch.device("cpu"), torch.float32)


def test_no_device_falls_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = text_job(tmp_path)
    there = here.model_copy(
        update={
            "cluster": Cluster(
                name="gpus", device=built_in_device("h100-sxm-80gb"), root=str(tmp_path)
            )
        }
    )
    assert choose_device(here).type == choose_device(there, "cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigError,
        match=(
            r"no CUDA device, which job 'words' computes on \(clusters.gpus.device\)\n "
            r" --device cpu"
        ),
    ):
        choose_device(there)
    with pytest.raises(ConfigError, match="this machine has no CUDA device\n"):
        choose_device(here, "cuda")
    with pytest.raises(ConfigError, match="'gpu' is neither cpu nor cuda"):
        choose_device(here, "gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(there).type == "cuda"
