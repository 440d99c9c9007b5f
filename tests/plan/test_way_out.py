"""Where no layout can be: the nearest numbers for which there is one."""

from __future__ import annotations

from tests.plan.example import BIG, gpu, job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.schema import Job
from trainkit.plan.search import Search, Searcher

VOCAB = 1024


def a_job(nodes: int, batch: int = 8, **cluster: object) -> Job:
    model = shape("llama", 4, 256, 4, 128, vocab_size=VOCAB)
    return job_of(
        model,
        8,
        nodes=nodes,
        device=BIG,
        precision="bf16",
        engine="megatron-lm",
        global_batch_size=batch,
        cluster={"launcher": "slurm", **cluster},
    )


def search(job: Job) -> Search:
    return Searcher(job, ENGINES[job.engine].rules, VOCAB).search([job.nodes])


def test_the_nearest_numbers_have_layouts() -> None:
    """8 samples on 5 nodes of 8: four tensor-parallel ranks and four stages leave no whole
    data-parallel ranks that divide them."""
    found = search(a_job(5))
    assert not found.ranked and found.refused["batch-not-divisible"]
    nodes = [change["nodes"] for change in found.ways_out if "nodes" in change]
    assert nodes == [4, 8]
    assert all(search(a_job(int(number))).ranked for number in nodes)
    for between in (6, 7):
        assert not search(a_job(between)).ranked
    (batch,) = (
        change["training.global_batch_size"] for change in found.ways_out if "nodes" not in change
    )
    assert batch == 10 and search(a_job(5, 10)).ranked


def test_no_more_nodes_than_there_are() -> None:
    found = search(a_job(5, max_nodes=7))
    assert [change.get("nodes") for change in found.ways_out] == [4, None]
    beyond = search(a_job(8, max_nodes=4))
    assert beyond.refused["too-many-nodes"] and {"nodes": 4} in beyond.ways_out


def test_nothing_is_proposed_where_numbers_do_not_help() -> None:
    """Memory is another matter: plan itself says what would make a layout fit."""
    small = a_job(1)
    device = small.model_copy(
        update={"cluster": small.cluster.model_copy(update={"device": gpu(1000)})}
    )
    found = search(device)
    assert found.refused["memory"] and not found.ranked and found.ways_out == ()
    assert search(a_job(4)).ways_out == ()
