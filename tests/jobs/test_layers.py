"""Which layer wins, what each value remembers of it, and what fills ${...}."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tomli
from hypothesis import given, strategies as st

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.base.errors import ConfigError, SourceLocation
from trainkit.jobs.layers import parse_overrides
from trainkit.jobs.provenance import SourcedTable, SourcedValue
from trainkit.jobs.resolved import ResolvedJob


def history(resolved: ResolvedJob, key: str) -> list[tuple[Any, str]]:
    """A value and all it overrode, newest first, with places."""
    origin = resolved.origins[key]
    return [(each.value, str(each.place)) for each in (origin, *origin.overrode)]


def test_every_layer_overrides_the_one_below_and_remembers_it(checkout: Checkout) -> None:
    text = (
        GOOD + "[jobs.longer]\nextends = 'demo'\ntraining = { weight_decay = 0.3 }\n[jobs.base]\n"
    )
    text = text.replace("lr = 1e-3", "lr = 1e-3\nweight_decay = 0.2")
    jobs = checkout(text, "[jobs.longer.training]\nweight_decay = 0.4\n")
    resolved = jobs.resolve("longer", ["training.weight_decay=0.5", "training.weight_decay=0.6"])
    assert resolved.job.training.weight_decay == 0.6
    assert history(resolved, "training.weight_decay") == [
        (0.6, "--set"),
        (0.5, "--set"),
        (0.4, "jobs.local.toml:2"),
        (0.3, "jobs.toml:22"),
        (0.2, "jobs.toml:19"),
        (0.01, "built-in default"),
    ]
    assert history(resolved, "training.train_iters") == [(20, "jobs.toml:17")]
    assert history(resolved, "training.clip_grad") == [(1.0, "built-in default")]
    assert history(resolved, "cluster.name") == [("here", "jobs.toml:12")]


def test_tables_merge_scalars_and_arrays_replace(checkout: Checkout) -> None:
    base = "[clusters.base]\nranks_per_node = 2\nsecrets = ['A', 'B']\nenv = { X = '1', Y = '1' }\n"
    jobs = checkout(
        GOOD.replace("ranks_per_node = 2", "extends = 'base'\nsecrets = ['C?']\nenv.Y = '2'") + base
    )
    resolved = jobs.resolve("demo")
    assert resolved.job.cluster.secrets == ("C?",)
    assert resolved.job.cluster.env == {"X": "1", "Y": "2"}
    assert resolved.job.cluster.ranks_per_node == 2
    assert history(resolved, "cluster.secrets") == [
        (("C?",), "jobs.toml:3"),
        (["A", "B"], "jobs.toml:23"),
        ((), "built-in default"),
    ]
    assert history(resolved, "cluster.env.Y") == [("2", "jobs.toml:4"), ("1", "jobs.toml:24")]


def test_extends_as_a_diamond_lays_the_common_base_lowest(checkout: Checkout) -> None:
    text = GOOD.replace("[models.tiny]", "[models.tiny]\nextends = ['left', 'right']").replace(
        "num_layers = 2\n", ""
    )
    text += (
        "[models.left]\nextends = 'top'\nnum_layers = 3\n[models.right]\nextends ="
        " 'top'\n[models.top]\nnum_layers = 1\ninit_method_std = 0.5\n"
    )
    jobs = checkout(text)
    resolved = jobs.resolve("demo")
    assert resolved.job.model.num_layers == 3  # not top's 1, though it comes again by way of right
    assert resolved.job.model.init_method_std == 0.5
    assert jobs.check() == []  # bases may be incomplete


def test_of_two_bases_the_later_wins(checkout: Checkout) -> None:
    text = (
        GOOD.replace("num_layers = 2", "extends = ['a', 'b']")
        + "[models.a]\nnum_layers = 3\n[models.b]\nnum_layers = 4\n"
    )
    assert history(checkout(text).resolve("demo"), "model.num_layers") == [
        (4, "jobs.toml:22"),
        (3, "jobs.toml:20"),
    ]


@pytest.mark.parametrize(
    ("extends", "others", "words"),
    [
        (
            "'tny'",
            "",
            (
                "jobs.toml:5: [models.tiny] extends 'tny', which names no [models.X] table\n  did"
                " you mean 'tiny'?"
            ),
        ),
        ("'tiny'", "", "jobs.toml:5: extends goes round in a circle: tiny -> tiny"),
        (
            "'a'",
            "[models.a]\nextends = ['tiny']\n",
            "jobs.toml:5: extends goes round in a circle: a -> tiny -> a",
        ),
        (
            "3",
            "",
            (
                "jobs.toml:5: [models.tiny] extends: expected a table's name or an array of names,"
                " got the integer 3"
            ),
        ),
        (
            "{}",
            "",
            (
                "jobs.toml:5: [models.tiny] extends: expected a table's name or an array of names,"
                " got a table"
            ),
        ),
    ],
)
def test_bad_extends(extends: str, others: str, words: str, checkout: Checkout) -> None:
    jobs = checkout(GOOD.replace("num_layers = 2", f"extends = {extends}") + others)
    assert refused(jobs) == [words]
    assert [str(problem) for problem in jobs.check()] == [words]


def test_what_is_missing_beside_a_base_is_asked_where_the_table_is(checkout: Checkout) -> None:
    text = GOOD.replace("num_layers = 2", "extends = 'a'") + "[models.a]\nlayernorm_epsilon = 1\n"
    assert refused(checkout(text)) == [
        "jobs.toml:4: missing key 'num_layers' in [models.tiny]\n  num_layers: transformer blocks"
    ]


def test_the_local_file_adds_jobs_and_its_mistakes_carry_its_name(checkout: Checkout) -> None:
    jobs = checkout(local="[jobs.mine]\nextends = 'demo'\n[jobs.demo.training]\nlr = 'x'\n")
    assert jobs.names() == ["demo", "mine"]
    assert (
        refused(jobs)
        == refused(jobs, "mine")
        == [
            "jobs.local.toml:4: jobs.demo.training.lr: expected a number, got the string 'x'\n "
            " highest learning rate"
        ]
    )


def test_set_switches_references_and_reaches_into_them(checkout: Checkout) -> None:
    jobs = checkout(GOOD + "[clusters.gpus]\ndevice = 'cuda'\ngpus_per_node = 8\n")
    resolved = jobs.resolve(
        "demo",
        [
            "cluster=gpus",
            "cluster.ranks_per_node=4",
            "model.num_layers=3",
            "env.A='1'",
            "dataset.split=80,10,10",
        ],
    )
    job = resolved.job
    assert (
        job.cluster.name,
        job.cluster.device.name,
        job.cluster.gpus_per_node,
        job.cluster.ranks_per_node,
    ) == ("gpus", "cuda", 8, 4)
    assert (job.model.num_layers, job.env, job.dataset.split) == (3, {"A": "1"}, "80,10,10")
    assert history(resolved, "cluster.name") == [("gpus", "--set"), ("here", "jobs.toml:12")]
    assert history(resolved, "model.num_layers") == [(3, "--set"), (2, "jobs.toml:5")]


def test_set_of_a_whole_table_merges(checkout: Checkout) -> None:
    training = checkout().resolve("demo", ["training={lr=1, seed=2}"]).job.training
    assert (training.lr, training.seed, training.train_iters) == (1.0, 2, 20)


@pytest.mark.parametrize(
    ("word", "answer"),
    [
        ("training.lrr=1", "--set: unknown key 'training.lrr'\n  did you mean 'training.lr'?"),
        ("trainig.lr=1", "--set: unknown key 'trainig'\n  did you mean 'training'?"),
        (
            "cluster.rank=1",
            "--set: unknown key 'cluster.rank'\n  did you mean 'cluster.ranks_per_node'?",
        ),
        (
            "training.lr=high",
            "--set: training.lr: expected a number, got the string 'high'\n  highest learning rate",
        ),
        (
            "training.lr.x=1",
            "--set: training.lr: expected a number, got a table\n  highest learning rate",
        ),
        (
            "env.A=1",
            (
                "--set: env.A: expected a string, got the integer 1\n  for a string: --set"
                " 'env.A=\"1\"'"
            ),
        ),
        ("model=tinny", "--set: model = 'tinny' names no [models.X] table\n  did you mean 'tiny'?"),
        ("nodes=0", "--set: nodes = 0 must be at least 1\n  nodes"),
        (
            "cluster.device=h200-sxm-141",
            (
                "--set: cluster.device = 'h200-sxm-141' names no [devices.X] table\n  did you mean"
                " 'h200-sxm-141gb'?"
            ),
        ),
        (
            "cluster.name=x",
            "--set: 'cluster.name' cannot be set: a table is named by its header\n  remove it",
        ),
        (
            "training",
            "--set: expected KEY=VALUE, got 'training'\n  for example --set training.lr=1e-4",
        ),
        ("a..b=1", "--set: expected KEY=VALUE, got 'a..b=1'\n  for example --set training.lr=1e-4"),
        (
            "dataset.tokenizer.vocab_size=300",
            (
                "--set: dataset.tokenizer.vocab_size has no table to go to: dataset.tokenizer is"
                " not given\n  add --set dataset.tokenizer=NAME"
            ),
        ),
    ],
)
def test_bad_sets(word: str, answer: str, checkout: Checkout) -> None:
    assert refused(checkout(), sets=[word]) == [answer]


@given(st.text())
def test_a_set_value_is_toml_or_else_the_text_itself(text: str) -> None:
    (origin,) = parse_overrides([f"key={text}"])
    try:
        values = tomli.loads(f"value = {text}")
    except tomli.TOMLDecodeError:
        values = {}
    expected = values["value"] if len(values) == 1 else text
    assert origin.value == expected or origin.value != origin.value  # nan


def test_mock_always_works_unless_a_table_has_its_name(checkout: Checkout) -> None:
    resolved = checkout().resolve("demo")
    assert (resolved.job.dataset.source, resolved.job.dataset.tokenizer) == ("mock", None)
    assert history(resolved, "dataset.split")[0] == ("90,10,0", "built-in default")
    own = checkout(GOOD + "[datasets.mock]\nsource = 'mock'\nsplit = '50,50'\n").resolve("demo")
    assert own.job.dataset.split == "50,50"


def test_paths_are_absolute(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    data = (
        "[datasets.d]\nsource = 'files'\npaths = ['text/*.jsonl', '/x/y.jsonl',"
        " '~/z.jsonl']\ntokenizer = 't'\n"
    )
    data += "[tokenizers.t]\ntype = 'file'\npath = 'tokenizer.json'\n"
    job = (
        checkout(
            GOOD.replace("ranks_per_node = 2", "root = 'work'").replace('"mock"', '"d"') + data
        )
        .resolve("demo")
        .job
    )
    assert job.cluster.root == f"{tmp_path}/work"
    assert job.dataset.paths == (f"{tmp_path}/text/*.jsonl", "/x/y.jsonl", "/home/ada/z.jsonl")
    assert job.dataset.tokenizer and job.dataset.tokenizer.path == f"{tmp_path}/tokenizer.json"


def test_variables_of_the_host_are_filled_in_and_those_of_the_node_left(checkout: Checkout) -> None:
    text = GOOD.replace(
        "ranks_per_node = 2",
        "root = '/scratch/${host:USER}'\nenv = { A = '${node:HOSTNAME}-${host:USER}' }\nsecrets ="
        " ['${host:KEY}']",
    )
    job = checkout(text, environ={"USER": "ada", "KEY": "K"}).resolve("demo").job
    assert (job.cluster.root, job.cluster.env, job.cluster.secrets) == (
        "/scratch/ada",
        {"A": "${node:HOSTNAME}-ada"},
        ("K",),
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (
            "${host:NO}",
            (
                "clusters.here.root: the environment has no variable NO for ${host:NO}\n  export"
                " NO=... first"
            ),
        ),
        (
            "${node:A}",
            (
                "clusters.here.root: '${node:A}' may stand in env only; here nothing replaces it\n "
                " ${host:VAR} is filled in where you type"
            ),
        ),
        (
            "${HOME}",
            (
                "clusters.here.root: '${HOME}' is neither ${host:VAR} (filled in here) nor"
                " ${node:VAR} (left for the node)"
            ),
        ),
    ],
)
def test_bad_variables(value: str, words: str, checkout: Checkout) -> None:
    assert refused(checkout(GOOD.replace("ranks_per_node = 2", f"root = '{value}'"))) == [
        f"jobs.toml:2: {words}"
    ]


def test_a_reference_may_come_from_the_host(checkout: Checkout) -> None:
    jobs = checkout(GOOD.replace('"here"', '"${host:WHERE}"'), environ={"WHERE": "here"})
    assert jobs.resolve("demo").job.cluster.name == "here"
    assert refused(checkout(GOOD.replace('"here"', '"${host:WHERE}"'))) == [
        "jobs.toml:12: jobs.demo.cluster: the environment has no variable WHERE for ${host:WHERE}\n"
        "  export WHERE=... first"
    ]


trees = st.recursive(
    st.integers() | st.lists(st.integers()),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=8,
)
tables = st.dictionaries(st.sampled_from("abc"), trees)


def section(table: dict[str, Any], file: str) -> SourcedTable:
    return SourcedTable(
        SourceLocation(file),
        (),
        {
            key: section(value, file)
            if isinstance(value, dict)
            else SourcedValue(value, SourceLocation(file))
            for key, value in table.items()
        },
    )


def merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    both = {
        key: (
            merged(low[key], value)
            if isinstance(low.get(key), dict) and isinstance(value, dict)
            else value
        )
        for key, value in high.items()
    }
    return {**low, **both}


@given(tables, tables, tables)
def test_merging_is_what_it_says_and_associative(
    a: dict[str, Any], b: dict[str, Any], c: dict[str, Any]
) -> None:
    low, middle, high = section(a, "a"), section(b, "b"), section(c, "c")
    assert high.over(middle.over(low)).plain() == merged(merged(a, b), c)
    assert middle.over(low, keep_place=True).place == low.place


INCLUDED = "[models.more]\nextends = 'tiny'\nnum_layers = 5\n"


def test_included_files_add_tables_that_know_their_file(checkout: Checkout, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs/more.toml").write_text(INCLUDED)
    jobs = checkout('include = ["jobs/*.toml"]\n' + GOOD)
    resolved = jobs.resolve("demo", ["model=more"])
    assert resolved.job.model.num_layers == 5
    assert str(resolved.origins["model.num_layers"].place) == "jobs/more.toml:3"
    assert jobs.check() == []


@pytest.mark.parametrize(
    ("include", "more", "words"),
    [
        (
            'include = "jobs/more.toml"',
            INCLUDED,
            "jobs.toml:1: include: expected an array of file patterns",
        ),
        ("include = [3]", INCLUDED, "jobs.toml:1: include: expected an array of file patterns"),
        (
            'include = ["jobs/*.tml"]',
            INCLUDED,
            "jobs.toml:1: include: no file matches 'jobs/*.tml'",
        ),
        (
            'include = ["jobs/*.toml"]',
            "[models.tiny]\nnum_layers = 3\n",
            "jobs/more.toml:1: [models.tiny] is at jobs.toml:5 already",
        ),
        ('include = ["jobs/*.toml"]', "[models.tiny\n", "jobs/more.toml:1: "),
    ],
)
def test_bad_includes(
    include: str, more: str, words: str, checkout: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "jobs").mkdir(exist_ok=True)
    (tmp_path / "jobs/more.toml").write_text(more)
    with pytest.raises(ConfigError) as caught:
        checkout(f"{include}\n{GOOD}")
    assert str(caught.value).startswith(words)


def test_a_row_of_the_device_table_can_be_added_or_changed(checkout: Checkout) -> None:
    text = (
        GOOD
        + "[devices.h100-sxm-80gb]\npeak_tflops = { fp16 = 900.0 }\n[devices.own]\nkind = 'cuda'\n"
    )
    jobs = checkout(text)
    device = jobs.resolve("demo", ["cluster.device=h100-sxm-80gb"]).job.cluster.device
    assert (device.peak_tflops["fp16"], device.peak_tflops["bf16"]) == (900.0, 989.4)
    assert jobs.resolve("demo", ["cluster.device=own"]).job.cluster.device.memory_bytes is None


@pytest.mark.parametrize(
    ("word", "path", "value"),
    [
        ('engine_args."model.optim.x"=4', ("engine_args", "model.optim.x"), 4),
        ("a.'x=y'.b=\"c=d\"", ("a", "x=y", "b"), "c=d"),
        (" a . b = 1", ("a", "b"), 1),
    ],
)
def test_a_key_in_quotation_marks_holds_dots(
    word: str, path: tuple[str, ...], value: object
) -> None:
    (origin,) = parse_overrides([word])
    assert (origin.path, origin.value) == (path, value)


@pytest.mark.parametrize("word", ['a."b=1', 'a.""=1', "a.'b'c=1", "a.=1", ".a=1", "a"])
def test_what_is_no_key(word: str) -> None:
    with pytest.raises(ConfigError, match="expected KEY=VALUE"):
        parse_overrides([word])
