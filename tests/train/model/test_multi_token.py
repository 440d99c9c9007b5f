"""What predicts one token more: borders of documents, what evaluation and generation do without
it, its loss in a run, the keys that ask for it. Its gradients in layouts: test_layout_matrix.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tests.distributed import finish
from tests.train.plain_loop import MODELS, VOCAB, job_of
from tests.train.support import new_run, start_ranks
from trainkit.jobs.schema import Model
from trainkit.ops.cross_entropy import NO_LABEL
from trainkit.plan.planner import make_plan
from trainkit.runs.metrics import read_rows
from trainkit.train.decoding.continuation import DecodingState
from trainkit.train.model.attention import DocumentBounds
from trainkit.train.model.head_loss import Labels, Losses
from trainkit.train.model.transformer import Transformer

HANGS = 600  # seconds; only against hanging
LENGTHS = (5, 1, 7, 3)  # of documents, which fill a sample
MODEL = MODELS["deepseek-mtp"]
# losses of balance are of a micro-batch: they would see what is packed with what
ALONE = MODEL.model_copy(
    update={"moe": MODEL.moe and MODEL.moe.model_copy(update={"aux_loss_coeff": 0.0})}
)


def built(model: Model = ALONE) -> Transformer:
    torch.manual_seed(0)
    module = Transformer(model, VOCAB).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def labelled(ids_BS: Tensor) -> tuple[Tensor, Labels]:
    """Tokens and labels; the last token of a document has none."""
    labels_BS = torch.cat([ids_BS[:, 1:], torch.full_like(ids_BS[:, :1], NO_LABEL)], 1)
    return ids_BS, Labels(labels_BS)


def learned(module: Transformer, *words: Any, **more: Any) -> Losses:
    losses = module(*words, **more)
    assert isinstance(losses, Losses)
    losses.objective.backward()  # type: ignore[no-untyped-call]
    return losses


def counted(module: Transformer) -> list[float]:
    assert module.mtp is not None
    sums = module.mtp.take()
    assert sums is not None
    found: list[float] = sums.tolist()
    return found


def test_documents_that_are_packed_are_as_they_are_alone() -> None:
    """Gradients of a sample of several documents are the sum of theirs."""
    texts = [torch.randint(VOCAB, (1, length)) for length in LENGTHS]
    apart, packed = built(), built()
    for text in texts:
        learned(apart, *labelled(text))
    tokens_BS = torch.cat(texts, 1)
    labels_BS = torch.cat([labelled(text)[1].labels_BS for text in texts], 1)
    positions_BS = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    documents = DocumentBounds(tuple(starts), torch.tensor(starts, dtype=torch.int32), max(LENGTHS))
    found = counted(apart)
    assert found[1] == sum(max(0, length - 2) for length in LENGTHS)
    learned(packed, tokens_BS, Labels(labels_BS), positions_BS=positions_BS, documents=documents)
    assert counted(packed) == pytest.approx(found, rel=1e-12)
    for (name, one), other in zip(packed.named_parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-9, atol=1e-11, msg=name)
    # one of both says it, too
    learned(packed, tokens_BS, Labels(labels_BS), documents=documents)
    assert counted(packed)[1] == found[1]
    learned(packed, tokens_BS, Labels(labels_BS), positions_BS=positions_BS)
    assert counted(packed)[1] == found[1]


def test_the_factor_is_a_multiple_of_the_gradient() -> None:
    """And of that alone: what is reported is not multiplied. Megatron-LM's default is 0.1."""
    ids = labelled(torch.randint(VOCAB, (2, 16)))
    gradients, sums = [], []
    for factor in (None, 0.1, 0.3):
        module = built(ALONE.model_copy(update={"mtp_loss_scaling_factor": factor}))
        learned(module, *ids)
        sums.append(counted(module))
        assert module.mtp is not None and module.mtp.eh_proj.weight.grad is not None
        gradients.append(module.mtp.eh_proj.weight.grad)
    assert sums[0] == sums[1] == sums[2]
    assert torch.equal(gradients[0], gradients[1])
    torch.testing.assert_close(gradients[2], 3 * gradients[1], rtol=1e-9, atol=1e-15)


def test_evaluation_and_generation_go_without_it() -> None:
    """The same numbers as of a model that has none."""
    module = built().eval()
    without = Transformer(ALONE.model_copy(update={"mtp_num_layers": None}), VOCAB).double()
    own = without.state_dict()
    assert {name.split(".")[0] for name in module.state_dict().keys() - own.keys()} == {
        "mtp",
        "layers",
    }
    without.load_state_dict({name: t for name, t in module.state_dict().items() if name in own})
    ids = labelled(torch.randint(VOCAB, (2, 16)))
    with torch.no_grad():
        assert module(*ids) == without.eval()(*ids)
    assert module.mtp is not None and module.mtp.take() is None
    texts = [DecodingState(each, capacity=16) for each in (module, without)]
    assert len(texts[0].caches) == ALONE.num_layers
    one, other = (text.read([3, 1, 4]) for text in texts)
    assert torch.equal(one, other)


def test_a_run_reports_its_loss_beside_the_other(tmp_path: Path) -> None:
    job = job_of("deepseek-mtp", 1, tmp_path, {}, train_iters=2, global_batch_size=2, eval_iters=1)
    run = new_run(job)
    assert finish(start_ranks(run, 1), HANGS) == [0]
    rows = read_rows(run.metrics)
    assert [("mtp_loss" in row, "eval" in row) for row in rows].count((True, True)) == 0
    steps = [row for row in rows if "eval" not in row]
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:  # of random tokens, by weights that know nothing
        assert row["mtp_loss"] != row["lm_loss"]
        assert row["mtp_loss"] == pytest.approx(row["lm_loss"], rel=0.2)
        assert row["experts"]["layer"] in range(1, 5)  # the last is its own


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("llama", {"mtp_num_layers": 1}, "mtp_num_layers is for family deepseek-v3, not 'llama'"),
        ("llama", {"mtp_loss_scaling_factor": 0.3}, "is for family deepseek-v3, not 'llama'"),
        ("deepseek-v3", {"mtp_num_layers": 2}, "less than or equal to 1"),
        ("deepseek-v3", {"mtp_num_layers": 0}, "greater than or equal to 1"),
        ("deepseek-v3", {"mtp_loss_scaling_factor": 0.3}, "without mtp_num_layers"),
        (
            "deepseek-v3",
            {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.0},
            "greater than 0",
        ),
    ],
)
def test_refused_keys(family: str, keys: dict[str, Any], words: str) -> None:
    left_out = {"name", "mtp_num_layers", "mtp_loss_scaling_factor"}
    left_out |= {"mla", "moe", "rope_scaling"} if family == "llama" else set()
    given = MODEL.model_dump(exclude_none=True, exclude=left_out) | {"family": family}
    with pytest.raises(ValidationError, match=words):
        Model.model_validate({**given, **keys})


def test_a_sample_on_several_ranks_is_refused(tmp_path: Path) -> None:
    job = job_of("deepseek-mtp", 2, tmp_path, {"context_parallel_size": 2})
    (found,) = (o for o in make_plan(job).objections if o.code == "mtp-in-context")
    assert "may lie on another rank" in found.message
