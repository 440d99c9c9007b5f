"""The engines of this version, by their names in jobs.toml: one file an engine."""

from __future__ import annotations

import importlib

from trainkit.base.errors import ConfigError
from trainkit.engines.contract import Engine
from trainkit.jobs.schema import Job

# by its name in jobs.toml: its module, and the class there
PLACES = {
    "native": ("trainkit.engines.native", "Native"),
    "gpt-neox": ("trainkit.engines.gpt_neox.engine", "GptNeox"),
    "megatron-lm": ("trainkit.engines.megatron_lm.engine", "MegatronLm"),
    "nemo": ("trainkit.engines.nemo.engine", "Nemo"),
    "neuronx-nemo": ("trainkit.engines.neuronx_nemo.engine", "NeuronxNemo"),
}


class EngineTable(dict[str, Engine]):
    """The engines by name, each imported when it is asked for: every start of a run is spared
    those of others."""

    def __missing__(self, name: str) -> Engine:
        module, engine = PLACES[name]
        self[name] = getattr(importlib.import_module(module), engine)()
        return self[name]


ENGINES = EngineTable()


def engine_notes(job: Job) -> list[str]:
    """What the job's engine passes on otherwise than it stands in jobs.toml, in words."""
    if job.engine == "native":
        return []
    module, _ = PLACES[job.engine]
    notes: list[str] = importlib.import_module(module).engine_notes(job)
    return notes


def refuse_unlaunchable(job: Job) -> None:
    """Raise ConfigError (exit 3) with everything in `job` that this version plans for but cannot
    launch."""
    if problems := ENGINES[job.engine].problems(job):
        raise ConfigError(problems)
