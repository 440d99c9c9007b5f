"""Run by GPT-NeoX's own interpreter, one process a rank: load a checkpoint with its own loader and
save the logits of some tokens.

    python neox_logits.py TOKENS.json LOGITS.pt CONFIG.yml
"""

import importlib
import json
import pathlib
import sys


def main() -> None:
    tokens_path, logits_path, config_path = sys.argv[1:]
    import torch

    arguments = importlib.import_module("megatron.neox_arguments").NeoXArgs
    utils = importlib.import_module("megatron.utils")
    generation = importlib.import_module("megatron.text_generation_utils")
    mpu = importlib.import_module("megatron.mpu")
    words = [str(word) for word in arguments.from_ymls([config_path]).get_deepspeed_main_args()]
    model, neox = utils.setup_for_inference_or_eval(
        use_cache=False, input_args=words[words.index("--deepspeed_config") :]
    )
    tokens = torch.tensor(json.loads(pathlib.Path(tokens_path).read_text()))
    inputs = generation.get_batch(neox, tokens)
    tokens, mask, positions = inputs
    model.eval()
    with torch.no_grad():
        if neox.is_pipe_parallel:
            # its own cross entropy makes probabilities of the logits, in place
            model.module.loss_fn = lambda logits, labels: logits.mean()
            found = generation.forward_model(model, (tokens, positions, mask), True)
        else:
            model.module.set_batch_fn(None)
            found = model.module((tokens, positions, mask))
    if found is not None:
        group = mpu.get_model_parallel_group()
        if found.shape[-1] < neox.padded_vocab_size:
            parts = [torch.empty_like(found) for _ in range(group.size())]
            torch.distributed.all_gather(parts, found.contiguous(), group=group)
            found = torch.cat(parts, dim=-1)
        if mpu.get_model_parallel_rank() == 0:
            torch.save(found.float(), logits_path)
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
