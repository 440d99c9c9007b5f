"""Run by Megatron-Bridge's own interpreter: load a folder of Hugging Face's form by its AutoBridge,
save the logits of some tokens, and its own checkpoint of what it loaded.

    python bridge_logits.py HUGGING_FACE TOKENS.pt LOGITS.pt CHECKPOINT
"""

import os
import sys

import torch
from megatron.bridge import AutoBridge
from megatron.core import parallel_state, tensor_parallel


def main() -> None:
    folder, tokens, logits, checkpoint = sys.argv[1:]
    port = os.environ["MASTER_PORT"]
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    bridge = AutoBridge.from_hf_pretrained(folder)
    provider = bridge.to_megatron_provider(load_weights=False)
    provider.params_dtype = torch.float32
    provider.bf16 = False
    provider.gradient_accumulation_fusion = False
    provider.masked_softmax_fusion = False
    provider.persist_layer_norm = False
    provider.bias_dropout_fusion = False
    provider.apply_rope_fusion = False
    provider.finalize()
    model = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, bf16=False
    )
    bridge.load_hf_weights(model)
    tokens_BS = torch.load(tokens)
    length = tokens_BS.shape[1]
    positions_BS = torch.arange(length).expand(len(tokens_BS), -1)
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    model[0].eval()
    with torch.no_grad():
        torch.save(model[0](tokens_BS, positions_BS, mask), logits)
    bridge.save_megatron_model(model, checkpoint)


if __name__ == "__main__":
    main()
