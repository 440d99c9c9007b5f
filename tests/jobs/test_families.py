"""What the families and the training options refuse, and what they derive."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from tests.jobs.jobs_toml import GOOD, Checkout, refused
from trainkit.jobs.schema import Model, Training

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"rotary_percent": 0.5}, "rotary_percent is for family gpt-neox, not 'gpt'"),
        ({"num_query_groups": 2}, "num_query_groups is for family llama"),
        ({"family": "llama", "gpt_j_tied": True}, "gpt_j_tied is for family gpt-neox"),
        ({"family": "llama", "gelu": "tanh"}, "gelu is for family gpt and gpt-neox"),
        (
            {"family": "llama", "num_query_groups": 3},
            "num_attention_heads 4 does not divide by num_query_groups 3",
        ),
        (
            {"family": "gpt-neox", "gpt_j_residual": False, "gpt_j_tied": True},
            "gpt_j_tied needs gpt_j_residual",
        ),
        ({"family": "gpt-neox", "rotary_percent": 0.2}, "3 of 16 channels would be rotated"),
        ({"family": "gpt-neox", "rotary_percent": 0.01}, "0 of 16 channels would be rotated"),
        ({"hidden_size": 66}, "hidden_size 66 does not divide by num_attention_heads 4"),
        ({"max_position_embeddings": 8}, "max_position_embeddings 8 is below seq_length 16"),
        (
            {
                "family": "llama",
                "rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0},
            },
            "high_freq_factor 4.0 is not above low_freq_factor 4.0",
        ),
    ],
)
def test_what_a_family_does_not_have(keys: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Model.model_validate({**SIZES, **keys})


def test_what_families_derive() -> None:
    gpt, neox, llama = (
        Model.model_validate({**SIZES, "family": family}) for family in ("gpt", "gpt-neox", "llama")
    )
    assert [m.untied for m in (gpt, neox, llama)] == [False, True, True]
    assert [m.parallel_residual for m in (gpt, neox, llama)] == [False, True, False]
    assert [m.rotary_channels for m in (gpt, neox, llama)] == [0, 4, 16]
    assert [m.ffn_width for m in (gpt, neox, llama)] == [256, 256, 128]
    odd = Model.model_validate(
        {
            **SIZES,
            "family": "llama",
            "kv_channels": 6,
            "num_attention_heads": 5,
            "num_query_groups": 1,
        }
    )
    assert (odd.head_size, odd.query_groups) == (6, 1)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"lr_decay_style": "WSD"}, "needs lr_wsd_decay_iters, up to 10"),
        ({"lr_decay_style": "WSD", "lr_wsd_decay_iters": 9, "lr_warmup_iters": 2}, "up to 8"),
        ({"lr_warmup_iters": 2, "lr_warmup_fraction": 0.1}, "both given"),
        ({"lr_warmup_init": 2.0}, "lr_warmup_init 2.0 is above lr 1.0"),
        ({"loss_scale": 8.0}, "loss_scale is for precision = 'fp16', not 'fp32'"),
        ({"recompute_every": 2}, "recompute_every is for recompute_granularity = 'full'"),
        ({"rampup_batch_size": [4, 4, 100]}, "needs global_batch_size"),
        ({"rampup_batch_size": [4, 3, 100], "global_batch_size": 16, "lr": 1}, None),
        (
            {"rampup_batch_size": [4, 5, 100], "global_batch_size": 16},
            "4 does not grow to global_batch_size 16 in steps of 5",
        ),
        ({"rampup_batch_size": [32, 4, 100], "global_batch_size": 16}, "32 does not grow"),
        (
            {"min_loss_scale": 8.0, "initial_loss_scale": 4.0, "precision": "fp16"},
            "min_loss_scale 8.0 is above initial_loss_scale 4.0",
        ),
    ],
)
def test_training_options_that_contradict_each_other(
    keys: dict[str, object], words: str | None
) -> None:
    values = {"train_iters": 10, "lr": 1.0, **keys}
    if words is None:
        Training.model_validate(values | {"lr": 1.0})
        return
    with pytest.raises(ValidationError, match=words):
        Training.model_validate(values)


VALIDATION = (
    GOOD
    + """
[datasets.other]
source = "files"
paths = ["x"]
tokenizer = "t"

[tokenizers.t]
type = "bpe"
vocab_size = 300
"""
)


def test_validation_sets(checkout: Checkout) -> None:
    job = (
        checkout(
            GOOD.replace('dataset = "mock"', 'dataset = "mock"\nvalidation = { second = "mock" }')
        )
        .resolve("demo", ["validation.second.split='1,1'"])
        .job
    )
    assert {name: (d.name, d.split) for name, d in job.validation.items()} == {
        "second": ("mock", "1,1")
    }
    for line, words in (
        (
            'validation = { second = "mack" }',
            "jobs.demo.validation.second = 'mack' names no [datasets.X] table",
        ),
        (
            'validation = { second = "other" }',
            "validation.second: tokenizer t, but dataset 'mock' has none",
        ),
        ('validation = { valid = "mock" }', "that name is taken by the job's own dataset"),
        (
            "validation = { second = 3 }",
            "expected the name of a [datasets.X] table, got the integer 3",
        ),
    ):
        found = refused(
            checkout(VALIDATION.replace('dataset = "mock"', f'dataset = "mock"\n{line}'))
        )
        assert len(found) == 1 and words in found[0], found
    (words,) = refused(checkout(), sets=["validation.x.split='1'"])
    assert "validation.x is not given" in words


def test_documents_one_by_one_are_not_compiled(checkout: Checkout) -> None:
    text = GOOD.replace("lr = 1e-3", "lr = 1e-3\ncompile = true\nreset_attention_mask = true")
    (words,) = refused(checkout(text))
    assert "training.compile with reset_attention_mask needs the variable-length kernel" in words
    kernel = ["cluster.device=cuda", "cluster.gpus_per_node=2", "training.precision=bf16"]
    checkout(text).resolve("demo", kernel)
    for channels in (20, 264):
        (words,) = refused(checkout(text), sets=[*kernel, f"model.kv_channels={channels}"])
        assert "heads of a multiple of 8 channels up to 256" in words
