"""jobs.toml as people write it, well and badly: one clear message a mistake, with its line, all
at once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.base.errors import ConfigError
from trainkit.jobs.load import find_root, load

REPOSITORY = Path(__file__).parents[2]


def test_the_jobs_of_this_repository_are_right() -> None:
    jobs = load(REPOSITORY)
    assert jobs.check() == []
    assert jobs.default_job in jobs.names()
    for name in jobs.names():
        assert jobs.resolve(name).job.name == name


def test_a_good_job_resolves(checkout: Checkout, tmp_path: Path) -> None:
    jobs = checkout()
    assert jobs.check() == []
    job = jobs.resolve("demo").job
    assert (job.cluster.name, job.model.name, job.dataset.name, job.world_size) == (
        "here",
        "tiny",
        "mock",
        2,
    )
    assert job.cluster.root == str(tmp_path)


CASES = {
    "a typo": (
        ("train_iters", "trian_iters"),
        [
            "jobs.toml:17: unknown key 'trian_iters' in [jobs.demo.training]\n  did you mean"
            " 'train_iters'?"
        ],
    ),
    "a word like no key": (
        ("train_iters = 20", "train_iters = 20\nzzz = 1"),
        ["jobs.toml:18: unknown key 'zzz' in [jobs.demo.training]\n  known: adam_beta1, "],
    ),
    "a misspelt extends": (
        ('model = "tiny"', 'model = "tiny"\nextend = "x"'),
        ["jobs.toml:14: unknown key 'extend' in [jobs.demo]\n  did you mean 'extends'?"],
    ),
    "a string for an integer": (
        ("= 20", '= "12"'),
        ["jobs.toml:17: jobs.demo.training.train_iters: expected an integer, got the string '12'"],
    ),
    "a float for an integer": (
        ("= 20", "= 12.0"),
        ["jobs.toml:17: jobs.demo.training.train_iters: expected an integer, got the number 12.0"],
    ),
    "a boolean for an integer": (
        ("ranks_per_node = 2", "ranks_per_node = true"),
        ["jobs.toml:2: clusters.here.ranks_per_node: expected an integer, got the boolean true"],
    ),
    "a table for a string": (
        ("ranks_per_node = 2", "root = {}"),
        ["jobs.toml:2: clusters.here.root: expected a string, got a table"],
    ),
    "a scalar for a table": (
        ('model = "tiny"', 'model = "tiny"\ngenerate = 3'),
        ["jobs.toml:14: jobs.demo.generate: expected a table, got the integer 3"],
    ),
    "a number out of bounds": (
        ("lr = 1e-3", "lr = -1"),
        ["jobs.toml:18: jobs.demo.training.lr = -1 must be at least 0\n  highest learning rate"],
    ),
    "too few values": (
        ("lr = 1e-3", "lr = 1e-3\nrampup_batch_size = [4, 4]"),
        [
            "jobs.toml:19: jobs.demo.training.rampup_batch_size: 2 values are too few\n  [start,"
            " increment, samples]: "
        ],
    ),
    "an empty root": (
        ("ranks_per_node = 2", "root = ''"),
        ["jobs.toml:2: clusters.here.root is empty\n  folder for runs"],
    ),
    "fewer tasks than nodes": (
        ('model = "tiny"', 'model = "tiny"\nnodes = 2\nslurm = { ntasks = 1 }'),
        ["jobs.toml:15: jobs.demo: slurm.ntasks = 1 is below nodes = 2: Slurm gives no node"],
    ),
    "not a number": (
        ("lr = 1e-3", "lr = nan"),
        ["jobs.toml:18: jobs.demo.training.lr: expected a finite number, got the number nan"],
    ),
    "a missing table": (
        ("[jobs.demo.training]\ntrain_iters = 20\nlr = 1e-3\n", ""),
        ["jobs.toml:11: missing table [jobs.demo.training]"],
    ),
    "a missing key": (
        ("num_layers = 2\n", ""),
        [
            "jobs.toml:4: missing key 'num_layers' in [models.tiny]\n  num_layers: transformer"
            " blocks"
        ],
    ),
    "a missing reference": (
        ('model = "tiny"\n', ""),
        ["jobs.toml:11: missing key 'model' in [jobs.demo]\n  model: name of a [models.X] table"],
    ),
    "an undefined reference": (
        ('"tiny"', '"tinny"'),
        [
            "jobs.toml:13: jobs.demo.model = 'tinny' names no [models.X] table\n  did you mean"
            " 'tiny'?"
        ],
    ),
    "a table where a name belongs": (
        ('"mock"', '{ source = "mock" }'),
        ["jobs.toml:14: jobs.demo.dataset: expected the name of a [datasets.X] table, got a table"],
    ),
    "a rule between keys": (
        ("lr = 1e-3", "lr = 1e-3\nmin_lr = 1e-2"),
        ["jobs.toml:19: jobs.demo.training: min_lr 0.01 is above lr 0.001"],
    ),
    "a rule between tables": (
        ("vocab_size = 512\n", ""),
        [
            "jobs.toml:13: jobs.demo: dataset 'mock' has no tokenizer, so model 'tiny' needs"
            " vocab_size"
        ],
    ),
    "a name of its own": (
        ('model = "tiny"', 'model = "tiny"\nname = "x"'),
        ["jobs.toml:14: 'jobs.demo.name' cannot be set: a table is named by its header"],
    ),
    "a dotted name": (
        ("[models.tiny]", "[models.tiny-1.5b]"),
        [
            "jobs.toml:4: unknown key '5b' in [models.tiny-1]\n  if [models.tiny-1.5b] was meant as"
            " a name: names match [a-z0-9][a-z0-9_-]*, without dots; for example [models.tiny-1-5b]"
        ],
    ),
    "an upper-case name": (
        ("[models.tiny]", "[models.Tiny]"),
        ["jobs.toml:4: 'Tiny' cannot name a table of [models]\n  names match [a-z0-9][a-z0-9_-]*"],
    ),
    "a secret that is not a name": (
        ("ranks_per_node = 2", "secrets = ['WANDB_API_KEY', 'HF_TOKEN?', 'hf-123']"),
        [
            r"jobs.toml:2: clusters.here.secrets: 'hf-123' does not match"
            r" ^[A-Za-z_][A-Za-z0-9_]*\??$"
        ],
    ),
    "an unknown table": (
        ("[clusters.here]", "[cluster.x]\n[clusters.here]"),
        ["jobs.toml:1: unknown table [cluster]\n  did you mean 'clusters'?"],
    ),
    "a key at the top level": (
        ("[clusters.here]", "nodes = 1\n[clusters.here]"),
        ["jobs.toml:1: unknown key 'nodes' at the top level"],
    ),
    "a default job that is none": (
        ("[clusters.here]", "defaults.job = 'dmeo'\n[clusters.here]"),
        ["jobs.toml:1: defaults.job = 'dmeo' names no [jobs.X] table\n  did you mean 'demo'?"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(case: str, checkout: Checkout) -> None:
    (old, new), expected = CASES[case]
    assert old in GOOD
    text = GOOD.replace(old, new, 1)
    if "[models." in new and "Tiny" in new:
        text = text.replace('"tiny"', '"Tiny"')
    if "1.5b" in new:
        text = text.replace('"tiny"', '"tiny-1"')
    jobs = checkout(text)
    found = refused(jobs)
    assert len(found) == len(expected)
    for words, beginning in zip(found, expected, strict=True):
        assert words.startswith(beginning)
    assert [str(problem) for problem in jobs.check()] == found  # the same words, each once


@pytest.mark.parametrize(
    ("value", "got"),
    [("1.5", "the number 1.5"), ("'2'", "the string '2'"), ("true", "the boolean true")],
)
def test_only_an_integer_is_a_number_of_nodes(value: str, got: str, checkout: Checkout) -> None:
    (words,) = refused(checkout(), sets=[f"nodes={value}"])
    assert words.startswith(f"--set: nodes: expected an integer, got {got}")


@pytest.mark.parametrize("value", ["0", "-1", "'0s'", "'30'", "'30 s'", "'soon'"])
def test_an_interval_of_copies_in_memory(value: str, checkout: Checkout) -> None:
    (words,) = refused(checkout(), sets=[f"checkpoint.memory_interval={value}"])
    assert f"memory_interval = {value} is neither a number of steps (10) nor of" in words
    for good, expected in (("3", (3, 0.0)), ("'0.5s'", (0, 0.5))):
        keep = checkout().resolve("demo", [f"checkpoint.memory_interval={good}"]).job.checkpoint
        assert (keep.memory_steps, keep.memory_seconds) == expected


def test_allowed_values_are_listed(checkout: Checkout) -> None:
    (words,) = refused(checkout(GOOD.replace("lr = 1e-3", 'lr = 1e-3\nprecision = "fp4"')))
    assert (
        words
        == "jobs.toml:19: jobs.demo.training.precision: expected 'fp32', 'bf16', 'fp16' or 'fp8',"
        " got the string 'fp4'"
    )
    (words,) = refused(checkout(GOOD.replace("ranks_per_node = 2", 'device = "mi300x"')))
    assert words.startswith(
        "jobs.toml:2: clusters.here.device = 'mi300x' names no [devices.X] table\n  known:"
        " a100-sxm-40gb, "
    )


def test_two_mistakes_are_told_at_once_by_line(checkout: Checkout) -> None:
    found = refused(
        checkout(
            GOOD.replace('"tiny"', '"tinny"')
            .replace("= 20", "= '20'")
            .replace("ranks_per_node", "rank_per_node")
        )
    )
    assert [words.partition(": ")[0] for words in found] == [
        "jobs.toml:2",
        "jobs.toml:13",
        "jobs.toml:17",
    ]


def test_a_mistake_elsewhere_stops_check_but_no_job(checkout: Checkout) -> None:
    jobs = checkout(GOOD + "[jobs.other]\nmodle = 'tiny'\n[clusters.X]\n[models]\nstray = 3\n")
    assert jobs.resolve("demo").job.name == "demo"
    found = "\n".join(map(str, jobs.check()))
    assert "jobs.toml:20: unknown key 'modle' in [jobs.other]\n  did you mean 'model'?" in found
    assert "jobs.toml:21: 'X' cannot name a table of [clusters]" in found
    assert "jobs.toml:23: models.stray: expected a table, got the integer 3" in found
    assert jobs.names() == ["demo", "other"]


def test_a_fault_that_two_jobs_share_is_told_once(checkout: Checkout) -> None:
    text = GOOD.replace("ranks_per_node = 2", "ranks_per_node = 0")
    jobs = checkout(text + text[text.index("[jobs.demo]") :].replace("jobs.demo", "jobs.again"))
    assert len(jobs.check()) == 1


def test_a_source_that_does_not_read_what_is_given(checkout: Checkout) -> None:
    """Else the urls of a dataset of files would be nobody's."""
    table = "[datasets.d]\nsource = 'files'\npaths = ['x']\ntokenizer = 't'\nurls = ['http://x']\n"
    (words,) = checkout(GOOD + table + "[tokenizers.t]\ntype = 'bpe'\nvocab_size = 512\n").check()
    said = "jobs.toml:23: datasets.d: urls is for source = 'web' or 'indexed', not 'files'"
    assert str(words).startswith(said)


def test_an_unknown_job_is_answered_with_the_nearest(checkout: Checkout) -> None:
    (words,) = refused(checkout(), "dmeo")
    assert "has no job 'dmeo'" in words and words.endswith("did you mean 'demo'?")


def test_an_integer_does_where_a_number_is_expected(checkout: Checkout) -> None:
    lr = checkout(GOOD.replace("1e-3", "1")).resolve("demo").job.training.lr
    assert lr == 1.0 and isinstance(lr, float)


def test_no_toml_no_utf8_no_file(checkout: Checkout, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^jobs.toml:19: not TOML: .*column 5"):
        checkout(GOOD + "x = \n")
    (tmp_path / "jobs.toml").write_bytes(b"a = 1\nb = '\xff'\n")
    with pytest.raises(ConfigError, match=r"^jobs.toml:2: not UTF-8"):
        load(tmp_path)
    (tmp_path / "jobs.toml").unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*jobs.toml: No such file"):
        load(tmp_path)


def test_blank_files_and_a_missing_last_newline_are_legal(checkout: Checkout) -> None:
    assert checkout("").names() == [] and checkout("").check() == []
    assert checkout("\n\n" + GOOD.rstrip("\n")).check() == []
    assert checkout(GOOD.replace("\n", "\r\n")).check() == []


def test_the_root_is_found_upward(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    with pytest.raises(
        ConfigError, match=r"no jobs.toml in .*/a/b or any folder above it"
    ) as caught:
        find_root(below)
    assert caught.value.exit == 3
    (tmp_path / "jobs.toml").touch()
    assert find_root(below) == find_root(tmp_path) == tmp_path


def test_the_listing_answers_for_broken_jobs_too(checkout: Checkout) -> None:
    jobs = checkout(GOOD + "[jobs.broken]\nextends = 'demo'\nnodes = 'x'\nzzz = 1\n")
    rows = jobs.describe()
    assert [
        (row.name, row.engine, row.cluster, row.model, row.dataset, row.nodes) for row in rows
    ] == [
        ("demo", "native", "here", "tiny", "mock", 1),
        ("broken", "native", "here", "tiny", "mock", "x"),
    ]


WRITTEN = (
    GOOD
    + "[datasets.d]\nsource = 'files'\npaths = ['x']\ntokenizer = 't'\n[tokenizers.t]\nvocab_size ="
    " 300\n[jobs.e]\nextends = 'demo'\ndataset = 'd'\n"
)
VALUES = [
    "1",
    "0",
    "-1.5",
    "true",
    "nan",
    "'demo'",
    "'x'",
    "''",
    "'${host:A}'",
    "'${node:A}'",
    "1979-05-27",
    "07:32:00",
]
VALUES += ["[]", "['demo', 1]", "[[]]", "{}", "{ a = 1 }", "{ a.b = [] }"]
KEYS = [
    "name",
    "extends",
    "zzz",
    "cluster",
    "training",
    "tokenizer",
    "paths",
    "env",
    "secrets",
    "nodes",
    "model.x",
    "training.lr",
    '"a.b"',
    '""',
]
spoiled = st.tuples(
    st.integers(0, WRITTEN.count("\n") - 1),
    st.sampled_from(["drop", "value", "add"]),
    st.sampled_from(KEYS),
    st.sampled_from(VALUES),
)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300
)
@given(
    spoils=st.lists(spoiled, min_size=1, max_size=4),
    sets=st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), max_size=1),
)
def test_however_spoiled_every_problem_has_its_place(
    spoils: list[tuple[int, str, str, str]], sets: list[tuple[str, str]], checkout: Checkout
) -> None:
    lines = WRITTEN.splitlines()
    for number, how, key, value in spoils:
        if how == "drop":
            lines[number] = ""
        elif how == "add":
            lines[number] += f"\n{key} = {value}"
        elif "=" in lines[number]:
            lines[number] = f"{lines[number].partition(' =')[0]} = {value}"
    text = "\n".join(lines)
    try:
        jobs = checkout(text)
    except ConfigError as error:
        assert all("not TOML" in str(problem) for problem in error.list)
        return
    problems = jobs.check()
    assert all(
        problem.place
        and problem.place.file == "jobs.toml"
        and 1 <= problem.place.line <= text.count("\n") + 1
        for problem in problems
    )
    assert len(jobs.describe()) == len(jobs.names())
    for name in jobs.names():
        try:
            jobs.resolve(name)
            jobs.resolve(name, [f"{key}={value}" for key, value in sets])
        except ConfigError as error:
            assert error.list and all(problem.place for problem in error.list)
