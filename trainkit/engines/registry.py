"""The engines of this version, by their names in jobs.toml: one file an engine."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from trainkit.base.errors import raise_problems
from trainkit.engines.contract import Engine
from trainkit.jobs.schema import Job

if TYPE_CHECKING:
    from trainkit.engines.foreign import ForeignEngine

# by its name in jobs.toml: its module, and the class there; in the order in which they are asked
# whose a file is that is imported, the one that takes any last
PLACES = {
    "native": ("trainkit.engines.native", "Native"),
    "torchtitan": ("trainkit.engines.torchtitan.engine", "Torchtitan"),
    "megatron-bridge": ("trainkit.engines.megatron_bridge.engine", "MegatronBridge"),
    "nemo": ("trainkit.engines.nemo.engine", "Nemo"),
    "neuronx-nemo": ("trainkit.engines.neuronx_nemo.engine", "NeuronxNemo"),
    "gpt-neox": ("trainkit.engines.gpt_neox.engine", "GptNeox"),
    "megatron-lm": ("trainkit.engines.megatron_lm.engine", "MegatronLm"),
}


class EngineTable(dict[str, Engine]):
    """The engines by name, each imported when it is asked for: every start of a run is spared
    those of others."""

    def __missing__(self, name: str) -> Engine:
        module, engine = PLACES[name]
        self[name] = getattr(importlib.import_module(module), engine)()
        return self[name]


ENGINES = EngineTable()


def foreign_engine(name: str) -> ForeignEngine:
    """One that is not trainkit's own, by its name."""
    from trainkit.engines.foreign import ForeignEngine  # nothing that a native run asks for

    found = ENGINES[name]
    assert isinstance(found, ForeignEngine), f"{name} has no tree of its own"
    return found


def refuse_unlaunchable(job: Job) -> None:
    """Raise ConfigError (exit 3) with everything in `job` that this version plans for but cannot
    launch."""
    raise_problems(ENGINES[job.engine].problems(job))
