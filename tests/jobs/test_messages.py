"""What jobs.toml is refused with helps: what is twice and where, how TOML writes a value, what a
key of another program is called here."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.base.errors import ConfigError
from trainkit.jobs.load import load
from trainkit.jobs.messages import MOST_LISTED, SYNONYMS, suggest


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            "[jobs.a]\nnodes = 1\nmodel = 'm'\nnodes = 2\n[jobs.b]\n",
            "4: not TOML: jobs.a.nodes is given twice, first in line 2",
            "keep one of the two",
        ),
        (
            "[jobs.a]\nnodes = 1\n\n[models.m]\n[jobs.a]\n",
            "5: not TOML: jobs.a is given twice, first in line 1",
            "keep one of the two",
        ),
        (
            "[a]\nb = { c = 1, d = 2, c = 3 }\n",
            "2: not TOML: a.b.c is given twice, first in line 2",
            "keep one of the two",
        ),
        (
            "a.b = 1\r\na = '''\r\n'''\r\n",
            "3: not TOML: a is given twice, first in line 1",
            "keep one of the two",
        ),
        (
            "a = True\n",
            "1: not TOML: Invalid value (column 5): True",
            "TOML writes it in lower case: true",
        ),
        (
            "a = [1, FALSE]\n",
            "1: not TOML: Invalid value (column 9): FALSE",
            "TOML writes it in lower case: false",
        ),
        (
            "a = None\n",
            "1: not TOML: Invalid value (column 5): None",
            "TOML has no such value: leave the key out",
        ),
        (
            "a = native\n",
            "1: not TOML: Invalid value (column 5): native",
            'a string needs quotes: "native"',
        ),
        (
            "a = .5\n",
            "1: not TOML: Invalid value (column 5): .5",
            "TOML wants a digit before the point: 0.5",
        ),
    ],
)
def test_a_file_that_is_not_toml(text: str, message: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_bytes(text.encode())
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {})
    (problem,) = caught.value.list
    assert f"{problem.place}: {problem.message}" == f"jobs.toml:{message}" and problem.hint == hint


def test_a_byte_order_mark_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load(tmp_path, {}).names() == ["demo"] and not load(tmp_path, {}).check()


def test_integers_that_toml_does_not_have(checkout: Checkout) -> None:
    for text in ("train_iters = 1" + "0" * 29, "rampup_batch_size = [1, 2, 1" + "0" * 29 + "]"):
        with pytest.raises(
            ConfigError, match=r"jobs\.demo\.training\.\w+: an integer of TOML has 64 bits"
        ):
            checkout(GOOD.replace("train_iters = 20", text))
    with pytest.raises(
        ConfigError, match=r"--set: training\.train_iters: an integer of TOML has 64 bits"
    ):
        checkout().resolve("demo", ["training.train_iters=1" + "0" * 29])
    (words,) = refused(checkout(), sets=["training.train_iters=1" + "0" * 15])
    assert "must be at most 1000000000000" in words


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("LR = 1e-3", "did you mean 'lr'?"),
        ("Learning-Rate = 1e-3", "did you mean 'lr'?"),
        ("learning_rate = 1e-3", "did you mean 'lr'?"),
        ("max_steps = 3", "did you mean 'train_iters'?"),
        ("micro-batch-size = 3", "did you mean 'micro_batch_size'?"),
        ("adam_beta = 0.9", "did you mean 'adam_beta1' or 'adam_beta2'?"),
    ],
)
def test_what_other_programs_call_a_key(line: str, hint: str, checkout: Checkout) -> None:
    words, *_ = [
        str(problem)
        for problem in checkout(GOOD + line + "\n").check()
        if "unknown key" in str(problem)
    ]
    assert words.endswith(hint), words


def test_a_key_in_the_table_above_its_own(checkout: Checkout) -> None:
    for key, meant in (("lr", "lr"), ("learning_rate", "lr"), ("max_steps", "train_iters")):
        text = GOOD.replace('dataset = "mock"\n', f'dataset = "mock"\n{key} = 3\n')
        assert any(
            str(problem).endswith(f"'{meant}' belongs into [jobs.demo.training]")
            for problem in checkout(text).check()
        )


def test_several_keys_that_begin_alike_are_all_named(checkout: Checkout) -> None:
    text = (
        GOOD
        + '[tokenizers.t]\ntype = "gpt2"\nvocab = "vocab.json"\nmerge_file = "m.txt"\nvocab_file ='
        ' "vocab.json"\n'
    )
    (words,) = [str(problem) for problem in checkout(text).check()]
    assert "did you mean 'vocab_file', 'vocab_size' or 'vocab_url'?" in words
    assert suggest("x", []) == "no such table is defined"


def test_of_many_words_three_are_named() -> None:
    """An engine's options are hundreds: nobody reads them in a hint."""
    many = [*(f"option-{number}" for number in range(MOST_LISTED)), "speed"]
    assert suggest("auctioneers", many).startswith(f"the nearest of {len(many)}: option-")
    assert len(suggest("auctioneers", many).split(", ")) == 3
    assert suggest("zzz", many) == ""
    assert suggest("zzz", many[1:]) == f"known: {', '.join(sorted(many[1:]))}"


def test_synonyms_mean_keys_that_there_are() -> None:
    from tests.jobs.test_read import tables

    every = [set(table.model_fields) for table in tables()]
    assert set(SYNONYMS.values()) <= set().union(*every)
    for keys in every:  # where a key could be meant, its synonym is none
        assert not {word for word in SYNONYMS if {word, SYNONYMS[word]} <= keys}


def test_editors_find_the_schema() -> None:
    """Taplo and its relatives read a line #:schema before the first table."""
    root = Path(__file__).resolve().parents[2]
    for path in (root / "jobs.toml", *(root / "jobs").glob("*.toml")):
        (line,) = [line for line in path.read_text().splitlines() if line.startswith("#:schema ")]
        assert (
            path.parent / line.partition(" ")[2]
        ).resolve() == root / "docs" / "jobs.schema.json"
        # only comments before it
        assert path.read_text().split(line)[0].replace("\n#", "").count("\n") == 1


@pytest.mark.parametrize(
    ("curate", "message", "hint"),
    [
        ('recipe = "finweb"', "recipe: expected 'fineweb', 'gopher' or 'c4', got", ""),
        ("steps = [{ ngram = 5 }]", "steps: a table without 'step'", "add step = NAME"),
        ('steps = [{ step = "minhsh" }]', "steps: there is no 'minhsh'", "did you mean 'minhash'?"),
        (
            'steps = [{ step = "exact" }, { step = "gopher-quality", min_word = 3 }]',
            "steps[1]: unknown key 'min_word' of 'gopher-quality'",
            "did you mean 'min_words'?",
        ),
        (
            'steps = [{ step = "language", min_score = 2.0 }]',
            "steps[0].min_score = 2.0 must be at most 1",
            "",
        ),
        ('steps = [{ step = "score", model = "a.bin" }]', "steps[0]: 'score' needs 'label'", ""),
        (
            'steps = [{ step = "exact", against = ["dd"] }]',
            "steps: against 'dd' names no [datasets.X] table",
            "did you mean 'd'?",
        ),
    ],
)
def test_a_step_of_curation_is_named(tmp_path: Path, curate: str, message: str, hint: str) -> None:
    (tmp_path / "jobs.toml").write_text(
        '[tokenizers.t]\ntype = "bpe"\nvocab_size = 300\n[datasets.d]\nsource = "files"\n'
        'paths = ["a.jsonl"]\n'
        f'tokenizer = "t"\n[datasets.d.curate]\n{curate}\n'
    )
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {}).dataset("d")
    (problem,) = caught.value.list
    assert f"datasets.d.curate.{message}" in problem.message
    assert hint in problem.hint


def test_a_value_below_free_keys_is_named_as_it_was_written(tmp_path: Path) -> None:
    text = GOOD + "[jobs.demo.sweep]\ngrid.training.lr = [nan]\nsamples = 1\n"
    (tmp_path / "jobs.toml").write_text(text + "random.training.z.uniform = [nan, 1.0]\n")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {}).resolve("demo")
    said = [problem.message for problem in caught.value.list]
    assert [each.partition(":")[0] for each in said] == [
        "jobs.demo.sweep.grid.training.lr",
        "jobs.demo.sweep.random.training.z.uniform",
    ]


@pytest.mark.parametrize("value", ["nan", "[1, inf]", "{ b = [nan] }", "2026-01-01"])
def test_what_no_engine_can_be_given_is_said_once(tmp_path: Path, value: str) -> None:
    line = f'[jobs.demo]\nengine = "megatron-lm"\nengine_args = {{ a = {value} }}'
    (tmp_path / "jobs.toml").write_text(GOOD.replace("[jobs.demo]", line, 1))
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {}).resolve("demo")
    (problem,) = caught.value.list
    assert problem.message.startswith("jobs.demo.engine_args: a = ")
    assert problem.place is not None and problem.place.line == 13
