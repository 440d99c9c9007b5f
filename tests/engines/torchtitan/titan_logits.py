"""Run by torchtitan's own interpreter: load a folder of Hugging Face's form by its own adapter,
save the logits of some tokens, and its own checkpoint of what it loaded.

    python titan_logits.py SHAPE.json HUGGING_FACE TOKENS.pt LOGITS.pt CHECKPOINT
"""

import json
import pathlib
import sys

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_saver import save
from torch.nn.attention.flex_attention import create_block_mask

from trainkit.engines.torchtitan.inside.config import model_spec


def main() -> None:
    shape, folder, tokens, logits, checkpoint = map(pathlib.Path, sys.argv[1:])
    spec = model_spec(json.loads(shape.read_text()))
    model = spec.model.build()
    adapter = spec.state_dict_adapter(spec.model, str(folder))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    model.load_state_dict(adapter.from_hf(tensors), strict=True)
    tokens_BS = torch.load(tokens)
    size = tokens_BS.shape[1]
    masks = create_block_mask(
        lambda _b, _h, query, key: query >= key, len(tokens_BS), None, size, size, device="cpu"
    )
    positions_BS = torch.arange(size).expand(len(tokens_BS), -1)
    with torch.no_grad():
        torch.save(model(tokens_BS, positions_BS, masks), logits)
    save(dict(model.state_dict()), checkpoint_id=checkpoint, no_dist=True)


if __name__ == "__main__":
    main()
