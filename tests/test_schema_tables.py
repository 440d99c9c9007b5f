"""A table that is keyed by the values of a key of jobs.toml has all of them: one that is forgotten
is found here, not in a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

import pytest

from trainkit.cli.completion import CHOICES
from trainkit.cli.config.render_optimizer import NAMES
from trainkit.data.sources import SOURCES
from trainkit.engines.gpt_neox.config import INIT_METHODS
from trainkit.engines.nemo.config import PRECISIONS
from trainkit.engines.rank.readers import READERS
from trainkit.engines.registry import ENGINES, PLACES
from trainkit.families import FAMILIES
from trainkit.families.contract import FEEDFORWARDS
from trainkit.images.builders import BUILDERS
from trainkit.jobs.clusters import LAUNCHER_TRAITS
from trainkit.jobs.containers import RUNTIME_TRAITS
from trainkit.jobs.job_tables import EngineSource
from trainkit.jobs.optimizers import KEPT, RATE_FACTORS
from trainkit.jobs.schema import Cluster, Container, Dataset, Job, Model, RopeScaling, Training
from trainkit.jobs.table import Table
from trainkit.launch.containers.runtimes import RUNTIMES
from trainkit.launch.launchers import LAUNCHERS
from trainkit.launch.scheduler_registry import PLACES as SCHEDULER_PLACES
from trainkit.plan.memory import LIBRARY_BYTES
from trainkit.train.huggingface.config import GELU_NAMES, TORCH_NAMES
from trainkit.train.huggingface.positions import STRETCH_KEYS
from trainkit.train.parallel.data_parallel import COMPUTE
from trainkit.train.update.optimizer import UPDATES

NATIVE_ALONE = {"fp8"}  # what no other engine trains in by this key, and no export is written in
FOREIGN = [name for name in PLACES if name != "native"]
TABLES: list[tuple[type[Table], str, Iterable[object]]] = [
    (Training, "optimizer", KEPT),
    (Training, "optimizer", UPDATES),
    (Training, "optimizer", RATE_FACTORS),
    (Training, "optimizer", NAMES),
    (Training, "precision", COMPUTE),
    (Training, "precision", {*PRECISIONS, *NATIVE_ALONE}),
    (Training, "precision", {*TORCH_NAMES, *NATIVE_ALONE}),
    *(
        (Training, "precision", {*states, *NATIVE_ALONE})
        for name in FOREIGN
        if (states := ENGINES[name].rules.states) is not None  # as the native trainer's
    ),
    (Model, "family", FAMILIES),
    (Model, "init_method", INIT_METHODS),
    (Model, "activation", FEEDFORWARDS),
    (Model, "gelu", GELU_NAMES),
    (RopeScaling, "type", set(STRETCH_KEYS) - {"default"}),
    (Dataset, "source", [*SOURCES, "mock", "blend"]),
    (Container, "runtime", RUNTIME_TRAITS),
    (Container, "runtime", RUNTIMES),
    (Container, "builder", BUILDERS),
    (Container, "builder", CHOICES["builder"]),
    (Job, "recovery", LIBRARY_BYTES),
    (Cluster, "launcher", LAUNCHER_TRAITS),
    (Cluster, "launcher", LAUNCHERS),
    (Cluster, "launcher", SCHEDULER_PLACES),
    (Job, "engine", PLACES),
    (EngineSource, "engine", FOREIGN),
    (EngineSource, "engine", READERS),
]


def values_of(annotation: Any) -> set[str]:
    """The values of a key that has a few."""
    if get_origin(annotation) is Literal:
        return set(get_args(annotation))
    return {value for part in get_args(annotation) for value in values_of(part)}


@pytest.mark.parametrize(("table", "key", "keys"), TABLES)
def test_no_value_of_a_key_is_forgotten(
    table: type[Table], key: str, keys: Iterable[object]
) -> None:
    assert set(keys) == values_of(table.model_fields[key].annotation)
