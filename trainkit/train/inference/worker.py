"""The program of one of several ranks that a trained model is split over, to write or to be
measured: python -m trainkit.train.inference.worker SPEC.json.

Each rank is a unit (see base.worker) with torch's variables; all of them find the same, rank 0's
result is taken.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

from trainkit.base.records import FieldError
from trainkit.base.worker import ProgressCallback, run_unit
from trainkit.train.inference.ranks import WorkerSpec


def work(spec: Mapping[str, Any], on_progress: ProgressCallback) -> dict[str, object]:
    """Do the task as this rank; {"generations": [...]} or the fields of an Evaluation."""
    from trainkit.jobs.ranks import ParallelDegrees
    from trainkit.runs.checkpoints import open_checkpoint
    from trainkit.train.inference.load import with_weights
    from trainkit.train.parallel.data_parallel import World, join
    from trainkit.train.parallel.mesh import Mesh

    task = WorkerSpec.from_json(spec)
    world = World.from_environment()
    device = join(world, task.device_type)
    group = Mesh.of(ParallelDegrees(tensor=world.size), world, device).tensor
    saved = with_weights(open_checkpoint(task.checkpoint), task.weights)
    if (generate := task.generate) is not None:
        from trainkit.train.decoding.sampling import Sampling
        from trainkit.train.inference.generate import generations

        found = generations(
            task.job,
            saved,
            device,
            generate.prompts,
            Sampling(**generate.sampling),  # type: ignore[arg-type]  # JSON keeps int and float
            max_new_tokens=generate.max_new_tokens,
            group=group,
        )
        return {"generations": [dataclasses.asdict(generation) for generation in found]}
    from trainkit.train.inference.evaluate import EvaluationFeed, evaluate
    from trainkit.train.inference.load import PRECISIONS, load_model, load_own_tokenizer, vocabulary

    request = task.evaluate
    if request is None:
        raise FieldError("WorkerSpec: neither generate nor evaluate is there")
    windows = EvaluationFeed(task.job, request.dataset, request.split, vocabulary(saved), device)
    model = load_model(task.job, saved, device, PRECISIONS[task.job.training.precision], group)
    tokenizer, end = load_own_tokenizer(task.job)
    measured = evaluate(
        model, windows, tokenizer, end, samples=request.samples, progress=on_progress
    )
    return dataclasses.asdict(measured)


if __name__ == "__main__":
    run_unit(work)
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may abort a finalizing interpreter
