"""The published command lines of Megatron-LM, word by word, for test_argv.py beside this file.

azure: ai-infrastructure-on-azure at 2ada947, GPT3-175B/slurm/04-gpt175B.sh, with 72 prepared files
and CHUNKS 15. jean-zay: bigscience at 8b25137, experiments/gpt2.md. Upper-case words in braces are
what each site fills in.
"""

from __future__ import annotations

AZURE_COMMON = """
--attention-backend auto --micro-batch-size 1 --global-batch-size 512 --train-iters 1500
--weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006 --clip-grad 1.0
--fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-fraction .001
--lr-decay-iters 430000 --sequence-parallel --use-distributed-optimizer
--data-cache-path {CACHE} --vocab-file {VOCAB} --merge-file {MERGE}
--log-interval 10 --save-interval 100 --eval-interval 100 --save {CKPT} --load {CKPT}
--eval-iters 10 --tensorboard-dir {TENSORBOARD} --ckpt-format torch_dist
--ckpt-fully-parallel-load --use-persistent-ckpt-worker --ckpt-assume-constant-structure
"""
AZURE = {
    "azure-gpt3-175b": """
--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
--max-position-embeddings 2048 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 16
""",
    "azure-gpt3-check": """
--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024
--max-position-embeddings 2048 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
""",
    "azure-gpt3-857m": """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 2048
--max-position-embeddings 2048 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1
""",
}
AZURE_ENVIRONMENT = {
    "NCCL_TOPO_FILE": "/opt/microsoft/ndv5-topo.xml",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    # torchrun sets it for its ranks where the caller did not
    "OMP_NUM_THREADS": "1",
}

JEAN_ZAY_COMMON = """
--tensor-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 4 --lr 0.00015
--lr-decay-style cosine --min-lr 1.0e-5 --train-iters 1000 --lr-decay-iters 800
--lr-warmup-fraction .01 --weight-decay 1e-2 --clip-grad 1.0 --fp16 --checkpoint-activations
--log-interval 10 --save-interval 500 --eval-interval 100 --eval-iters 10 --data-impl mmap
--split 949,50,1 --distributed-backend nccl --vocab-file {VOCAB} --merge-file {MERGE}
--data-path {DATA} --save {CKPT} --load {CKPT}
"""
JEAN_ZAY = {
    "jean-zay-7-5b": """
--num-layers 36 --hidden-size 4096 --num-attention-heads 32 --seq-length 512
--max-position-embeddings 512 --pipeline-model-parallel-size 4
""",
    "jean-zay-30b": """
--num-layers 48 --hidden-size 7168 --num-attention-heads 32 --seq-length 1024
--max-position-embeddings 1024 --pipeline-model-parallel-size 16
""",
    # as published but for the stages, of which it has 32 (trap 1)
    "jean-zay-76b-pp30": """
--num-layers 60 --hidden-size 10240 --num-attention-heads 32 --seq-length 1024
--max-position-embeddings 1024 --pipeline-model-parallel-size 30
""",
}
# torch.distributed.launch sets it where the caller did not
JEAN_ZAY_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

Options = dict[str, tuple[object, ...]]


def number_or_word(word: str) -> object:
    """6.0e-5 and 6e-05 are the same number."""
    try:
        return float(word)
    except ValueError:
        return word


def options_of(words: list[str] | tuple[str, ...]) -> Options:
    """A command line as its options, in no order. An option that comes twice is refused."""
    found: Options = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word
            assert name not in found, f"{name} comes twice"
            found[name] = ()
        else:
            found[name] = (*found[name], number_or_word(word))
    return found


def published(text: str, **places: str) -> Options:
    """The options of a published text."""
    return options_of(text.format(**places).split())
