"""Where the files of a dataset lie that a task names."""

from __future__ import annotations

from trainkit.base.errors import ConfigError
from trainkit.cli.config.jobs import load_jobs
from trainkit.cli.wrapper import TaskContext
from trainkit.data.indexed.paths import DataFolder
from trainkit.jobs.schema import Dataset


def dataset_folders(task: TaskContext, name: str, job: str) -> list[tuple[Dataset, DataFolder]]:
    """The dataset and its folder; for a blend, those of its parts. Raises ConfigError (exit 3)
    for random tokens."""
    jobs = load_jobs(task)
    dataset = jobs.dataset(name)
    if dataset.source == "mock":
        raise ConfigError(f"dataset '{name}' is random tokens: it has no files")
    root = jobs.resolve(job).job.cluster.root_folder if job else jobs.root
    parts = {
        part.dataset.name: part.dataset
        for blend in (dataset.blend, dataset.valid_blend, dataset.test_blend)
        for part in blend.values()
    }
    return [
        (found, DataFolder(root, found))
        for found in (parts.values() if dataset.source == "blend" else [dataset])
    ]
