"""Metrics to Weights & Biases, where the job asks for it. Whatever happens there, training goes
on."""

from __future__ import annotations

import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trainkit.base.errors import Problem, raise_problems
from trainkit.base.extras import install_command
from trainkit.base.printable import warn
from trainkit.base.redact import Redactor
from trainkit.jobs.schema import Job
from trainkit.runs.folder import RunFolder
from trainkit.runs.origin import printable_environment

KEY = "WANDB_API_KEY"
INIT_SECONDS = 30.0
FINISH_SECONDS = 60.0


def wandb_problems(job: Job, environment: Mapping[str, str] = os.environ) -> list[Problem]:
    """Why a job that asks for Weights & Biases cannot have it: the package, or in mode online
    the key, is missing. Asks no network.

    `environment` is the ranks', by default this process's own.
    """
    if job.wandb is None:
        return []
    found = []
    if importlib.util.find_spec("wandb") is None:
        found.append(
            Problem(
                "the job reports to Weights & Biases, but wandb is not installed",
                hint=f"{install_command('wandb')}\n  or leave out wandb",
            )
        )
    if job.wandb.mode == "online" and not environment.get(KEY):
        way = (
            f'export {KEY} and name it in clusters.{job.cluster.name}.secrets = ["{KEY}"], or set'
            ' wandb.mode = "offline"'
        )
        found.append(
            Problem(f"the job reports to Weights & Biases, but its ranks have no {KEY}", hint=way)
        )
    return found


def open_wandb(job: Job, run: RunFolder) -> WandbLog | None:
    """The W&B run of a run, begun or gone on with; None where the job asks for none. Raises
    ConfigError with `wandb_problems`."""
    if job.wandb is None:
        return None
    raise_problems(wandb_problems(job))
    import wandb

    return WandbLog(wandb, job, run)


def printable_config(job: Job, environment: Mapping[str, str]) -> object:
    """The resolved job without secrets: neither values of the variables that cluster.secrets
    names, wherever they stand, nor of those in `env` that look like a secret."""
    names = [name.rstrip("?") for name in job.cluster.secrets]
    config = job.model_dump(mode="json")
    for table in (config, config["cluster"]):
        table["env"] = printable_environment(table["env"], names)
    secrets = [environment[name] for name in names if name in environment]
    clean: object = Redactor(secrets).value(config)
    return clean


def _numbers(row: Mapping[str, object], before: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a row, those of inner tables as TABLE/KEY."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{before}{key}/")
        elif isinstance(value, int | float):
            yield f"{before}{key}", value


class WandbLog:
    """One W&B run with the id of ours, so that a resumed run goes on there.

    It is sent rows of metrics and the job, nothing else: no console, code, git state, packages,
    machine or system metrics. Every value is drawn over the key `step`: W&B's own count of rows
    only grows, but a resumed run does lost steps again.

    Args:
        package: wandb.
        job: the job; `job.wandb` is there.
        run: the run folder; W&B's own files go to wandb/ in it.

    The first failure is a warning, and then nothing more is sent.
    """

    def __init__(self, package: Any, job: Job, run: RunFolder) -> None:
        self.run: Any = None
        self.failed = False
        self._try("begin", lambda: self._begin(package, job, run))

    def _begin(self, package: Any, job: Job, run: RunFolder) -> None:
        assert job.wandb is not None
        settings = package.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=INIT_SECONDS,
            save_code=False,
            silent=True,
            x_disable_machine_info=True,
            x_disable_meta=True,
            x_disable_stats=True,
            x_save_requirements=False,
        )
        where = {
            "project": job.wandb.project,
            "entity": job.wandb.entity,
            "group": job.wandb.group,
            "mode": job.wandb.mode,
            "dir": str(run.path),
        }
        config = printable_config(job, os.environ)
        # files of several attempts are put together by `wandb sync`
        resume = "allow" if job.wandb.mode == "online" else None
        self.run = package.init(
            id=run.id,
            name=f"{job.name}-{run.id}",
            resume=resume,
            config=config,
            settings=settings,
            **where,
        )
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def step(self, row: Mapping[str, object]) -> None:
        """A training row, under the names it has in metrics.jsonl."""
        self._send(dict(_numbers(row)))

    def evaluation(self, step: int, consumed_samples: int, name: str, loss: float) -> None:
        """A row of an evaluation: validation/NAME/lm_loss."""
        self._send(
            {
                "step": step,
                "consumed_samples": consumed_samples,
                f"validation/{name}/lm_loss": loss,
            }
        )

    def close(self) -> None:
        """Wait until W&B has everything, FINISH_SECONDS at most."""
        if self.run is None:
            return
        finishing = threading.Thread(
            target=lambda: self._try("finish", self.run.finish), daemon=True
        )
        finishing.start()
        finishing.join(FINISH_SECONDS)
        if finishing.is_alive():
            self._warn(f"not all was sent within {FINISH_SECONDS:.0f} s")
        self.run = None

    def _send(self, values: dict[str, float]) -> None:
        if self.run is not None and not self.failed:
            self._try("log", lambda: self.run.log(values))

    def _try(self, what: str, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # its client raises what it likes
            self._warn(f"{what}: {type(error).__name__}: {error}")

    def _warn(self, words: str) -> None:
        if not self.failed:
            self.failed = True
            warn(f"Weights & Biases: {words}; training goes on without it")
