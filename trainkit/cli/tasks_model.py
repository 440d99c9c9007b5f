"""The tasks over what runs leave: checkpoints, text, losses, weights for other programs."""

from __future__ import annotations

from trainkit.cli.help_texts import DEVICE, RUN, STEP, TENSOR
from trainkit.cli.wrapper import TaskContext, TaskResult, make_task


@make_task(
    positional=["run"],
    iterable=["prompt"],
    help={
        **RUN,
        "prompt": "text to go on from; may be repeated; without any, the model begins a document",
        "prompts-file": 'more prompts, one a line: a JSON string, or an object {"prompt": "..."}',
        "max-new-tokens": "tokens to add",
        "temperature": "0: always the likeliest token",
        "top-k": "sample among so many likeliest tokens; 0: all",
        "top-p": "sample among the fewest likeliest tokens with this probability together; 1: all",
        "seed": "of the sampling; every prompt begins with it anew",
        **STEP,
        **DEVICE,
        **TENSOR,
    },
    takes_json=True,
    minimum={
        "max_new_tokens": 1,
        "temperature": 0,
        "top_k": 0,
        "top_p": 0,
        "seed": 0,
        "step": 0,
        "tensor_parallel": 1,
    },
)
def generate(
    task: TaskContext,
    run: str,
    prompt: list[str] | None = None,
    prompts_file: str = "",
    max_new_tokens: int = 64,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
    step: int | None = None,
    device: str = "",
    tensor_parallel: int = 1,
) -> TaskResult:
    """Let a trained model write. It sees the last tokens that its positions have room for."""
    from trainkit.cli.model import inference as after

    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    return after.generate(
        task,
        run,
        prompt or [],
        prompts_file,
        sampling,
        max_new_tokens=max_new_tokens,
        step=step,
        device=device,
        tensor_parallel=tensor_parallel,
    )


@make_task(
    positional=["run"],
    help={
        **RUN,
        "dataset": "a dataset of jobs.toml that has the run's tokenizer; by default the run's own",
        "split": "train, valid or test",
        "samples": "the first so many samples of seq_length tokens; 0: all",
        **STEP,
        **DEVICE,
        **TENSOR,
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"samples": 0, "step": 0, "tensor_parallel": 1},
)
def evaluate(
    task: TaskContext,
    run: str,
    dataset: str = "",
    split: str = "valid",
    samples: int = 0,
    step: int | None = None,
    device: str = "",
    tensor_parallel: int = 1,
) -> TaskResult:
    """Measure a trained model's loss, perplexity and bits per byte on a dataset."""
    from trainkit.cli.model import inference as after

    return after.evaluate(task, run, dataset, split, samples, step, device, tensor_parallel)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "format": (
            "hf: safetensors, config and tokenizer, as transformers' from_pretrained loads them"
        ),
        "to": "the folder to write; it must not be there yet",
        "dtype": "of the weights: fp32, bf16 or fp16",
        "shard-gb": "tensors of one file at most, in GB",
        **STEP,
    },
    takes_json=True,
    minimum={"step": 0, "shard_gb": 1e-6},
)
def export(
    task: TaskContext,
    run: str,
    format: str = "hf",
    to: str = "",
    step: int | None = None,
    dtype: str = "fp32",
    shard_gb: float = 5.0,
) -> TaskResult:
    """Write a run's weights for other programs."""
    from trainkit.cli.model import export as exporter

    return exporter.export(task, run, format, to, step, dtype, shard_gb)


@make_task(
    positional=["run"],
    help={
        **RUN,
        "verify": "read every file and compare its hash",
        "pin": "keep the checkpoint of this step for ever",
        "unpin": "let the checkpoint of this step go when its time comes",
    },
    takes_json=True,
    minimum={"pin": 0, "unpin": 0},
)
def checkpoints(
    task: TaskContext,
    run: str,
    verify: bool = False,
    pin: int | None = None,
    unpin: int | None = None,
) -> TaskResult:
    """List a run's checkpoints: size, layout, whether they are whole and why they are kept; exit
    16 when none is whole."""
    from trainkit.cli.inspect import checkpoints as keeper

    return keeper.checkpoints(task, run, hashes=verify, pinned=pin, unpinned=unpin)


@make_task(
    help={
        "run": "only this run",
        "keep": (
            "so many of a run's newest checkpoints stay, with those that its job keeps for another"
            " reason"
        ),
        "damaged": "those that were set aside as damaged go too",
        "perform": "delete; else it is only said what would go",
    },
    takes_json=True,
    takes_dry_run=True,
    minimum={"keep": 1},
)
def clean(
    task: TaskContext, run: str = "", keep: int = 1, damaged: bool = False, perform: bool = False
) -> TaskResult:
    """Say which checkpoints of ended runs are not needed to go on with them, and their size, or
    delete them."""
    from trainkit.cli.inspect import clean as cleaner

    return cleaner.clean(task, run, keep, damaged=damaged, performing=perform)


@make_task(
    positional=["run"],
    help={**RUN, "step": "the step", "samples": "how many to show; 0: all"},
    takes_json=True,
    minimum={"step": 1, "samples": 0},
)
def replay(task: TaskContext, run: str, step: int = 1, samples: int = 4) -> TaskResult:
    """Rebuild the batch of a step from the order of samples, and show it as text."""
    from trainkit.cli.inspect import checkpoints as keeper

    return keeper.replay(task, run, step, samples)
