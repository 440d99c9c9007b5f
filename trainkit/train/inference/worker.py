"""The program of one of several ranks that a trained model is split over, to write or to be
measured: python -m trainkit.train.inference.worker SPEC.json.

Each rank is a unit (see base.unit) with torch's variables; all of them find the same, rank 0's
result is taken.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Any

from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.jobs.schema import Dataset, Job


def work(spec: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Do the task as this rank; {"generations": [...]} or the fields of an Evaluation."""
    from trainkit.jobs.ranks import ParallelDegrees
    from trainkit.runs.checkpoints import open_checkpoint
    from trainkit.train.parallel.data_parallel import World, join
    from trainkit.train.parallel.mesh import Mesh

    world = World.from_environment()
    device = join(world, spec["device_type"])
    group = Mesh.of(ParallelDegrees(tensor=world.size), world, device).tensor
    job = Job.model_validate(spec["job"])
    saved = open_checkpoint(Path(spec["checkpoint"]))
    if spec["task"] == "generate":
        from trainkit.train.inference.generate import generations
        from trainkit.train.inference.sampling import Sampling

        found = generations(
            job,
            saved,
            device,
            spec["prompts"],
            Sampling(**spec["sampling"]),
            max_new_tokens=spec["max_new_tokens"],
            group=group,
        )
        return {"generations": [dataclasses.asdict(generation) for generation in found]}
    from trainkit.train.inference.evaluate import EvaluationFeed, evaluate
    from trainkit.train.inference.load import PRECISIONS, load_model, load_own_tokenizer, vocabulary

    windows = EvaluationFeed(
        job, Dataset.model_validate(spec["dataset"]), spec["split"], vocabulary(saved), device
    )
    model = load_model(job, saved, device, PRECISIONS[job.training.precision], group)
    measured = evaluate(
        model, windows, *load_own_tokenizer(job), samples=spec["samples"], progress=progress
    )
    return dataclasses.asdict(measured)


if __name__ == "__main__":
    run_unit(work)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a finalizing interpreter
