"""The time model's answer as the plan takes it: tokens a second, between which bounds, and why."""

from __future__ import annotations

from trainkit.jobs.schema import Job
from trainkit.plan.duration import Speed
from trainkit.plan.time.of_job import StepEstimate


def predicted_speed(job: Job, estimate: StepEstimate, model_flops: int) -> Speed:
    """Speed by the time model; MFU is of the model's FLOPs.

    Args:
        job: the job.
        estimate: of one step.
        model_flops: of a token.
    """
    work = job.global_batch_size * job.model.seq_length
    tokens = work / estimate.time.seconds
    slowest, fastest = (work / seconds for seconds in reversed(estimate.interval))
    peak = job.cluster.device.peak_tflops.get(job.training.precision)
    source = f"predicted, between {slowest:,.0f} and {fastest:,.0f}; --explain time says how"
    if estimate.assumed:
        source += f". Assumed: {', '.join(estimate.assumed)}"
    if estimate.not_fitted:
        source += f". Not fitted: {estimate.not_fitted}"
    return Speed(
        tokens_per_second=tokens,
        mfu=tokens * model_flops / (job.world_size * peak * 1e12) if peak else None,
        source=source,
        interval=(slowest, fastest),
        step_terms=dict(estimate.time.terms),
        not_fitted=estimate.not_fitted,
    )
