"""Which tensors of Hugging Face ours are made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.train.hf_support import CASES, VOCAB
from trainkit.families import FAMILIES
from trainkit.jobs.schema import Model
from trainkit.train.huggingface.names import published, table
from trainkit.train.model.transformer import build_on_meta


@pytest.mark.parametrize("case", CASES)
def test_the_table_is_the_models_parameters(case: str) -> None:
    model = CASES[case][0]
    assert {name: entry.shape for name, entry in table(model, VOCAB).items()} == {
        n: tuple(p.shape) for n, p in build_on_meta(model, VOCAB).named_parameters()
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
    if family in ("olmo3", "gemma3"):
        words["sliding_window"] = 1
    if family == "gpt-neox":
        words["rotary_percent"] = 1.0
    words["num_layers"] = draw(st.integers(1, 3))
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
        rows = [
            row
            for piece in tensor.pieces
            for row in range(piece.source_start, piece.source_start + piece.rows)
        ]
        assert sorted(rows) == list(
            range(tensor.shape[-1] if tensor.pieces[0].transposed else tensor.shape[0])
        )
    copies = {name for entry in entries.values() for name in entry.again}
    count = sum(torch.Size(t.shape).numel() for name, t in tensors.items() if name not in copies)
    assert count == sum(p.numel() for p in build_on_meta(model, vocab_size).parameters())
    assert bool(copies) == model.gpt_j_tied
