"""generate and evaluate as tasks: words in, one document out, and what is refused."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.conftest import Project
from tests.distributed import call
from tests.train.peers import random_model
from tests.trained import TEXTS, new_run, prepare, write_checkpoint
from trainkit.base.documents import document
from trainkit.base.errors import ConfigError, TrainkitError
from trainkit.cli.inspect.report import ReportFiles, report
from trainkit.cli.model.evaluate import evaluate, generate, read_prompts
from trainkit.cli.options import EvaluateOptions, GenerateOptions
from trainkit.cli.run import summary as ending
from trainkit.cli.wrapper import TaskContext
from trainkit.jobs.load import load
from trainkit.runs.folder import RunFolder
from trainkit.runs.samples import read_samples, samples_path
from trainkit.stages.stamps import file_identity

MORE = """
[tokenizers.same]
type = "file"
path = "data/lines/bpe/tokenizer.json"

[datasets.more]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "same"
split = "50,25,25"

[datasets.its-own]
source = "files"
paths = ["corpus/*.jsonl"]
tokenizer = "bpe"

[datasets.random]
source = "mock"
"""
CHANGING = ("seconds", "loss", "perplexity", "bits_per_byte")
SAMPLING = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "seed": 0}


@pytest.fixture
def run(project: Project) -> RunFolder:
    """A run of the job "text" with checkpoints of steps 2 and 4, and its prepared data."""
    jobs_toml = project.path / "jobs.toml"
    jobs_toml.write_text(jobs_toml.read_text() + MORE)
    job = load(project.path).resolve("text").job
    prepare(project.path, job.dataset)
    run = new_run(job)
    for step in (2, 4):
        write_checkpoint(run, random_model(job.model, seed=step, vocab=300), step)
    return run


def task(run: RunFolder, *, dry_run: bool = False) -> TaskContext:
    return TaskContext(json=False, dry_run=dry_run, folder=run.root)


def generated(
    run: RunFolder, prompts: list[str], step: int | None = None, *, ranks: int = 1, **sampling: Any
) -> dict[str, Any]:
    options = GenerateOptions(
        prompt=tuple(prompts),
        max_new_tokens=4,
        step=step,
        tensor_parallel=ranks,
        **{**SAMPLING, **sampling},
    )
    result = generate(task(run), "last", options)
    task(run).show(result.page)
    return result.document


def evaluated(
    run: RunFolder,
    dataset: str = "",
    split: str = "valid",
    *,
    samples: int = 0,
    dry_run: bool = False,
    ranks: int = 1,
) -> dict[str, Any]:
    options = EvaluateOptions(dataset=dataset, split=split, samples=samples, tensor_parallel=ranks)
    return evaluate(task(run, dry_run=dry_run), "last", options).document


def test_checkpoints_write_text_for_the_report(run: RunFolder) -> None:
    """The likeliest tokens, the same each time; what is there is not made again, and nothing of it
    is markup in the page."""
    value = json.loads(run.job.read_text())
    value["job"]["generate"] |= {"prompts": ["the ", "<b>"], "max_new_tokens": 4}
    run.job.write_text(json.dumps(value))
    files = ReportFiles(html=str(run.path / "r.html"), samples=True)
    report(task(run), run.id, files, "")
    found = read_samples(run)
    assert [(each.step, each.prompt) for each in found] == [
        (step, prompt) for step in (2, 4) for prompt in ("the ", "<b>")
    ]
    one = generated(run, ["<b>"], 2)["generations"][0]
    assert found[1].text == one["text"] and found[1].text.startswith("<b>")
    page = (run.path / "r.html").read_text()
    assert "Text at checkpoints" in page and "&lt;b&gt;" in page and "<b>the" not in page
    before = samples_path(run).read_bytes()
    report(task(run), run.id, ReportFiles(samples=True), "")
    assert samples_path(run).read_bytes() == before, "they are there"
    samples_path(run).unlink()
    report(task(run), run.id, ReportFiles(samples=True), "")
    assert samples_path(run).read_bytes() == before, "and the same again"


def test_generate_from_the_command_line(project: Project, run: RunFolder) -> None:
    (project.path / "prompts.jsonl").write_text('"größer\\n"\n\n{"prompt": "", "id": 7}\n')
    words = [
        "--prompt",
        "def ",
        "--prompt",
        "",
        "--prompts-file",
        "prompts.jsonl",
        "--max-new-tokens",
        "5",
        "--top-p",
        "0.9",
        "--step",
        "2",
        "--device",
        "cpu",
    ]
    found = project.document("generate", "last", *words)
    assert {k: found[k] for k in ("schema", "run", "step", "prompt")} == {
        "schema": "generate/1",
        "run": run.id,
        "step": 2,
        "prompt": "def ",
    }
    assert [g["prompt"] for g in found["generations"]] == ["def ", "", "größer\n", ""]
    assert found["text"] == found["generations"][0]["text"] and found["text"].startswith("def ")
    assert (
        all(0 <= g["tokens"] <= 5 for g in found["generations"])
        and found["generations"][1] == found["generations"][3]
    )
    assert (
        "top-p 2.0 is not above 0 and up to 1"
        in project.invoke("generate", "last", "--top-p=2", exit=1).stderr
    )
    assert (
        "--step -1: it must be at least 0"
        in project.invoke("evaluate", "last", "--step=-1", exit=1).stderr
    )
    assert (
        "--step takes a whole number, not 'x'"
        in project.invoke("generate", "last", "--step=x", exit=1).stderr
    )
    # not the newest
    assert (
        f"run {run.id} has no checkpoint of step 0"
        in project.invoke("generate", "last", "--step=0", exit=16).stderr
    )


def test_texts_are_printed(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    alone = generated(run, ["def "])["text"]
    assert capsys.readouterr().out == alone + "\n"
    both = [g["text"] for g in generated(run, ["def ", "a"])["generations"]]
    assert (
        both[0] == alone
        and capsys.readouterr().out == f"--- 1 of 2\n{both[0]}\n--- 2 of 2\n{both[1]}\n"
    )
    assert generated(run, [])["prompt"] == ""
    assert generated(run, ["def "], step=2)["text"] != alone


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            b'"a"\nplain text\n',
            r"2: neither a JSON string nor .*: plain text\n  plain text to JSON lines: jq -R \.",
        ),
        (b'{"text": "a"}', r"1: neither"),
        (b"7", r"1: neither"),
        (b"\n \n", "holds no prompt"),
        (b'"\xff"', "is not UTF-8"),
    ],
)
def test_a_file_of_prompts_that_is_none(tmp_path: Path, text: bytes, said: str) -> None:
    (tmp_path / "prompts").write_bytes(text)
    with pytest.raises(ConfigError, match=said):
        read_prompts(tmp_path / "prompts")


def test_evaluate_from_the_command_line(project: Project, run: RunFolder) -> None:
    done = project.invoke("evaluate", "last", "--json", "--samples", "5", "--step", "2")
    found = json.loads(done.stdout)
    assert list(found)[:9] == [
        "schema",
        "dry_run",
        "run",
        "step",
        "dataset",
        "split",
        "device",
        "precision",
        "loss",
    ]
    assert (found["schema"], found["run"], found["step"], found["dataset"], found["split"]) == (
        "evaluate/1",
        run.id,
        2,
        "lines",
        "valid",
    )
    assert (found["samples"], found["tokens"], found["device"], found["precision"]) == (
        5,
        80,
        "cpu",
        "fp32",
    )
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(
        found["loss"] * 80 / math.log(2) / found["bytes"]
    )
    assert f"loss {found['loss']:.4f} nats/token" in done.stderr and "bits/byte" in done.stderr
    assert not (project.path / "stamps").exists()  # the run's own data is taken as it is


def test_another_dataset_is_prepared_with_the_runs_tokenizer(
    run: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    made = run.root / "data" / "more"
    assert evaluated(run, "more", dry_run=True)["dry_run"] is True
    out = capfd.readouterr().out
    assert (
        "would run" in out
        and f"would evaluate step 4 of run {run.id} on the valid split of more" in out
        and not made.exists()
    )
    first = evaluated(run, "more")
    assert (
        "prep-data more--same is stale" in capfd.readouterr().out
        and (made / "same" / "dataset.json").is_file()
    )
    assert first["dataset"] == "more" and first["samples"] > 20
    again = evaluated(run, "more")
    assert (
        "prep-data more--same is fresh" in capfd.readouterr().out and again["loss"] == first["loss"]
    )
    parts = [evaluated(run, "more", split) for split in ("train", "valid", "test")]
    corpus = sum(
        len(json.loads(line)["text"])
        for path in (run.root / "corpus").iterdir()
        for line in path.read_text().splitlines()
    )
    # all but the first token and what follows the last window
    assert 0 <= corpus - sum(part["bytes"] for part in parts) < 100


@pytest.mark.parametrize(
    ("dataset", "split", "said"),
    [
        (
            "its-own",
            "valid",
            (
                r"is not prepared, and its tokenizer 'bpe' would be trained on its own text\n.*type"
                r" = \"file\" with path = \".*data/lines/bpe/"
            ),
        ),
        ("random", "valid", "'random' is random tokens: a loss on them says nothing"),
        ("moer", "valid", "no dataset 'moer'\n.*did you mean 'more'"),
        ("more", "dev", "there is no split 'dev'"),
        ("", "test", "leaves the test split no sample"),
    ],
)
def test_what_cannot_be_evaluated_says_why(
    run: RunFolder, dataset: str, split: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        evaluated(run, dataset, split)
    assert error.value.exit == 3 and not (run.root / "stamps").exists()


def test_a_dataset_of_another_tokenizer(run: RunFolder) -> None:
    """Refused before a preparation that would be in vain, and where its tokens are there
    already."""
    jobs = load(run.root)
    other = prepare(run.root, jobs.dataset("its-own"), [text.upper() for text in TEXTS])
    with pytest.raises(ConfigError, match="'its-own' has another tokenizer than the run"):
        evaluated(run, "its-own")
    text = (run.root / "jobs.toml").read_text()
    (run.root / "jobs.toml").write_text(
        text.replace('path = "data/lines/bpe/tokenizer.json"', f'path = "{other.tokenizer}"')
    )
    with pytest.raises(ConfigError, match="'more' has another tokenizer than the run"):
        evaluated(run, "more")
    assert not (run.root / "stamps").exists()


def test_a_tokenizer_made_anew_is_warned_of(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = run.root / "data/lines/bpe/tokenizer.json"
    inputs = run.path / "launch" / "inputs.json"
    inputs.parent.mkdir()
    inputs.write_text(
        json.dumps(
            document("inputs/1", files=[file_identity(tokenizer), [str(run.root / "gone"), 1, 1]])
        )
    )
    generated(run, ["a"])
    assert capsys.readouterr().err == ""
    tokenizer.write_text(tokenizer.read_text() + "\n")
    generated(run, ["a"])
    assert f"WARNING: {tokenizer} has changed since run {run.id} began" in capsys.readouterr().err
    evaluated(run, samples=1)
    assert f"WARNING: {tokenizer} has changed since run {run.id} began" in capsys.readouterr().err


def written_and_measured(run: RunFolder, ranks: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    cases: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]
    return [
        generated(run, ["def ", "größer"], ranks=ranks, **sampling) for sampling in cases
    ], evaluated(run, samples=5, ranks=ranks)


def test_split_over_ranks_it_writes_and_measures_the_same(run: RunFolder) -> None:
    texts, alone = written_and_measured(run, 1)
    texts_split, split = call("tests.cli.model.test_generate_evaluate:written_and_measured", run, 2)
    assert texts_split == texts
    assert split["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert {k: v for k, v in split.items() if k not in CHANGING} == {
        k: v for k, v in alone.items() if k not in CHANGING
    }


def test_a_model_that_cannot_be_split_so(run: RunFolder) -> None:
    """All reasons at once, before a process starts; what a rank refuses comes through."""
    with pytest.raises(
        ConfigError, match=r"^num_attention_heads 2 does not divide by --tensor-parallel 3$"
    ) as error:
        generated(run, ["a"], ranks=3)
    assert error.value.exit == 3
    with pytest.raises(
        ConfigError,
        match=(
            r"num_attention_heads 2 does not divide by --tensor-parallel 200\nffn_hidden_size \d+"
            r" .* 200$"
        ),
    ):
        evaluated(run, ranks=200)


def test_a_bar_on_a_terminal(run: RunFolder) -> None:
    seen = task(run)
    shown = io.StringIO()
    vars(seen)["console"] = Console(file=shown, force_terminal=True, width=120)
    evaluate(seen, "last", EvaluateOptions(samples=4))
    assert "evaluate" in shown.getvalue() and "4/4" in shown.getvalue()


def test_the_sample_at_the_end_of_training(
    run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load(run.root).resolve("text").job
    ending._print_sample(task(run), run, job)
    assert "a sample from the model" in (out := capsys.readouterr().out) and "\nthe " in out

    def fail(*args: object, **words: object) -> None:
        raise TrainkitError("this machine has no CUDA device", exit=ConfigError("").exit)

    monkeypatch.setattr("trainkit.train.inference.generate.generate", fail)
    ending._print_sample(task(run), run, job)  # training has succeeded all the same
    assert capsys.readouterr().out == "no sample from the model: this machine has no CUDA device\n"
