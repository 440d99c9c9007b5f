"""The resolved job as a file: what is written is what is read, without jobs.toml, the
environment or tomli."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests.jobs.jobs_toml import GOOD, Checkout
from trainkit.base.errors import ConfigError
from trainkit.jobs.resolved import read_job, write_job
from trainkit.jobs.schema import Job, Table


def leaves(table: Table, above: str = "") -> dict[str, object]:
    found: dict[str, object] = {}
    for key in type(table).model_fields:
        value = getattr(table, key)
        if isinstance(value, Table):
            found |= leaves(value, f"{above}{key}.")
        elif isinstance(value, dict):
            found |= {f"{above}{key}.{name}": item for name, item in value.items()}
        else:
            found[above + key] = value
    return found


def test_every_value_has_its_origin(checkout: Checkout) -> None:
    resolved = checkout(
        GOOD.replace("ranks_per_node = 2", "env = { A = '1', B = '2' }\nsecrets = ['K?']")
    ).resolve("demo")
    assert {path: origin.value for path, origin in resolved.origins.items()} == leaves(resolved.job)


def test_a_rule_that_came_later_makes_no_run_unreadable(checkout: Checkout, tmp_path: Path) -> None:
    """What curates a dataset of jobs.toml is judged; not what curated that of a run."""
    steps = """
        { step = "url", words = ["foo-bar", "#ass"] },
        { step = "sample", rate = 0.5, field = "n", scores = [[0.1, 1], [0.9, 2]] },
        { step = "sample", rate = 0.5 },
        { step = "score", model = "m", label = "hq", field = "text" },
    """
    curated = """
        [tokenizers.t]
        type = "bpe"
        vocab_size = 512
        [datasets.crawl]
        source = "files"
        paths = ["*.jsonl"]
        tokenizer = "t"
        curate.steps = ["""
    jobs = GOOD.replace('dataset = "mock"', 'dataset = "crawl"') + curated
    with pytest.raises(ConfigError, match="'foo-bar' cannot be found") as refused:
        checkout(f"{jobs}{steps}]").resolve("demo")
    assert "#ass" not in str(refused.value)
    write_job(tmp_path / "job.json", checkout(f"{jobs}{{ step = 'exact' }}]").resolve("demo"))
    document = json.loads((tmp_path / "job.json").read_text())
    document["job"]["dataset"]["curate"]["steps"] = tomllib.loads(f"a = [{steps}]")["a"]
    (tmp_path / "job.json").write_text(json.dumps(document))
    curation = read_job(tmp_path / "job.json").dataset.curate
    assert curation is not None and len(curation.steps) == 4


def test_a_job_written_is_the_job_read(checkout: Checkout, tmp_path: Path) -> None:
    resolved = checkout(
        GOOD.replace(
            "ranks_per_node = 2", "env = { A = '${node:A}', B = 'é\\u0000\"' }\nsecrets = ['K?']"
        ),
        environ={},
    ).resolve("demo")
    write_job(tmp_path / "job.json", resolved)
    assert read_job(tmp_path / "job.json") == resolved.job
    document = json.loads((tmp_path / "job.json").read_text())
    assert document["schema"] == "job/1"
    assert document["origins"]["training.lr"] == {
        "value": 0.001,
        "place": "jobs.toml:19",
        "overrode": [],
    }
    assert document["origins"]["cluster.secrets"]["overrode"] == [
        {"value": [], "place": "built-in default"}
    ]


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50
)
@given(
    lr=st.floats(0, 1e300),
    seed=st.integers(0, 2**63 - 1),
    prompt=st.text().filter(lambda text: "${" not in text),
)
def test_values_come_back_exactly(
    lr: float, seed: int, prompt: str, checkout: Checkout, tmp_path: Path
) -> None:
    sets = [
        f"training.lr={lr!r}",
        f"training.seed={seed}",
        "generate.prompt=" + json.dumps(prompt, ensure_ascii=False).replace("\x7f", "\\u007f"),
    ]
    resolved = checkout().resolve("demo", sets)
    assert (resolved.job.training.lr, resolved.job.training.seed, resolved.job.generate.prompt) == (
        lr,
        seed,
        prompt,
    )
    write_job(tmp_path / "job.json", resolved)
    assert read_job(tmp_path / "job.json") == resolved.job


def test_ranks_read_a_job_without_tomli(checkout: Checkout, tmp_path: Path) -> None:
    write_job(tmp_path / "job.json", checkout().resolve("demo"))
    program = (
        "import sys; from pathlib import Path; from trainkit.jobs.resolved import read_job; job ="
        " read_job(Path(sys.argv[1])); print(job.name, 'tomli' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "job.json")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "demo False\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "holds None, not 'job/1'"),
        ('{"schema": "job/2"}', "holds 'job/2', not 'job/1'"),
        ('{"schema": "job/1"}', "job: "),
        ('{"schema": "job/1", "job": {"name": "x", "nodes": 0}}', "nodes: "),
    ],
)
def test_a_file_that_is_no_job_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_job(tmp_path / "job.json")
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="cannot read"):
        read_job(tmp_path / "none.json")


def test_a_job_is_frozen(checkout: Checkout) -> None:
    job: Job = checkout().resolve("demo").job
    with pytest.raises(ValueError, match="frozen"):
        job.__setattr__("nodes", 2)
