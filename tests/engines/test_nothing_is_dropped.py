"""A key that an engine has nothing like is refused or noted, never dropped in silence."""

from __future__ import annotations

import pytest

from tests.engines.test_what_engines_can import BASE, JOBS
from trainkit.engines.options import load_table, newest_version
from trainkit.engines.registry import foreign_engine

KEYS = {
    "init_from": '"hf"',
    "kernels": '"reference"',
    "checkpoint.keep_best": "2",
    "checkpoint.keep_every": "100",
    "checkpoint.memory_interval": "10",
    "checkpoint.save_first": "true",
    "profile": "{start=3,stop=4}",
    "training.max_skipped_in_a_row": "7",
    "training.on_nan": '"skip"',
    "training.on_spike": '"skip"',
    "training.replay_interval": "5",
    "training.ema_decay": "0.9",
    "training.z_loss": "0.1",
}


ENGINES = ["megatron-lm", "megatron-bridge", "gpt-neox", "nemo", "neuronx-nemo"]
TAKEN = ("megatron-bridge", "init_from")


@pytest.mark.parametrize(
    ("engine", "key"), [(each, key) for each in ENGINES for key in KEYS if (each, key) != TAKEN]
)
def test_a_key_without_counterpart(engine: str, key: str) -> None:
    """torchtitan's are in its own tests: its version is asked of a tree."""
    found = foreign_engine(engine)
    table = load_table(engine, newest_version(engine))

    def said(*sets: str) -> set[str]:
        job = JOBS.resolve(BASE[engine], [f'engine="{engine}"', *sets]).job
        problems = {problem.message for problem in found.option_problems(job, table)}
        return problems | set(found.version_notes(job, table))

    assert said(f"{key}={KEYS[key]}") - said()
