"""Which tensors of Hugging Face ours are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from tests.train.hf_support import CASES, VOCAB
from trainkit.families import FAMILIES
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import PublishedTensor, published, table
from trainkit.train.model.transformer import build_on_meta
from trainkit.train.parallel.shards import saved_tensors


@pytest.mark.parametrize("case", CASES)
def test_the_table_is_the_models_parameters(case: str) -> None:
    model = CASES[case][0]
    assert {name: entry.shape for name, entry in table(model, VOCAB).items()} == {
        n: tuple(p.shape) for n, p in saved_tensors(build_on_meta(model, VOCAB)).items()
    }


@st.composite
def models(draw: st.DrawFn) -> Model:
    """Shapes of every family."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    groups, per_group, size = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        2 * draw(st.integers(1, 4)),
    )
    heads = groups * per_group
    words: dict[str, Any] = (
        {"gpt_j_tied": draw(st.booleans())}
        if family == "gpt-neox"
        else {"num_query_groups": groups}
        if family != "gpt"
        else {}
    )
    if FAMILIES[family].sliding_window_pattern:
        words["sliding_window"] = 1
    if family == "gpt-neox":
        words["rotary_percent"] = 1.0
    words["num_layers"] = draw(st.integers(1, 3))
    if "mla" in FAMILIES[family].settings:
        del words["num_query_groups"]
        words["mla"] = {
            "q_lora_rank": draw(st.sampled_from([None, 3])),
            "kv_lora_rank": draw(st.integers(1, 5)),
            "qk_head_dim": draw(st.integers(3, 5)),
            "qk_pos_emb_head_dim": 2,
            "v_head_dim": draw(st.integers(1, 5)),
        }
    if FAMILIES[family].routing is not None:
        words["moe"] = {
            "num_experts": draw(st.integers(2, 5)),
            "router_topk": 2,
            "ffn_hidden_size": draw(st.integers(1, 9)),
            "first_dense_layers": draw(st.integers(0, words["num_layers"] - 1)),
            "shared_expert_intermediate_size": draw(st.sampled_from([None, 3])),
        }
    untied = draw(st.booleans())
    words |= {
        "hidden_size": heads * size,
        "num_attention_heads": heads,
        "ffn_hidden_size": draw(st.integers(1, 9)),
    }
    return Model.model_validate(
        {
            "family": family,
            "seq_length": draw(st.integers(1, 9)),
            "untie_embeddings_and_output_weights": untied,
            **words,
        }
    )


def tensor_rows(tensor: PublishedTensor) -> int:
    """Rows that ours are made of, of one expert where it has all."""
    shape = tensor.shape if tensor.pieces[0].expert is None else tensor.shape[1:]
    return shape[-1] if tensor.pieces[0].transposed else shape[0]


@given(models(), st.integers(2, 9))
def test_every_element_has_one_place(model: Model, vocab_size: int) -> None:
    """Rows of ours are covered once, rows of theirs are covered once, and nothing but copies of
    one norm is there twice."""
    entries = table(model, vocab_size)
    tensors = published(entries)
    for entry in entries.values():
        rows = [
            row for piece in entry.pieces for row in range(piece.start, piece.start + piece.rows)
        ]
        assert sorted(rows) == list(range(entry.shape[0]))
    for tensor in tensors.values():
        places = [
            (piece.expert or 0, row)
            for piece in tensor.pieces
            for row in range(tensor_rows(tensor))[piece.part(piece.start, piece.start + piece.rows)]
        ]
        experts = {expert for expert, _ in places}
        assert sorted(places) == [
            (expert, row) for expert in sorted(experts) for row in range(tensor_rows(tensor))
        ]
    copies = {name for entry in entries.values() for name in entry.again}
    count = sum(torch.Size(t.shape).numel() for name, t in tensors.items() if name not in copies)
    assert count == sum(p.numel() for p in saved_tensors(build_on_meta(model, vocab_size)).values())
    assert bool(copies) == model.gpt_j_tied
