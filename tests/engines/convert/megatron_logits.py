"""Run by Megatron-LM's own interpreter, one process a rank: load a checkpoint with its own loader
and save the logits of some tokens.

    python megatron_logits.py TOKENS.json LOGITS.pt [options of pretrain_gpt.py]
"""

import importlib
import json
import pathlib
import sys
from functools import partial
from typing import Any


def provider() -> Any:
    """What builds the model: it has moved between versions."""
    try:
        builders = importlib.import_module("gpt_builders")
        models = importlib.import_module("model_provider")
    except ImportError:
        return importlib.import_module("pretrain_gpt").model_provider
    return partial(models.model_provider, builders.gpt_builder)


def main() -> None:
    tokens_path, logits_path = sys.argv[1:3]
    del sys.argv[1:3]
    import torch

    initialize = importlib.import_module("megatron.training.initialize").initialize_megatron
    training = importlib.import_module("megatron.training.training")
    checkpointing = importlib.import_module("megatron.training.checkpointing")
    enums = importlib.import_module("megatron.core.enums")
    parallel = importlib.import_module("megatron.core.parallel_state")
    schedules = importlib.import_module("megatron.core.pipeline_parallel")
    router = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    # some versions ask for it, and import it with Transformer Engine alone
    vars(router).setdefault("te_general_gemm", None)
    build = provider()
    arguments = importlib.import_module("megatron.training.arguments")
    if hasattr(arguments, "parse_and_validate_args"):  # since 0.18 the script parses
        arguments.parse_and_validate_args()
    initialize()
    model = training.get_model(build, enums.ModelType.encoder_or_decoder, wrap_with_ddp=False)
    checkpointing.load_checkpoint(model, None, None)
    for part in model:
        part.eval()
    tokens = torch.tensor(json.loads(pathlib.Path(tokens_path).read_text()))
    batch, length = tokens.shape
    positions = torch.arange(length).expand(batch, length).contiguous()
    masked = torch.ones(1, 1, length, length).triu(1).bool()

    def forward(_: Any, module: Any) -> Any:
        return module(tokens, positions, masked), lambda found, **more: found

    with torch.no_grad():
        found = schedules.get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None] * len(model),
            model=model,
            num_microbatches=1,
            seq_length=length,
            micro_batch_size=batch,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if parallel.is_pipeline_last_stage():
        group = parallel.get_tensor_model_parallel_group()
        parts = [torch.empty_like(found[0]) for _ in range(group.size())]
        torch.distributed.all_gather(parts, found[0].contiguous(), group=group)
        if group.rank() == 0 and parallel.get_expert_model_parallel_rank() == 0:
            torch.save(torch.cat(parts, dim=-1), logits_path)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
