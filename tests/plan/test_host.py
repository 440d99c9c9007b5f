"""Feasible means that it can run: main memory of nodes, one machine, a precision that the device
has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.plan.example import BIG, gpu, job_of, shape
from trainkit.engines.registry import ENGINES
from trainkit.jobs.devices import built_in_device
from trainkit.jobs.load import load
from trainkit.jobs.schema import Cluster, Job
from trainkit.launch.job_plan import machine_bytes
from trainkit.plan.host import RANK_BYTES, HostMemory, slurm_bytes
from trainkit.plan.measured import Measured
from trainkit.plan.objection import with_change
from trainkit.plan.planner import Plan, PreparedData, make_plan

GIB = 2**30
WIDE: dict[str, Any] = {
    "layers": 12,
    "hidden": 2048,
    "heads": 16,
    "length": 1024,
    "vocab_size": 32768,
}


def plan_of(job: Job, here: int | None = None) -> Plan:
    return make_plan(job, rules=ENGINES[job.engine].rules, prepared=PreparedData(host_bytes=here))


def host_of(job: Job, here: int | None = None) -> HostMemory:
    found = plan_of(job, here).host_memory
    assert found is not None
    return found


def codes(plan: Plan) -> list[str]:
    return [objection.code for objection in plan.objections]


def test_the_ranks_of_a_machine_together_need_more_than_it_has() -> None:
    job = job_of(shape(**WIDE), 2, micro_batch_size=2)
    memory = plan_of(job).memory
    assert memory is not None
    needed = 2 * memory.fullest.total_bytes
    # nobody says what there is
    assert host_of(job).needed_bytes == needed and plan_of(job).feasible is None
    assert [each.code for each in plan_of(job).not_known] == ["host-memory-unknown"]
    assert plan_of(job, needed).feasible
    one_too_few = plan_of(job, needed - 1)
    (objection,) = one_too_few.objections
    assert (
        objection.code == "host-memory"
        and "2 ranks together need" in objection.message
        and "this machine has" in objection.message
    )
    (change,) = objection.changes
    assert "nodes" not in change and plan_of(with_change(job, change), needed - 1).feasible
    document = one_too_few.to_json()["host_memory"]
    assert document == {
        "node": 0,
        "needed_bytes": needed,
        "available_bytes": needed - 1,
        "source": "this machine",
        "fits": False,
    }


def test_what_a_run_took_beyond_the_plan_decides_whether_it_fits() -> None:
    job = job_of(shape(**WIDE), 2, micro_batch_size=2)
    memory = plan_of(job).memory
    assert memory is not None
    planned = memory.fullest.total_bytes

    def after(part: float, room: int, *, same_layout: bool = True) -> Plan:
        run = Measured("r", same_layout, 500.0, round(part * planned), None, None, planned, None)
        return make_plan(job, prepared=PreparedData(host_bytes=room), measured=run)

    enough = 3 * planned + 8
    found = after(1.5, enough)
    assert found.feasible and found.memory and found.host_memory
    assert found.memory.fullest.total_bytes == pytest.approx(1.5 * planned)
    assert found.host_memory.needed_bytes == pytest.approx(3 * planned)
    assert codes(after(1.6, enough)) == ["host-memory"]
    # no less than is planned; and another layout says nothing of this one
    for less in (after(0.7, enough), after(1.6, enough, same_layout=False)):
        assert less.feasible and less.memory and less.memory.fullest.total_bytes == planned


def test_what_a_node_has_is_the_least_that_is_known() -> None:
    def there(here: int | None = None, **cluster: Any) -> tuple[int | None, str | None]:
        found = host_of(job_of(ranks=2, cluster=cluster), here)
        return found.available_bytes, found.source

    assert there() == (None, None)
    assert there(memory_bytes=10**12) == (10**12, "cluster c (memory_bytes)")
    slurm: dict[str, Any] = {"launcher": "slurm", "memory_bytes": 10**12}
    assert there(**slurm, slurm={"mem": "64G"}) == (64 * GIB, "the Slurm job (mem = 64G)")
    pods = {"image": "a", "resources": {"memory": "64Gi"}}
    kube: dict[str, Any] = {"launcher": "kubernetes", "kubernetes": pods}
    assert there(**kube, slurm={"mem": "1G"}) == (64 * GIB, "the pod (resources.memory = 64Gi)")
    assert there(**slurm, slurm={"mem": 0}) == (10**12, "cluster c (memory_bytes)")
    assert there(10**9, memory_bytes=10**12)[1] == "this machine"


def test_sizes_as_slurm_reads_them() -> None:
    assert [slurm_bytes(size) for size in (0, "0", 1024, "64G", "512m", "2T", "100K")] == [
        None,
        None,
        GIB,
        64 * GIB,
        512 * 2**20,
        2 * 2**40,
        102400,
    ]
    with pytest.raises(ValueError, match="lots"):
        slurm_bytes("lots")


def test_the_fullest_node_of_a_pipeline() -> None:
    """Stages lie on nodes in their order; one node may hold several, or a part of one."""
    job = job_of(shape(**WIDE), 2, nodes=2, parallelism={"pipeline_model_parallel_size": 4})
    found = plan_of(job)
    assert found.memory and found.host_memory
    each = [rank.total_bytes for rank in found.memory.stages]
    assert found.host_memory.needed_bytes == max(each[0] + each[1], each[2] + each[3])
    wide = plan_of(
        job_of(shape(**WIDE), 3, nodes=2, parallelism={"pipeline_model_parallel_size": 2})
    )
    assert wide.memory and wide.host_memory
    first, second = (rank.total_bytes for rank in wide.memory.stages)
    assert wide.host_memory.needed_bytes == 3 * max(first, second)
    # 6 ranks a stage: node 1 has two of each
    uneven = plan_of(
        job_of(shape(**WIDE), 4, nodes=3, parallelism={"pipeline_model_parallel_size": 2})
    )
    assert uneven.memory and uneven.host_memory
    first, second = (rank.total_bytes for rank in uneven.memory.stages)
    assert uneven.host_memory.needed_bytes == max(4 * first, 2 * first + 2 * second, 4 * second)


def test_copies_for_saves_lie_in_the_memory_of_the_node() -> None:
    def needed(**keys: Any) -> int:
        return host_of(job_of(shape(**WIDE), 8, device=BIG, precision="bf16", **keys)).needed_bytes

    assert needed() == 8 * RANK_BYTES
    plan = plan_of(job_of(shape(**WIDE), 8, device=BIG, precision="bf16"))
    assert plan.memory and plan.parameters
    assert needed(checkpoint={"save_async": True}) == 8 * (
        RANK_BYTES + plan.memory.fullest.parameter_bytes + plan.memory.fullest.optimizer_bytes
    )
    cluster = {"memory_bytes": 8 * RANK_BYTES}
    job = job_of(
        shape(**WIDE),
        8,
        device=BIG,
        precision="bf16",
        checkpoint={"save_async": True},
        cluster=cluster,
    )
    (objection,) = plan_of(job).objections
    assert objection.code == "host-memory" and objection.changes == (
        {"checkpoint.save_async": False},
    )


def test_one_machine_is_one_node() -> None:
    job = job_of(shape(heads=4), 4, nodes=2048, cluster={"launcher": "local"})
    (objection,) = plan_of(job).objections
    assert (objection.code, objection.key, objection.changes) == (
        "local-is-one-node",
        "nodes",
        ({"nodes": 1},),
    )
    for launcher in ("ssh", "pdsh", "slurm"):
        cluster = {"launcher": launcher, "memory_bytes": 10**12}
        assert plan_of(job_of(shape(heads=4), 4, nodes=2, cluster=cluster)).feasible


def test_a_precision_that_the_device_does_not_have() -> None:
    v100 = built_in_device("v100-sxm-32gb")
    (objection,) = plan_of(job_of(device=v100, precision="bf16")).objections
    assert (objection.code, objection.key) == (
        "no-such-precision",
        "training.precision",
    ) and "V100 SXM2 32 GB" in objection.message
    assert objection.changes == ({"training.precision": "fp16"}, {"training.precision": "fp32"})
    for device in (
        v100,
        built_in_device("a100-sxm-40gb"),
        built_in_device("cuda"),
        gpu(None, peak_tflops={}),
    ):
        for precision in ("fp16", "fp32"):
            assert not plan_of(job_of(device=device, precision=precision)).objections
    # of any GPU nothing is known
    assert not plan_of(job_of(device=built_in_device("cuda"), precision="bf16")).objections


def test_memory_of_this_machine_and_of_its_group(tmp_path: Path) -> None:
    assert machine_bytes(tmp_path) is None
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal:       1000 kB\nMemFree: 5 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/user/mine\n")
    assert machine_bytes(tmp_path) == 1024000
    folder = tmp_path / "sys/fs/cgroup/user/mine"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text("max\n")
    assert machine_bytes(tmp_path) == 1024000
    (folder.parent / "memory.max").write_text("500000\n")
    assert machine_bytes(tmp_path) == 500000


@pytest.mark.parametrize("slurm", [{"time": "soon"}, {"mem": "lots"}, {"mem": True}])
def test_values_of_slurm_that_a_plan_cannot_count_with(slurm: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="of Slurm"):
        Cluster.model_validate({"name": "c", "launcher": "slurm", "slurm": slurm})


def test_the_llama_on_two_ranks_of_a_small_machine() -> None:
    """It was called feasible on a machine of 23 GiB, at 39 GiB a rank."""
    job = load(Path(__file__).resolve().parents[2], {}).resolve("llama-8b", ["cluster=here"]).job
    plan = plan_of(job, 23 * GIB)
    assert codes(plan) == ["host-memory"] and plan.memory and plan.memory.fits is None


def test_a_family_that_the_engine_does_not_have() -> None:
    (objection,) = plan_of(job_of(shape("llama"), engine="neuronx-nemo", device=BIG)).objections
    assert (objection.code, objection.key) == (
        "no-such-family",
        "model.family",
    ) and "only gpt" in objection.message
    assert plan_of(job_of(shape("llama"), engine="megatron-lm", device=BIG)).feasible


def test_a_warmup_longer_than_training() -> None:
    plan = plan_of(job_of(lr_warmup_iters=30))
    assert not plan.objections and [note.code for note in plan.notes] == ["warmup-beyond-end"]
    assert (
        "warmup lasts 30 steps, training 10: the learning rate never reaches 0.001"
        in plan.notes[0].message
    )
    assert not plan_of(job_of(lr_warmup_iters=10)).notes


def test_nothing_is_saved_before_the_end_of_a_long_run() -> None:
    (note,) = plan_of(job_of(train_iters=1500, save_interval=10_000)).notes
    assert note.code == "saved-at-the-end-only" and "10,000 steps of 1,500" in note.message
    assert not plan_of(job_of(train_iters=1500, save_interval=1500)).notes
    assert not plan_of(job_of(train_iters=10, save_interval=20)).notes


def test_a_hostfile_that_nobody_reads_is_a_note() -> None:
    job = job_of()
    for launcher, codes in (("local", ["hostfile-unread"]), ("ssh", [])):
        given = {"launcher": launcher, "hostfile": "/hosts"}
        cluster = job.cluster.model_copy(update=given)
        plan = plan_of(job.model_copy(update={"cluster": cluster}))
        assert [note.code for note in plan.notes] == codes
