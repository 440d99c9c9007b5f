"""trainkit: language-model pretraining from raw text to a trained model, from one jobs.toml."""

from __future__ import annotations

__version__ = "0.1.0"

# The Python API (typed in __init__.pyi), imported when it is first used: `import trainkit` costs
# nothing. No name may be that of a package here (`plan`, `runs`), which would hide the function.
_API = {
    "ResumeOptions": "trainkit.experiment.options",
    "Run": "trainkit.experiment.api",
    "TrainOptions": "trainkit.experiment.options",
    "find_run": "trainkit.experiment.api",
    "load": "trainkit.experiment.api",
    "plan_job": "trainkit.experiment.api",
    "prepare": "trainkit.experiment.api",
    "run": "trainkit.experiment.api",
    "all_runs": "trainkit.experiment.api",
}


def __getattr__(name: str) -> object:
    """A name of the Python API."""
    if name not in _API:
        raise AttributeError(f"module 'trainkit' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_API[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_API})
