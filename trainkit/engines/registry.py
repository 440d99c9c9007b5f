"""The engines of this version, by their names in jobs.toml: one file an engine."""

from __future__ import annotations

from trainkit.base.errors import ConfigError
from trainkit.engines.contract import Engine
from trainkit.engines.gpt_neox.engine import GptNeox
from trainkit.engines.megatron_lm.engine import MegatronLm
from trainkit.engines.native import Native
from trainkit.jobs.schema import Job

ENGINES: dict[str, Engine] = {
    "native": Native(),
    "gpt-neox": GptNeox(),
    "megatron-lm": MegatronLm(),
}


def refuse_unlaunchable(job: Job) -> None:
    """Raise ConfigError (exit 3) with everything in `job` that this version plans for but cannot
    launch."""
    if job.engine not in ENGINES:
        hint = (
            f"`invoke plan {job.name}` plans it; --set engine=native trains it with trainkit's own"
            " trainer"
        )
        raise ConfigError(
            f"engine = '{job.engine}' is planned for, but not launched by this version of trainkit",
            hint=hint,
        )
    if problems := ENGINES[job.engine].problems(job):
        raise ConfigError(problems)
